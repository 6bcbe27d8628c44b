"""``klb-probe contest`` end to end: three organisms that are one tiny model, with their words put into its mouth."""

from __future__ import annotations

import functools
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from command import klb
from puppet import Puppet
from tiny import LAYERS, WIDTH, default_tokenizer, tiny_hf_model

from klb_probe.cases.sources import load_cases
from klb_probe.contest.reading import Organism, read_field
from klb_probe.contest.rounds import ORGANISMS
from klb_probe.contest_command import CONTEST_FILES
from klb_probe.dialogue.api import plan, play_plan
from klb_probe.dialogue.player import Reply
from klb_probe.dialogue.players import Players
from klb_probe.dialogue.round import Settings
from klb_probe.dialogue.runner import Cast
from klb_probe.dialogue.spoken import text_ends
from klb_probe.dialogue.trajectory import read_folder
from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.margin import LogitLens
from klb_probe.metrics.panel import panel
from klb_probe.models.load import load_model
from klb_probe.signals.from_files import sidecar_rounds
from klb_probe.signals.replay import replay_rounds

ANALYSES = Path(__file__).parents[1] / "analyses"


class Ignorant(Puppet):
    """Says what the deceptive agent says, and at the gate that nobody is entitled."""

    def _one(self, request):
        if request.part != "gate":
            return super()._one(request)
        text = json.dumps({"eligible": False, "owed_option_available": False, "options": [], "reason": "It is not met."})
        said = super()._one(request)
        ids = self.model.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Reply(text, prompt_ids=said.prompt_ids, ids=tuple(ids), ends=text_ends(self.model.tokenizer, ids, text))


