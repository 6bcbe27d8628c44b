"""``docs/file_formats.md`` against what the commands write: files and columns, on a tiny model, for real."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from command import klb
from doc_commands import ROOT
from tiny import default_tokenizer, tiny_hf_model

PAGE = (ROOT / "docs" / "file_formats.md").read_text(encoding="utf-8")
# Columns that are there only on some runs, as the page says beside the table.
SOMETIMES = {
    "run/trajectories.jsonl": {"error", "malformed", "malformed_firstmsg"},
    "run/turns.jsonl": {"span_missing"},
}
_ROW = re.compile(r"^\| (`[^|]+) \|", re.MULTILINE)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Output folders of the commands, by the name the page has for them."""
    root = tmp_path_factory.mktemp("formats")
    tiny = root / "tiny"
    raw = tiny_hf_model("llama")
    raw.config.max_position_embeddings = 8192  # a round is longer than the tiny models' usual context
    raw.save_pretrained(tiny)
    default_tokenizer().save_pretrained(tiny)
    (root / "text.txt").write_text("Some ordinary text to fit on, which is long enough for one prompt of it.\n\n" * 4)
    model = ("--model", tiny, "--device", "cpu")
    few = ("--domains", "airline", "--per-kind", 1, "--trust", "low")
    commands = {
        "jlens": ("jlens", *model, "--lens", "logit", "--domains", "refund", "--quick"),
        "view": ("jlens", *model, "--lens", "logit", "--domains", "refund", "--quick", "--positions", "all", "--top-k", 2),
        "run": ("run", "--agent", tiny, "--device", "cpu", *few, "--conditions", "emergent", "--max-tokens", 8, "--past-gate"),
        "liar": ("run", "--agent", "scripted:deceptive", *few),
        "rounds": ("rounds", root / "liar", "--replay", *model, "--lens", "logit"),
        "score": ("score", root / "liar"),
        "pair": ("pair", root / "rounds", root / "liar"),
        "probe": (
            *("probe", *model, "--lens", "logit", "--domains", "airline,debt,refund", "--quick", "--question", "framing"),
            *("--estimators", "mean_difference", "--shuffles", 1, "--store", root / "residuals"),
        ),
        "steer": (
            *("steer", *model, "--probe", root / "probe" / "directions.safetensors", "--domains", "refund", "--random", 1),
            *("--scales", "0.1", "--mode", "add"),
        ),
        "lens": ("fit", *model, "--kind", "full", "--corpus", root / "text.txt", "--n", 2, "--skip-first", 4),
        "lens-eval": ("lens", "eval", root / "lens.pt", *model),
        "cases": ("cases", "export", "--domains", "airline"),
        "organism-data": ("organism", "data", "--kind", "honest", "--domains", "airline", "--n", 12),
    }
    files = {"lens": "lens.pt", "cases": "cases/cases.jsonl", "organism-data": "organism-data/examples.jsonl"}
    for name, command in commands.items():
        assert klb(*command, "--out", root / files.get(name, name)) == 0, name
    return root


def columns_of(path: Path) -> set[str]:
    """The columns of a table; of JSON lines, every key that some line has."""
    if path.suffix == ".parquet":
        return set(pd.read_parquet(path).columns)
    if path.suffix == ".csv":
        return set(pd.read_csv(path, nrows=1).columns)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {key for row in rows if not row.keys() & {"run_meta", "usage_summary"} for key in row}


def documented_columns() -> dict[str, set[str]]:
    """By ``folder/file``, what the first column of its table names."""
    parts = re.split(r"^#{2,3} ", PAGE, flags=re.MULTILINE)
    named = {match[1]: part for part in parts if (match := re.match(r"`([\w-]+/[\w.]+)`", part))}
    return {name: set(re.findall(r"`(\w+)`", " ".join(_ROW.findall(part)))) for name, part in named.items()}


def documented_files(command: str) -> set[str]:
    """What the table of files below a command's heading names."""
    (part,) = re.findall(rf"^## {re.escape(command)}\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE))


@pytest.mark.parametrize("name", sorted(set(documented_columns()) - {"organism-train/training.csv"}))
def test_columns_are_those_of_real_files(name, outputs):
    folder, _, file = name.partition("/")
    if folder == "run":
        (path,) = outputs.glob(f"run/{file.partition('.')[0]}_*.jsonl")
        if file.startswith("trajectories"):  # a tiny model's gate is unparsed; a script's rounds have every key
            (path,) = outputs.glob("liar/trajectories_*.jsonl")
    else:
        path = outputs / folder / file
    found, said = columns_of(path), documented_columns()[name]
    sometimes = SOMETIMES.get(name, set())
    assert found - sometimes == said - sometimes


@pytest.mark.parametrize(
    ("command", "folder"),
    [("jlens", "jlens"), ("jlens --positions all", "view"), ("rounds", "rounds"), ("score", "score"), ("pair", "pair"),
     ("probe", "probe"), ("steer", "steer"), ("lens eval", "lens-eval")],
)  # fmt: skip
def test_files_are_those_that_are_written(command, folder, outputs):
    written = {path.name for path in (outputs / folder).iterdir()}
    said = documented_files(command)
    assert written <= said
    assert said - written <= {"monitor.csv", "generations.jsonl"}  # with --monitor and --generate only


def test_files_of_commands_that_are_not_run_here():
    from klb_probe.contest_command import CONTEST_FILES
    from klb_probe.organisms.check import ROUNDS, TABLES
    from klb_probe.organisms.evidence import EVIDENCE
    from klb_probe.organisms.training_files import FILES

    assert documented_files("contest") == set(CONTEST_FILES)
    assert documented_files("organism train") == set(FILES)
    assert documented_files("organism check") == {EVIDENCE, *TABLES, ROUNDS}
