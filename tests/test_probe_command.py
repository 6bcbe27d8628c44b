"""``klb-probe probe`` end to end on a tiny random model."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch
from command import klb
from tiny import save_tiny_llama

from klb_probe.models.load import load_model
from klb_probe.probe_command import PROBE_FILES
from klb_probe.probes.directions import load_directions, load_probe

SMALL = (
    "--quick",
    "--domains",
    "airline,deposit,refund",
    "--estimators",
    "mean_difference",
    "--shuffles",
    1,
    "--lens",
    "logit",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def probed(folder, tmp_path_factory):
    """One run, and its store."""
    root = tmp_path_factory.mktemp("probe")
    code = klb(
        "probe", "--model", folder, *SMALL, "--question", "framing,lie", "--out", root / "out", "--store", root / "store"
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
    arguments = ("probe", "--model", folder, *SMALL, "--question", "framing,lie", "--store", probed / "store")
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
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(arguments, said, probed, folder, tmp_path, capsys):
    code = klb("probe", "--model", folder, *SMALL, "--store", probed / "store", "--out", tmp_path / "out", *arguments)
    error = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert error[-1].startswith("error: ")
    assert said in error[-1]
    assert not (tmp_path / "out").exists()


def test_a_folder_with_results_is_not_overwritten_unasked(probed, folder, capsys):
    before = (probed / "out" / "probes.csv").read_bytes()
    assert klb("probe", "--model", folder, *SMALL, "--store", probed / "store", "--out", probed / "out") == 2
    assert "exists" in capsys.readouterr().err
    assert (probed / "out" / "probes.csv").read_bytes() == before
