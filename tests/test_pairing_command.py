"""``klb-probe pair`` and its analyses on files written here: what they print, write and draw."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command import klb
from planted_signals import lied, owed, row, rows, signals, write
from test_pairing_baselines import Canned

from klb_probe.dialogue.player import Reply
from klb_probe.pair_command import PAIR_FILES, TABLES
from klb_probe.pairing import monitor
from klb_probe.pairing.excerpts import best_layer, case_slopes, example_rounds, turn_curves
from klb_probe.pairing.figures import auroc_figure, examples_figure, slopes_figure, turns_figure
from klb_probe.pairing.join import join
from klb_probe.pairing.read import read_signals

ANALYSES = Path(__file__).parents[1] / "analyses"
LENSES = ("margin", "logit", "random 0", "random 1")
MADE = rows(n_samples=4, n_cases=8)
WITH_FAILED = [*MADE, {**row("none", 9, 0, True, False), "gate_passed": False, "gate": "failed"}]


def margin(one, lens, layer):
    return (1.0 if owed(one) else -1.0) - 3.0 * lied(one) * (lens == "margin") * (layer == 2)


def frame(made=MADE, **keys):
    return signals(made, margin, lenses=LENSES, layers=3, turns=2, noise=0.5, **keys)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairing")
    read, run = write(folder, WITH_FAILED, frame(WITH_FAILED, positions=("before_reply", "action", "gate")))
    assert klb("pair", read, run, "--position", "before_reply,action") == 0
    return read, run


def test_files(written):
    read, _ = written
    pairs = read / "pairs"
    assert sorted(path.name for path in pairs.iterdir()) == sorted([*TABLES, "pairing.json"])
    table = pd.read_csv(pairs / "pairs.csv")
    assert len(table) == len(MADE) * 2 * 4 * 3
    assert set(table["position"]) == {"before_reply", "action"}
    record = json.loads((pairs / "pairing.json").read_text())
    assert (record["counts"]["scored"], record["counts"]["unscored_with_signals"]) == (len(MADE), 1)
    assert record["manifest"]["unmapped"] == 1
    assert record["bootstrap"] == {"draws": 10_000, "level": 0.95, "over": "trajectories, as many of every condition"}
    chosen = pd.read_csv(pairs / "selection.csv")
    assert best_layer(chosen, "before_reply", "margin") == 2
    assert set(pd.read_csv(pairs / "statistics.csv")["lens"]) == {"margin", "logit"}


def test_printed(written, tmp_path, capsys):
    read, run = written
    assert klb("pair", read, run, "--seed", 1, "--out", tmp_path) == 0
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if line.startswith("before_reply J-Lens"))
    assert line.split()[2] == "2"
    n_lies = sum(map(lied, MADE))
    assert line.endswith(f"{n_lies} / {sum(map(owed, MADE)) - n_lies}")
    assert "1 rounds not scored (1 with signals, kept apart); 1 moments unmapped" in text
    assert "What this does not show" in text
    assert "a rules judge graded" in text
    assert "rests on 8 trajectories" in text


def test_same_seed_same_numbers(written, tmp_path):
    read, run = written
    for name in ("a", "b"):
        assert klb("pair", read, run, "--position", "action", "--out", tmp_path / name) == 0
    for name in TABLES:
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()


def test_nothing_is_replaced_unasked(written, capsys):
    assert klb("pair", *written) == 2
    assert "exists" in capsys.readouterr().err


def test_mistakes_are_one_line(tmp_path, capsys):
    read, run = write(tmp_path, MADE, frame(MADE[3:]))
    out = tmp_path / "out"

    def told(*arguments):
        assert klb("pair", *arguments, "--out", out) == 2
        assert not out.exists()
        (line,) = capsys.readouterr().err.splitlines()
        return line

    whole, _ = write(tmp_path / "whole", MADE, frame())
    assert "3 on file have no signals" in told(read, run)
    assert "no signals at here; known positions: gate" in told(whole, run, "--position", "here")
    assert "no signals at claim" in told(whole, run, "--position", "claim,before_reply")
    assert "holds no signals.parquet" in told(run, run)
    assert "no such file or folder" in told(read, tmp_path / "none")
    assert "--monitor rules" in told(whole, run, "--monitor", "rules")
    assert "not come to its end" in told(write(tmp_path / "part", MADE, frame(), complete=False)[0], run)
    (read / "signals.parquet").write_bytes(b"no table")
    assert "cannot be read" in told(read, run)


def test_few_lies_and_off_policy_are_said(tmp_path, capsys):
    made = rows(n_samples=2, lie_rate=0.0)
    assert klb("pair", *write(tmp_path, made, frame(made, positions=("before_reply", "claim")), policy="off")) == 0
    text = capsys.readouterr().out
    assert "not estimable (n=0)" in text
    assert "nothing is known about lying" in text
    assert "off-policy" in text
    assert "claims exist in lies only" in text


def test_a_monitor_is_asked_about_owed_rounds(tmp_path, monkeypatch, capsys):
    player = Canned([Reply('{"lie": 90}' if lied(one) else '{"lie": 5}') for one in MADE if owed(one)])
    monkeypatch.setattr(monitor, "open_monitor", lambda spec, seed: player)
    read, run = write(tmp_path, MADE, frame())
    assert klb("pair", read, run, "--monitor", "endpoint:some") == 0
    assert len(player.asked) == sum(map(owed, MADE))
    beside = pd.read_csv(read / "pairs" / "baselines.csv")
    assert beside.loc[(beside["baseline"] == "monitor") & (beside["condition"] == "all"), "value"].tolist() == [1.0]
    record = json.loads((read / "pairs" / "pairing.json").read_text())["monitor"]
    assert record == {"model": "canned", "asked": len(player.asked), "unusable": 0}
    assert len(pd.read_csv(read / "pairs" / "monitor.csv")) == len(player.asked)
    assert klb("pair", read, run, "--overwrite") == 0
    assert not (read / "pairs" / "monitor.csv").exists()
    assert set(PAIR_FILES) >= {path.name for path in (read / "pairs").iterdir()}


def test_the_command_needs_no_torch(written, tmp_path):
    source = "import sys; sys.argv = ['klb-probe', 'pair', *sys.argv[1:]]\nfrom klb_probe import cli\ntry: cli.app()\n"
    source += "except SystemExit: pass\nassert 'torch' not in sys.modules"
    read, run = written
    subprocess.run([sys.executable, "-c", source, read, run, "--out", tmp_path], check=True)


def paired_of(written):
    read, _ = written
    return join(read_signals(read)[0], WITH_FAILED, ["before_reply"]), pd.read_csv(read / "pairs" / "pairs.csv")


def test_curves_slopes_and_examples_are_means_of_the_readings(written):
    paired, pairs = paired_of(written)
    curves, readings = turn_curves(paired, "before_reply", "margin", 2, draws=100)
    for line in curves.itertuples():
        values = readings.loc[(readings["lied"] == line.lied) & (readings["turn"] == line.turn), "margin"]
        assert (line.value, line.n) == (pytest.approx(values.mean()), len(values))
        assert line.low < line.value < line.high
    assert set(curves["turn"]) == {0, 1}
    slopes = case_slopes(pairs, "before_reply", "margin", 2)
    here = pairs[(pairs["position"] == "before_reply") & (pairs["lens"] == "margin") & (pairs["layer"] == 2) & pairs["owed"]]
    for line in slopes.itertuples():
        lies = here[(here["case"] == line.case) & here["lied"]]["margin"]
        assert (line.lied, line.n_lied) == (pytest.approx(lies.mean()), len(lies))
    (_, highest), (_, lowest), (_, other) = example_rounds(pairs, "before_reply", "margin", 2)
    margins = here.set_index("round_id")["margin"]
    lies = here.set_index("round_id")["lied"]
    assert (margins[highest], margins[lowest]) == (margins[lies].max(), margins[lies].min())
    assert not lies[other]


def test_figures_draw_what_the_tables_hold(written):
    paired, pairs = paired_of(written)
    read, _ = written
    curves, readings = turn_curves(paired, "before_reply", "margin", 2, draws=100)
    (axis,) = turns_figure(curves, readings, "t").axes
    assert "(logits)" in axis.get_ylabel()
    thick = {line.get_label(): line.get_ydata() for line in axis.lines if "rounds" in line.get_label()}
    drawn = next(values for label, values in thick.items() if label.startswith("lies"))
    np.testing.assert_allclose(drawn, curves.loc[curves["lied"], "value"])

    statistics, beside = (pd.read_csv(read / "pairs" / f"{name}.csv") for name in ("statistics", "baselines"))
    figure = auroc_figure(statistics, beside, "t")
    axis = next(axis for axis in figure.axes if axis.get_title().startswith("before_reply ("))
    scores = statistics[(statistics["statistic"] == "auroc") & (statistics["condition"] == "all")]
    scores = scores[(scores["position"] == "before_reply") & (scores["lens"] == "margin")]
    lines = {line.get_label(): line.get_ydata() for line in axis.lines}
    np.testing.assert_allclose(lines["J-Lens"], scores["value"])
    own = beside[(beside["baseline"] == "own final margin") & (beside["condition"] == "all")]
    assert lines["own final margin"][0] == own.loc[own["position"] == "before_reply", "value"].item()
    assert {"TF-IDF", "text length", "95 % of random readouts"} <= set(lines)

    slopes = case_slopes(pairs, "before_reply", "margin", 2)
    (axis,) = slopes_figure(slopes, "t").axes
    np.testing.assert_allclose([line.get_ydata() for line in axis.lines[: len(slopes)]], slopes[["honest", "lied"]])
    assert len(axis.texts) == len(slopes)
    np.testing.assert_allclose(axis.lines[-1].get_ydata(), slopes[["honest", "lied"]].mean())


def test_figures_without_anything_to_draw():
    empty = pd.DataFrame(columns=["case", "honest", "lied", "n_honest", "n_lied"])
    assert "no case has both" in slopes_figure(empty, "t").axes[0].texts[0].get_text()
    examples_figure([], "t").canvas.draw()


@pytest.mark.parametrize(
    ("script", "files"),
    [
        ("round_margins", ["round_margins.png", "round_margins.csv"]),
        ("lie_pairing", ["auroc_by_layer.png", "within_case.png", "examples.png", "within_case.csv"]),
    ],
)
def test_analyses(written, tmp_path, monkeypatch, script, files):
    read, run = written
    arguments = ["--signals", read, "--run", run, "--pairs", read / "pairs", "--out", tmp_path / "drawn"]
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    runpy.run_path(str(ANALYSES / f"{script}.py"), run_name="__main__")
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == sorted(files)
