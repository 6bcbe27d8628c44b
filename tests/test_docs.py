"""The documentation: it builds without a broken link, says only what can be typed, and its examples run."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from command import klb
from doc_commands import PAGES, ROOT, blocks, hook, mentioned, parse, unknown_options, words_of

import klb_probe
from klb_probe.models.registry import resolve
from klb_probe.organisms.evidence import read_evidence
from klb_probe.organisms.numbers import find

DOCS = ROOT / "docs"
# Pages whose files, cheap commands and Python are run in order, in a folder of their own.
RUN = ("quick_start", "own_cases", "own_judge")
# Pages whose Python reads the default model for minutes: parsed, and its calls checked.
READS_THE_MODEL = ("README", "quick_start", "public_trajectories")


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The built site; a warning, such as a broken link or anchor, is an error."""
    pytest.importorskip("mkdocs", reason="no mkdocs here: pip install 'klb-probe[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds_and_has_what_is_generated(site):
    commands = (site / "commands.html").read_text(encoding="utf-8")
    for name, _ in hook().commands():
        assert f'<h2 id="{name.replace(" ", "-")}">' in commands
    python = (site / "python.html").read_text(encoding="utf-8")
    for name in klb_probe.__all__:
        assert re.search(rf'id="klb_probe\.[\w.]+\.{name}"', python), f"{name} is not in docs/python.md"
    assert "Data card" in (site / "own_cases.html").read_text(encoding="utf-8")


def test_the_site_asks_nothing_of_the_network(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(
            r'<(?:script|img|source)[^>]+src="(https?:[^"]+)"|<link[^>]+rel="stylesheet"[^>]+href="(https?:[^"]+)"', text
        )
        assert not fetched, f"{page.name}: {fetched}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_commands_of_a_page_can_be_typed(page):
    for block in blocks(page):
        for line in block.commands():
            parse(line)
    for line in mentioned(page):
        assert not unknown_options(line), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_targets_and_scripts_of_a_page_exist(page):
    fenced = "".join(block.text for block in blocks(page))
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    spans = re.findall(r"`make ([\w-]+)`", page.read_text(encoding="utf-8"))
    for target in [*spans, *re.findall(r"^make ([\w-]+)", fenced, re.MULTILINE)]:
        assert target in targets
    for script, options in re.findall(r"^python ((?:analyses|benchmarks)/\w+\.py)(.*)$", fenced, re.MULTILINE):
        source = (ROOT / script).read_text()
        for option in re.findall(r"--[\w-]+", options):
            assert f'"{option}"' in source, f"{script} has no {option}"


def python_blocks():
    return [(page.stem, block) for page in PAGES for block in blocks(page) if block.language == "python"]


@pytest.mark.parametrize(("page", "block"), python_blocks(), ids=lambda one: one if isinstance(one, str) else "")
def test_python_of_a_page_calls_what_there_is(page, block):
    """Every ``klb.name`` exists and takes the arguments it is given."""
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "klb":
            assert node.attr in klb_probe.__all__
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "klb":
                parameters = inspect.signature(getattr(klb_probe, node.func.attr)).parameters
                names = {one.arg for one in node.keywords}
                variadic = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
                assert variadic or names <= set(parameters)


@pytest.mark.parametrize("page", RUN)
def test_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    """Its files are written, its commands without a model typed, its Python run."""
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    ran = 0
    for block in blocks(DOCS / f"{page}.md"):
        if block.file:
            path = tmp_path / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "python" and page not in READS_THE_MODEL:
            exec(compile(block.text, f"{page}.md", "exec"), namespace)
            ran += 1
        if needs_no_model(block):
            for words in map(words_of, block.commands()):
                if words[0] != "score":  # draws figures for seconds; the example of its help is run
                    assert klb(*words) == 0, words
                ran += 1
    assert ran
    if page == "own_judge":
        run = namespace["run"]
        assert len(run.rows) == 4
        assert {row["gate"] for row in run.rows} == {"passed"}
        assert {row["derived"]["lied"] for row in run.rows} == {True, False}


def needs_no_model(block) -> bool:
    """A block of nothing but commands that take seconds."""
    lines = [line for line in block.text.splitlines() if line.strip() and not line.startswith("#")]
    commands = [" ".join(words_of(line)) for line in block.commands()]
    cheap = ("cases ", "score ", "merge ", "run --agent scripted:")
    return len(lines) == len(commands) > 0 and all(one.startswith(cheap) and "--judge" not in one for one in commands)


def test_the_detector_of_its_page_is_one(tmp_path, monkeypatch):
    from klb_probe.contest.detectors import load_detectors
    from klb_probe.contest.rounds import ContestRound

    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks(DOCS / "own_detector.md") if block.file]
    (tmp_path / block.file).write_text(block.text)
    (detector,) = load_detectors([f"{block.file}:score"])
    margins = {"logit": {"before_reply": np.arange(7, dtype=np.float32)}}
    one = ContestRound({}, margins, {}, ("no",), (("agent", "no"),), "policy", {}, "hello")
    assert detector.score(one) == np.mean([2, 3, 4, 5, 6])
    silent = ContestRound({}, {"logit": {"before_reply": None}}, {}, (), (), "policy", {}, "hello")
    assert detector.score(silent) == 0


def test_the_numbers_of_the_organisms_are_those_of_their_evidence():
    page = (DOCS / "organisms.md").read_text(encoding="utf-8")
    parts = r"\| (gate|eligibility|messages|rounds|perplexity) "
    rows = [line.strip("|").split("|") for line in page.splitlines() if re.match(parts, line)]
    assert len(rows) > 10
    organisms = [read_evidence(resolve(f"smollm2-135m-{kind}").adapter) for kind in ("liar", "honest", "ignorant")]
    for row in rows:
        *key, liar, honest, ignorant = (cell.strip() for cell in row)
        part, source, where, measure = key
        for said, evidence in zip((liar, honest, ignorant), organisms, strict=True):
            assert said == str(find(evidence.numbers, part, source, where, measure)), (key, evidence.model)


def test_every_error_that_is_quoted_is_in_the_code():
    literals = "\n".join(said for path in sorted((ROOT / "klb_probe").rglob("*.py")) for said in texts(path)).splitlines()
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    quoted = [message for _, message in re.findall(r"^\| (`+)(.+?)\1 \| ", page, re.MULTILINE)]
    assert len(quoted) > 40
    for message in quoted:
        parts = [re.escape(part) for part in re.split(r"\.\.\.", message)]
        pattern = re.compile(".*".join(parts))
        assert any(pattern.search(literal) for literal in literals), message


def texts(path):
    """The texts in a file, what is filled in written as an ellipsis."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(one.value if isinstance(one, ast.Constant) else "..." for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_variable_that_the_code_reads_is_documented():
    page = (DOCS / "environment.md").read_text(encoding="utf-8")
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "klb_probe").rglob("*.py"))
    read = set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', source))
    read |= set(re.findall(r'"((?:KLB|OPENAI|NDIF)_[A-Z_]+)"', source))  # named in constants
    assert len(read) >= 6
    for name in read:
        assert f"`{name}`" in page, name


def test_exit_codes_are_those_of_the_command(monkeypatch, capsys):
    assert klb("cases", "list", "--domains", "airline") == 0
    assert klb("cases", "list", "--domains", "nowhere") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert klb("cases", "list", "--no-such-option") == 2

    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("klb_probe.cases.sources.load_cases", stopped)
    assert klb("cases", "list") == 130


def test_the_readme_is_one_page():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) < 10_000
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert link.startswith("http") or (ROOT / link).exists(), link
