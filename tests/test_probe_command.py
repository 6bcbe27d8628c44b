"""``klb-probe probe`` end to end on a tiny random model."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from command import SMALL_PROBE, klb
from rich.console import Console
from tiny import save_tiny_llama

from klb_probe.models.load import load_model
from klb_probe.probe_command import PROBE_FILES, print_results
from klb_probe.probes.directions import load_directions, load_probe

MEASURES = ("auroc", "balanced_accuracy", "recall_1_percent", "selectivity")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def probed(folder, tmp_path_factory):
    """One run, and its store."""
    root = tmp_path_factory.mktemp("probe")
    code = klb(
        "probe", "--model", folder, *SMALL_PROBE, "--question", "framing,lie", "--out", root / "out", "--store", root / "store"
    )
    assert code == 0
    return root


def test_a_run_writes_every_file_and_says_what_it_used(probed):
    assert {path.name for path in (probed / "out").iterdir()} == set(PROBE_FILES)
    run = json.loads((probed / "out" / "run.json").read_text())
    assert run["complete"]
    assert run["counts"] == {"scenarios": 96, "rounds": 0, "groups": 12, "domains": 3}
    assert run["arguments"]["question"] == "framing,lie"
    table = pd.read_csv(probed / "out" / "probes.csv")
    nested = table[(table["choice"] == "nested") & (table["feature"] == "residual")]
    assert nested["question"].tolist() == ["framing", "lie"]
    assert nested["n_groups"].tolist() == [12, 12]
    assert set(table["feature"]) >= {"shuffled labels", "random subspace", "random features", "bag of words", "prompt length"}
    for one in ("auroc_by_layer", "transfer", "scores"):
        assert (probed / "out" / f"{one}.png").stat().st_size > 10_000


def test_the_words_alone_tell_the_framing(probed):
    table = pd.read_csv(probed / "out" / "probes.csv")
    words = table[table["feature"] == "bag of words"].set_index("question")["auroc"]
    assert words["framing"] > 0.7
    assert words["lie"] < 0.8


def test_saved_directions_score_the_models_residuals_as_the_run_did(probed, folder):
    model = load_model(str(folder), device="cpu")
    path = probed / "out" / "directions.safetensors"
    directions = load_directions(path)
    directions.check(model)
    probe = load_probe(path, model, question="lie", layer=2)
    scores = probe.score(model.residuals([[1, 5, 9, 12]], [2], [-1])[0, :, 0])
    assert scores.shape == (1,)
    assert torch.isfinite(scores).all()


def test_residuals_are_read_once(probed, folder, tmp_path, monkeypatch):
    def never(*_: object, **__: object):
        raise AssertionError("the model was read again")

    monkeypatch.setattr("klb_probe.probes.extract.prefill", never)
    arguments = ("probe", "--model", folder, *SMALL_PROBE, "--question", "framing,lie", "--store", probed / "store")
    assert klb(*arguments, "--out", tmp_path / "again") == 0
    for name in ("probes.csv", "transfer.csv", "scores.csv"):
        assert (tmp_path / "again" / name).read_text() == (probed / "out" / name).read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--question", "lies"), "unknown question lies; known: framing, lie"),
        (("--estimators", "svm"), "unknown estimator svm; known: logistic"),
        (("--positions", "last"), "unknown position last; known: answer"),
        (("--split", "case"), "unknown split 'case'"),
        (("--question", "round_lie"), "pass a run"),
        (("--domains", "airline"), "4 groups; a probe needs at least 10"),
        (("--positions", "claim"), "claim"),
        (("--store-dtype", "float16"), "float16"),
        (("--scenarios", "/nowhere"), "--scenarios /nowhere: no such folder"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(arguments, said, probed, folder, tmp_path, capsys):
    code = klb("probe", "--model", folder, *SMALL_PROBE, "--store", probed / "store", "--out", tmp_path / "out", *arguments)
    error = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert error[-1].startswith("error: ")
    assert said in error[-1]
    assert not (tmp_path / "out").exists()


def test_a_folder_with_results_is_not_overwritten_unasked(probed, folder, capsys):
    before = (probed / "out" / "probes.csv").read_bytes()
    assert klb("probe", "--model", folder, *SMALL_PROBE, "--store", probed / "store", "--out", probed / "out") == 2
    said = capsys.readouterr().err
    assert "exists" in said
    assert "--resume" not in said
    assert (probed / "out" / "probes.csv").read_bytes() == before


def test_a_store_that_cannot_be_made_is_named_before_anything_is_read(folder, tmp_path, capsys):
    (tmp_path / "store").write_text("a file")
    assert klb("probe", "--model", folder, *SMALL_PROBE, "--store", tmp_path / "store", "--out", tmp_path / "out") == 2
    assert f"cannot be made: {tmp_path / 'store'} is a file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_stopped_run_says_how_to_go_on(folder, tmp_path, monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("klb_probe.probes.api.train_probes", stop)
    assert klb("probe", "--model", folder, *SMALL_PROBE, "--store", tmp_path / "store", "--out", tmp_path / "out") == 130
    assert f"kept in {tmp_path / 'store'}, and the same command goes on" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_narrow_terminal_hides_no_number():
    line = {
        **{"question": "lie", "position": "answer", "estimator": "logistic", "feature": "residual", "split": "domain"},
        **{"choice": "nested", "layer": 3, "n": 24, "n_positive": 12, "n_groups": 12, "note": "", "chosen": "3"},
        **{name: 0.61234 for measure in MEASURES for name in (measure, f"{measure}_low", f"{measure}_high")},
    }
    transfer = {**line, "family": "owed", "train": "deny: owed or not", "test": "honest: owed or not"}
    results = SimpleNamespace(probes=pd.DataFrame([line]), transfer=pd.DataFrame([transfer]))
    narrow = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    print_results(narrow, results, Path("out"))
    text = narrow.file.getvalue()
    assert re.search(r"logistic +0\.61 \[0\.61, 0\.61\]", text)
    assert re.search(r"deny: owed or not  honest: owed or not +answer +logistic", text)
    assert "…" not in text