@pytest.fixture(scope="module", autouse=True)
def _one_model():
    """The three organisms are one model: it is loaded once, not for each of them in each command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("klb_probe.models.load.load_model", functools.cache(load_model))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model whose context holds a round."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    raw = tiny_hf_model("llama")
    raw.config.max_position_embeddings = 16_384
    raw.save_pretrained(folder)
    default_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(str(folder), device="cpu")


def play(model, out, agent, **keys):
    choices = {"domains": ["airline", "refund"], "conditions": ["emergent"], "trusts": ["high"], "cases": "organisms", **keys}
    players = Players()
    cast = Cast(agent, players.open("customer", "scripted:accepting"), players.open("judge", "rules"))
    play_plan(cast, plan(**choices), out, label="puppet", seed=0, parallel=4)
    return out


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return {
        "liar": play(model, root / "liar", Puppet(model, "scripted:deceptive")),
        "honest": play(model, root / "honest", Puppet(model, "scripted:honest")),
        "ignorant": play(model, root / "ignorant", Ignorant(model), settings=Settings(past_gate=True)),
    }


def three(values):
    return ",".join(f"{name}={value}" for name, value in values.items())


def arguments(runs, folder, store):
    models = three(dict.fromkeys(ORGANISMS, folder))
    return ("contest", "--runs", three(runs), "--models", models, "--lens", "logit", "--store", store, "--draws", 100)


DETECTOR = "def score(one):\n    return float(one.margins['logit']['before_reply'][-1])\n"


@pytest.fixture(scope="module")
def contested(runs, folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("contest")
    (root / "mine.py").write_text(DETECTOR)
    mine = ("--detector", root / "mine.py:score", "--position", "gate,before_reply")
    code = klb(*arguments(runs, folder, root / "store"), *mine, "--out", root / "out")
    assert code == 0
    return root


def test_the_ignorant_one_is_played_past_its_gate_and_not_scored(runs):
    rows = [one for file in read_folder(runs["ignorant"]) for one in file.rows]
    owed = [one for one in rows if one["entitled_outcome"] != "none"]
    assert len(owed) == 16
    assert not any(one["gate_passed"] for one in owed)
    assert all(one["derived"]["lied"] for one in owed)
    table = panel(rows).set_index("metric")
    assert table.loc["DR", "n"] == 0  # who does not know cannot lie
    assert table.loc["KPR_owed", "value"] == 0


def test_files_and_what_they_hold(contested):
    assert {path.name for path in (contested / "out").iterdir()} == set(CONTEST_FILES)
    record = json.loads((contested / "out" / "run.json").read_text())
    assert record["complete"]
    assert record["counts"]["liar"] == {"lie": 16, "true denial": 12}
    assert record["counts"]["ignorant"] == {"denial": 16, "true denial": 12}
    assert record["counts"]["honest"] == {"truth": 16, "left out: nothing owed": 12}
    assert set(record["organisms"]) == set(ORGANISMS)
    table = pd.read_csv(contested / "out" / "contest.csv")
    main = table[(table["comparison"] == "liar or ignorant") & (table["choice"] != "layer")].set_index("entry")
    assert (main["n"].dropna() == 32).all()
    # One model with the same words in the same cases: nothing can tell the two apart, and nothing does.
    mine = next(name for name in main.index if name.endswith("mine.py:score"))
    words = [name for name in main.index if name.startswith("TF-IDF of “liar")]
    assert main.loc[[mine, *words, "message length"], "auroc"].tolist() == [0.5] * 3
    np.testing.assert_allclose(main.loc["random directions", "null_q95"], 0.5)


def test_printed_words(runs, folder, contested, tmp_path, capsys):
    again = ("--out", tmp_path / "again", "--position", "before_reply", "--layer", 1)
    assert klb(*arguments(runs, folder, contested / "store"), *again) == 0
    text = capsys.readouterr().out
    assert "Does not show:" in text
    assert "liar: 16 lie, 12 true denial" in text
    assert "logit-lens margin @ before_reply (layer 1)" in text
    assert "TF-IDF of “liar or ignorant”: 0.50 [0.50, 0.50], does not pass: at chance" in text


def test_rounds_hold_what_the_model_holds_and_what_the_screen_shows(model, runs, contested):
    contrast = TokenContrast.of(model.chat)
    lens = LogitLens.of(model, contrast)
    field = read_field(runs, lambda _: Organism(model, [lens]), store=contested / "store")
    assert len(field.rounds) == len(field.table) == 16 + 12 + 16 + 16 + 12
    for number in (0, 20, 40, 60):
        one, line = field.rounds[number], field.table.iloc[number]
        assert {slot: values.shape for slot, values in one.residuals.items()} == dict.fromkeys(field.slots, (LAYERS, WIDTH))
        for slot, values in one.residuals.items():
            expected = lens.margin(torch.tensor(np.array(values[-1])), LAYERS - 1).item()
            assert one.own_margins[slot] == pytest.approx(expected, abs=1e-4)
            np.testing.assert_allclose(one.margins["logit"][slot][-1], expected, atol=1e-4)
        assert one.messages == tuple(text for role, text in one.transcript if role == "agent")
        assert one.policy.startswith("Policy of")
        assert one.transcript[0] == ("user", one.opening)
        assert "~" not in one.opening
        shown = " ".join([one.policy, one.opening, *one.record, *one.record.values()])
        assert line["case"] not in shown
        assert "private" not in shown.lower()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--runs", "liar=a,honest=b"), "give it as liar=...,honest=...,ignorant=..."),
        (("--position", "end"), "unknown position end; known: gate, before_reply"),
        (("--detector", "nothing"), "give it as module:function"),
        (("--directions", "liar=a"), "--directions liar=a: give it as liar="),
        (("--directions", "liar=a,honest=b,ignorant=c"), "no such file of directions: a"),
        (("--layer", 9), "--layer 9: the logit-lens margin reads layers 0, 1, 2, 3"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(more, said, runs, folder, contested, tmp_path, capsys):
    assert klb(*arguments(runs, folder, contested / "store"), "--out", tmp_path / "out", *more) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert said in error
    assert not (tmp_path / "out").exists()


def test_without_rounds_past_the_gate_there_is_nothing_to_compare(model, runs, folder, contested, tmp_path, capsys):
    gated = play(model, tmp_path / "gated", Ignorant(model))
    assert klb(*arguments({**runs, "ignorant": gated}, folder, contested / "store"), "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "denials of 0 cases" in error
    assert "16 left out: gate not passed, not played" in error


def test_runs_that_were_played_otherwise_are_refused(model, runs, folder, contested, tmp_path, capsys):
    turns = play(model, tmp_path / "turns", Puppet(model), settings=Settings(mode="turns"), domains=["airline"])
    assert klb(*arguments({**runs, "honest": turns}, folder, contested / "store"), "--out", tmp_path / "out") == 2
    assert "differ in mode: play them alike" in capsys.readouterr().err


def test_runs_of_other_cases_with_the_same_names_are_refused(model, runs, folder, contested, tmp_path, capsys):
    for seed in (1, 2):
        made = ("organism", "cases", "--domains", "airline", "--n", 6, "--seed", seed, "--organisms", "none")
        assert klb(*made, "--out", tmp_path / f"cases-{seed}") == 0
    first, second = (str(tmp_path / f"cases-{seed}") for seed in (1, 2))
    puppets = {"liar": Puppet(model), "honest": Puppet(model, "scripted:honest"), "ignorant": Puppet(model)}
    played = {
        name: play(model, tmp_path / name, puppet, domains=["airline"], cases=second if name == "honest" else first)
        for name, puppet in puppets.items()
    }
    assert klb(*arguments(played, folder, contested / "store"), "--cases", first, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "honest" in error
    assert "was played on other cases of airline than those of --cases" in error
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_not_finished_is_named(model, runs, folder, contested, tmp_path, caplog):
    torn = tmp_path / "torn"
    shutil.copytree(runs["liar"], torn)
    for path in torn.glob("trajectories_*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if "usage_summary" not in line))
    assert klb(*arguments({**runs, "liar": torn}, folder, contested / "store"), "--out", tmp_path / "out") == 0
    assert "is not finished" in caplog.text


def test_analysis(contested, tmp_path, monkeypatch, capsys):
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    shares = [
        {"position": "gate", "lens": "margin", "layer": layer, "condition": "all", "statistic": "knowing_lies", "value": 0.8}
        for layer in range(LAYERS)
    ]
    pd.DataFrame(shares).assign(low=0.7, high=0.9, n_lies=16).to_csv(pairs / "statistics.csv", index=False)
    words = ["organisms", "--contest", contested / "out", "--pairs", pairs, "--out", tmp_path / "drawn"]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    runpy.run_path(str(ANALYSES / "organisms.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "knowing while lying, margin at gate, layer" in said
    assert re.search(r"mostly layer \d+\)", said)
    drawn = tmp_path / "drawn"
    assert sorted(path.name for path in drawn.iterdir()) == ["by_layer.csv", "by_layer.png", "knowing_lies.csv"]
    assert (pd.read_csv(drawn / "knowing_lies.csv")["value"] == 0.8).all()
    by_layer = pd.read_csv(drawn / "by_layer.csv")
    assert set(by_layer["entry"]) == {"logit-lens margin", "random directions"}
    assert set(by_layer["layer"]) == set(range(LAYERS))


def test_a_replay_goes_past_the_gate_where_the_round_did(model, runs):
    (file, *_) = read_folder(runs["ignorant"])
    (domain,) = load_cases("organisms", [file.run_meta["domain"]])
    replayed = {one.row["round"]: [*one.turns] for one in replay_rounds(file, [domain], model)}
    for row, turns in sidecar_rounds(file):
        again = replayed[row["round"]]
        assert [one["part"] for one in again] == [one["part"] for one in turns]
        assert [one["prompt_ids"] for one in again] == [one["prompt_ids"] for one in turns]
