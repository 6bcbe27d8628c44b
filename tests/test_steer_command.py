"""``klb-probe steer`` from end to end on a tiny model: files, numbers, and mistakes."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from command import klb
from tiny import LAYERS, WIDTH, save_tiny_llama, tiny_hf_model

from klb_probe.cases.scenarios import eligibility_scenarios
from klb_probe.cases.sources import load_cases
from klb_probe.lens.contrast import TokenContrast
from klb_probe.models.load import load_model
from klb_probe.probes.directions import DirectionsMetadata, ProbeSet, save_directions
from klb_probe.probes.linear_probe import LinearProbe

LAST = LAYERS - 1
N_RANDOM = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def model(folder):
    return load_model(str(folder), device="cpu")


@pytest.fixture(scope="module")
def probe_file(folder, model):
    """Two questions' probes; those of ``behaviour`` are the model's own yes-minus-no direction."""
    contrast = TokenContrast.of(model.chat)
    rows = model.token_readout(contrast.token_ids).directions
    mean = torch.linspace(-0.5, 0.5, WIDTH).numpy()
    probes = [
        LinearProbe(
            question=question,
            estimator="logistic",
            position="answer",
            layer=layer,
            direction=direction,
            bias=0.0,
            mean=mean,
            norm=4.0,
            spread=1.0,
        )
        for question, direction in (("behaviour", (rows[0] - rows[1]).numpy()), ("lie", np.ones(WIDTH, np.float32)))
        for layer in range(LAYERS)
    ]
    sets = tuple(
        ProbeSet(question=name, estimator="logistic", position="answer", label="-", layer=LAST, n_rows=8)
        for name in ("behaviour", "lie")
    )
    metadata = DirectionsMetadata(
        model=model.identity,
        fingerprint=model.fingerprint,
        n_layers=LAYERS,
        d_model=WIDTH,
        layers=tuple(range(LAYERS)),
        sets=sets,
        seed=0,
        command="-",
        versions={},
    )
    path = folder.parent / "directions.safetensors"
    save_directions(path, probes, metadata)
    return path


@pytest.fixture(scope="module")
def command(folder, probe_file):
    return (
        "steer",
        "--probe",
        probe_file,
        "--model",
        folder,
        "--device",
        "cpu",
        "--domains",
        "airline",
        "--question",
        "behaviour",
    )


@pytest.fixture(scope="module")
def run(command, folder):
    out = folder.parent / "steered"
    assert klb(*command, "--scales", "0.1", "--random", N_RANDOM, "--generate", 2, "--out", out) == 0
    return out


def test_a_line_a_prompt_and_intervention(run):
    prompts = pd.read_csv(run / "steering_prompts.csv")
    assert len(prompts) == (8 * 2 * 2) * (1 + N_RANDOM) * 3  # situations x framings x wordings; directions; two doses, ablation
    keys = ["scenario", "framing", "question", "direction", "mode", "dose"]
    assert not prompts.duplicated(keys).any()
    assert prompts.loc[prompts["mode"] == "ablate", "dose"].isna().all()
    assert set(prompts.loc[prompts["mode"] == "add", "dose"]) == {-0.1, 0.1}
    assert prompts[["margin", "baseline"]].notna().all(axis=None)
    assert (prompts.groupby(["scenario", "framing", "question"])["baseline"].nunique() == 1).all()
    assert (prompts.groupby(["domain", "pair"])["entitled"].nunique() == 2).all()


def test_the_summary_says_what_the_prompts_say(run):
    prompts, summary = (pd.read_csv(run / name) for name in ("steering_prompts.csv", "steering.csv"))
    assert set(summary["framing"]) == {"honest", "deny", "all"}
    for framing in ("honest", "deny"):
        here = prompts[(prompts["framing"] == framing) & (prompts["direction"] == "probe") & (prompts["dose"] == 0.1)]
        change = here["margin"] - here["baseline"]
        lines = summary[(summary["framing"] == framing) & (summary["direction"] == "probe") & (summary["dose"] == 0.1)]
        lines = lines.set_index("statistic")
        assert lines.loc["yes_minus_no_change", "value"] == pytest.approx(change.mean(), abs=1e-4)
        toward = (change * np.where(here["question"] == "plain", 1, -1)).mean()
        assert lines.loc["toward_owed_change", "value"] == pytest.approx(toward, abs=1e-4)
        assert lines.loc["yes_minus_no_change", "low"] < change.mean() < lines.loc["yes_minus_no_change", "high"]
        assert (lines["n"].iloc[0], lines["n_pairs"].iloc[0]) == (16, 4)
        # The model's own yes-minus-no direction, at its last block: nothing random goes as far.
        assert lines.loc["yes_minus_no_change", "p_random"] == pytest.approx(1 / (1 + N_RANDOM), abs=1e-4)
        assert change.min() > 0


def test_margins_in_the_file_are_those_of_the_changed_model(run, model):
    """One prompt again, by hand, from the definition of the dose."""
    contrast = TokenContrast.of(model.chat)
    rows = model.token_readout(contrast.token_ids).directions
    unit = (rows[0] - rows[1]) / (rows[0] - rows[1]).norm()
    scenario = eligibility_scenarios(load_cases("ours", ["airline"]), ["honest", "deny"], quick=True)[5]
    residual = model.residuals([model.chat.encode(scenario.system, scenario.user)], [LAST], [-1])[0, 0, 0]
    lens = model.token_readout(contrast.token_ids)
    prompts = pd.read_csv(run / "steering_prompts.csv")
    mine = prompts[(prompts["prompt"] == 5) & (prompts["direction"] == "probe")]
    assert set(mine["scenario"]) == {scenario.situation.id}
    level = float(torch.linspace(-0.5, 0.5, WIDTH) @ unit)
    changed = {-0.1: residual - 0.4 * unit, 0.1: residual + 0.4 * unit}
    ablated = residual + (level - residual @ unit) * unit
    for row in mine.itertuples():
        expected = contrast.margin(lens.logits(ablated if row.mode == "ablate" else changed[row.dose]))
        assert row.margin == pytest.approx(float(expected), abs=1e-4)


def test_replies_are_kept_with_what_they_begin_with(run):
    lines = [json.loads(line) for line in (run / "generations.jsonl").read_text().splitlines()]
    assert len(lines) == (4 * 2 * 2) * (1 + 2 * 3)  # plain question; without, under the probe and under one random direction
    assert {line["begins"] for line in lines} <= {"Yes", "No", "neither"}
    assert {line["question"] for line in lines} == {"plain"}
    assert {line["direction"] for line in lines} == {"none", "probe", "random 1"}


def test_the_record_and_the_figure(run, probe_file):
    record = json.loads((run / "run.json").read_text())
    assert record["probe"]["file"] == str(probe_file)
    assert (record["probe"]["question"], record["probe"]["layer"], record["probe"]["norm"]) == ("behaviour", LAST, 4.0)
    assert record["counts"] == {"prompts": 32, "pairs": 4, "interventions": (1 + N_RANDOM) * 3}
    assert record["arguments"]["random"] == N_RANDOM
    assert record["arguments"]["at"] == "answer"
    assert (run / "steering.png").read_bytes().startswith(b"\x89PNG")


def test_every_token_instead_of_the_last(command, tmp_path, capsys):
    short = (*command, "--mode", "add", "--scales", "0.4", "--random", 1, "--framings", "deny", "--layer", 1)
    tables = {}
    for at, words in (("answer", "at the last prompt token"), ("all", "at every token")):
        assert klb(*short, "--at", at, "--out", tmp_path / at) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert f"changed {words}" in printed
        assert f"norms of the layer, {words};" in printed
        assert ("Only the last prompt token" in printed) == (at == "answer")
        assert json.loads((tmp_path / at / "run.json").read_text())["arguments"]["at"] == at
        tables[at] = pd.read_csv(tmp_path / at / "steering_prompts.csv")
    np.testing.assert_allclose(tables["answer"]["baseline"], tables["all"]["baseline"], atol=1e-4)
    assert (tables["answer"]["margin"] - tables["all"]["margin"]).abs().max() > 1e-2


def test_one_mode_another_layer_and_what_is_printed(command, tmp_path, capsys):
    short = (*command, "--mode", "ablate", "--random", 2, "--framings", "neutral", "--out", tmp_path)
    assert klb(*short, "--layer", 1) == 0
    printed = capsys.readouterr().out
    for words in (
        "behaviour (logistic, answer), layer 1",
        "ablate",
        "neutral",
        "Shows: ",
        "Does not show: ",
        "toward owed",
        "random",
    ):
        assert words in printed
    first = pd.read_csv(tmp_path / "steering.csv")
    assert set(first["mode"]) == {"none", "ablate"}
    assert set(first["framing"]) == {"neutral"}
    assert not (tmp_path / "generations.jsonl").exists()
    assert klb(*short, "--layer", 1) == 2  # not without --overwrite
    assert klb(*short, "--layer", 1, "--overwrite") == 0
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "steering.csv"), first)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--probe", "absent.safetensors"], ["no such file of directions"]),
        (["--question", "weather"], ["no such probe", "behaviour/logistic/answer"]),
        (["--layer", "9"], ["no layer 9"]),
        (["--mode", "subtract"], ["unknown --mode subtract"]),
        (["--scales", "0.1,big"], ["--scales", "0.1,big"]),
        (["--scales", "0"], ["--scales wants positive numbers"]),
        (["--at", "first"], ["unknown --at first", "answer or all"]),
        (["--framings", "all"], ["unknown framing all"]),
        (["--domains", "airlines"], ["unknown domain airlines"]),
        (["--contrast", "Yes"], ["YES/NO pairs"]),
    ],
)
def test_a_mistake_is_one_line_exit_2_and_nothing_written(command, tmp_path, capsys, arguments, words):
    out = tmp_path / "out"
    assert klb(*command, *arguments, "--out", out) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error
    assert not out.exists()


def test_a_probe_of_another_model_is_refused_by_name(folder, model, command, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tiny_hf_model("llama", seed=1).save_pretrained(other)
    capsys.readouterr()
    assert klb(*command, "--model", other, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.strip().count("\n") == 0
    assert "directions" in error
    assert model.name in error
    assert not (tmp_path / "out").exists()
