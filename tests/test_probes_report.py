"""Figures, printed tables and the reading of probes, on tables written here."""

from __future__ import annotations

import io
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from klb_probe.probes import tables
from klb_probe.probes.figures import auroc_by_layer, score_distributions, side_by_side, transfer_map
from klb_probe.probes.report import DOES_NOT_SHOW, WIDTH, reading, table, transfer_table

ESTIMATORS = ("logistic", "mean_difference", "mass_mean", "lat", "ccs")
LEARNED = {"framing": "deny or honest", "lie": "deny: owed or not", "entitlement": "honest: owed or not"}
NESTED = {"framing": 0.98, "lie": 0.54, "entitlement": 0.84}
WORDS = {"framing": 1.0, "lie": 0.5, "entitlement": 0.55}
SCORES = ("auroc", "balanced_accuracy", "recall_1_percent", "selectivity")
TRANSFER = {
    ("framing", "deny or honest"): {"deny or honest": 0.98, "incentive or honest": 0.81, "secret or honest": 0.72},
    ("framing", "incentive or honest"): {"deny or honest": 0.77, "incentive or honest": 0.96, "secret or honest": 0.8},
    ("owed", "honest: owed or not"): {"honest: owed or not": 0.84, "deny: owed or not": 0.71, "rounds: lied or not": None},
    ("owed", "deny: owed or not"): {"honest: owed or not": 0.56, "deny: owed or not": 0.54, "rounds: lied or not": None},
}


def probe_row(question, position, estimator, feature, choice, layer, auroc, *, half=0.05, n=224, split="domain", **more):
    row = {"question": question, "position": position, "estimator": estimator, "feature": feature, "split": split}
    row |= {"choice": choice, "layer": layer, "inverse_l2": np.nan, "chosen": "", "note": np.nan}
    for name, value in zip(SCORES, (auroc, auroc * 0.92, auroc * 0.6, auroc - 0.5), strict=True):
        row |= {name: value, f"{name}_low": value - half, f"{name}_high": min(value + half, 1.0)}
    return row | {"n": n, "n_positive": n // 2, "n_groups": 112, "cosine_jlens": 0.1, "cosine_logit": 0.2} | more


def probes_of(questions=tuple(LEARNED), positions=("answer", "reply_mean"), estimators=ESTIMATORS, layers=4, seed=0):
    """A table as the command writes it: every control, curves that rise with depth."""
    rng, rows = np.random.default_rng(seed), []
    for question in questions:
        for position in positions:
            at, n = (question, position), 448 if question == "framing" else 224
            for which, name in enumerate(estimators):
                best = 0.5 + (NESTED.get(question, 0.7) - 0.5) * (1 - 0.12 * which)
                rows.append(probe_row(*at, name, tables.PROBE, "nested", layers // 2 + which // 2, best, n=n))
                for layer in range(layers):
                    rise = 0.5 + (best - 0.5) / (1 + np.exp(4 - 12 * layer / layers)) + 0.01 * rng.normal()
                    rows.append(probe_row(*at, name, tables.PROBE, "layer", layer, min(rise, 1.0), n=n))
                    for feature, value in ((tables.SHUFFLED, 0.5), (tables.SUBSPACE, 0.4 + 0.6 * rise - 0.1)):
                        noise = 0.02 * rng.normal()
                        rows.append(probe_row(*at, name, feature, "layer", layer, min(value + noise, 1.0), n=n))
                for feature in (tables.SHUFFLED, tables.SUBSPACE):
                    rows.append(probe_row(*at, name, feature, "nested", layers // 2, 0.5 + 0.03 * which, n=n))
                rows.append(probe_row(*at, name, tables.RANDOM, "none", np.nan, 0.52, n=n))
            for feature, value in ((tables.JLENS, 0.62), (tables.LOGIT, 0.57)):
                for layer in range(layers):
                    rows.append(probe_row(*at, "", feature, "layer", layer, 0.5 + (value - 0.5) * layer / layers, n=n))
                rows.append(probe_row(*at, "", feature, "nested", layers - 1, value, n=n))
            rows.append(probe_row(*at, "logistic", tables.WORDS, "none", np.nan, WORDS.get(question, 0.6), n=n))
            rows.append(probe_row(*at, "", tables.LENGTH, "none", np.nan, 0.51, n=n))
    return pd.DataFrame(rows)


def transfer_of(positions=("answer", "reply_mean"), estimators=ESTIMATORS[:2], half=0.04):
    rows = []
    for (family, train), tests in TRANSFER.items():
        for position in positions:
            for estimator in estimators:
                for test, value in tests.items():
                    none = value is None
                    row = {"family": family, "train": train, "test": test, "position": position, "estimator": estimator}
                    row |= {"split": "domain", "choice": "nested", "layer": np.nan if none else 22}
                    row |= {"auroc": np.nan if none else value, "auroc_low": np.nan if none else value - half}
                    row |= {"auroc_high": np.nan if none else min(value + half, 1.0), "n": 3 if none else 224}
                    rows.append(row | {"n_positive": 112, "n_groups": 112, "note": "not estimable (n=3)" if none else np.nan})
    return pd.DataFrame(rows)


def scores_of(questions=("framing", "lie", "entitlement"), positions=("answer", "reply_mean"), n=224, seed=0):
    rng, rows = np.random.default_rng(seed), []
    for question in questions:
        for position in positions:
            for at in range(n):
                label = bool(at % 2)
                framing = {"framing": ("honest", "deny")[label], "lie": "deny", "round_lie": np.nan}.get(question, "honest")
                score = rng.normal() + 8 * (NESTED.get(question, 0.7) - 0.5) * label
                row = {"question": question, "position": position, "estimator": "logistic", "id": f"{question}-{at}"}
                row |= {"group": at // 2, "domain": f"domain {at % 8}", "framing": framing, "entitled": bool(at // 2 % 2)}
                rows.append(row | {"label": label, "fold": at % 8, "score": score})
    return pd.DataFrame(rows)


def printed(what, width=WIDTH):
    console = Console(width=width, record=True, highlight=False, markup=False, file=io.StringIO())
    console.print(what)
    return console.export_text()


def shown(figure):
    return [axis for axis in figure.axes if axis.axison and axis.get_xlabel()]


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_auroc_by_layer_draws_the_table():
    probes = probes_of()
    figure = auroc_by_layer(probes)
    axes = shown(figure)
    assert len(axes) == 6
    assert {axis.get_xlabel() for axis in axes} == {"layer (output of block)"}
    assert {axis.get_ylabel() for axis in axes} == {"AUROC, held-out rows"}
    assert axes[0].get_title() == "framing, answer\nn = 448 (224 positive), 112 groups"
    legend = legend_of(figure)
    assert {*ESTIMATORS, *tables.CONTROLS, "shuffled labels (range)"} - {tables.SHUFFLED, tables.CONDITION} == set(legend)
    assert len(legend) == len(set(legend))
    lines = {line.get_label(): line for line in axes[2].lines}
    for name in ESTIMATORS:
        rows = probes[
            (
                probes[["question", "position", "estimator", "feature", "choice"]]
                == ["lie", "answer", name, "residual", "layer"]
            ).all(axis=1)
        ]
        np.testing.assert_allclose(lines[name].get_ydata(), rows["auroc"])
    assert lines[tables.WORDS].get_ydata()[0] == WORDS["lie"]
    shuffled = probes[(probes["feature"] == tables.SHUFFLED) & (probes["choice"] == "layer")]
    shuffled = shuffled[(shuffled["question"] == "lie") & (shuffled["position"] == "answer")]
    band = next(one for one in axes[2].collections if one.get_label() == "shuffled labels (range)").get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(shuffled["auroc"].min())
    assert band[:, 1].max() == pytest.approx(shuffled["auroc"].max())


def test_panels_by_what_exists():
    alone = auroc_by_layer(probes_of(questions=("lie",), positions=("answer",), estimators=("LDA",), layers=3))
    assert len(shown(alone)) == 1
    assert "shuffled labels (95 %)" in legend_of(alone)
    rounds = probes_of(questions=("round_lie",), positions=("gate", "claim", "action"), estimators=("LDA",), layers=3)
    both = pd.concat([probes_of(questions=("lie",), positions=("answer",), layers=3), rounds])
    assert [axis.get_title().split("\n")[0] for axis in shown(auroc_by_layer(both))] == [
        "lie, answer", "round_lie, gate", "round_lie, claim", "round_lie, action",
    ]  # fmt: skip


@pytest.mark.parametrize("lost", [*tables.CONTROLS, "layer", "nested", "intervals"])
def test_nothing_breaks_without_a_part(lost):
    probes = probes_of(questions=("framing",), positions=("answer",), estimators=ESTIMATORS[:2], layers=2)
    if lost == "intervals":
        probes[[name for name in probes if name.endswith(("_low", "_high"))]] = np.nan
    else:
        probes = probes[(probes["feature"] != lost) & (probes["choice"] != lost)]
    for figure in (auroc_by_layer(probes), side_by_side(probes)):
        figure.draw_without_rendering()
    text, lines = printed(table(probes)), reading(probes, None)
    assert text.strip()
    assert lines
    if lost == "intervals":
        assert all("nothing follows" in line for line in lines)
    if lost == tables.WORDS:
        assert "the words alone were not tried" in lines[0]


def test_empty_tables():
    probes, transfer, scores = (made[:0] for made in (probes_of(layers=1), transfer_of(), scores_of()))
    for figure in (auroc_by_layer(probes), side_by_side(probes), transfer_map(transfer), score_distributions(scores)):
        figure.draw_without_rendering()
    printed(table(probes))
    printed(transfer_table(transfer))
    assert "nothing is read" in reading(probes, transfer)[0]


def test_transfer_map():
    transfer = transfer_of()
    figure = transfer_map(transfer)
    axes = shown(figure)
    assert [axis.get_title() for axis in axes] == ["framing: answer", "framing: reply_mean", "owed: answer", "owed: reply_mean"]
    for axis in axes:
        assert (axis.get_xlabel(), axis.get_ylabel()) == ("tested on", "trained on")
        (image,) = axis.images
        assert image.get_clim() == (0, 1)
        assert image.to_rgba(np.array([[0.5]])).ravel()[:3] == pytest.approx(1.0, abs=0.01)
    texts = [text.get_text() for text in axes[0].texts]
    assert "0.98\n[0.94, 1.00]\nn = 224" in texts
    assert len(texts) == 6
    assert len(axes[2].patches) == 2  # owed, tested on rounds
    assert [text.get_text() for text in axes[2].texts].count("n = 3") == 2


def test_score_distributions():
    scores = scores_of()
    axes = shown(score_distributions(scores))
    assert len(axes) == 6
    assert {axis.get_xlabel() for axis in axes} == {"score (s.d. of training negatives)"}
    legend = axes[0].get_legend()
    assert legend.get_title().get_text() == "framing, answer"
    assert {text.get_text() for text in legend.get_texts()} == {"deny, yes: n = 112", "honest, no: n = 112"}
    rounds = shown(score_distributions(scores_of(questions=("round_lie",), positions=("gate",))))
    assert "rounds, yes: n = 112" in {text.get_text() for text in rounds[0].get_legend().get_texts()}


def test_questions_side_by_side():
    probes = probes_of(layers=3)
    axes = shown(side_by_side(probes))
    ticks = [[tick.get_text().split("\n") for tick in axis.get_xticklabels()] for axis in axes]
    assert [[tick[:2] for tick in line] for line in ticks] == [
        [[question, position] for question in LEARNED] for position in ("answer", "reply_mean")
    ]
    assert ticks[0][0][2] == "n = 448, 112 groups"
    drawn = {float(value) for line in axes[0].lines for value in line.get_ydata()}
    nested = tables.nested_probes(probes)
    assert set(nested.loc[nested["position"] == "answer", "auroc"]) <= drawn
    assert set(WORDS.values()) <= drawn


def test_printed_table_fits_and_holds_every_number():
    probes = probes_of()
    text = printed(table(probes))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text
    lines = [line for line in text.splitlines() if re.search(r"\[\d\.", line)]
    nested = list(tables.nested_probes(probes).itertuples())
    assert len(lines) == len(nested) == 30
    assert len(text.rstrip().splitlines()) == 33  # three of titles: no name is broken
    for line, row in zip(lines, nested, strict=True):
        values = (row.balanced_accuracy, row.recall_1_percent, row.selectivity)
        values += tuple(tables.controls(probes, row).values())
        expected = f"{row.auroc:.2f} [{row.auroc_low:.2f}, {row.auroc_high:.2f}] {row.layer:.0f} "
        expected += " ".join(f"{value:.2f}" for value in values) + f" {row.n}/{row.n_groups}"
        assert line.split()[-len(expected.split()) :] == expected.split()


def test_controls_beside_a_probe():
    probes = probes_of()
    first, second, *_ = tables.nested_probes(probes).itertuples()
    assert tables.controls(probes, first)[tables.SHUFFLED] == pytest.approx(0.5)
    assert tables.controls(probes, second)[tables.SHUFFLED] == pytest.approx(0.53)
    assert tables.controls(probes, second)[tables.WORDS] == 1.0  # of another estimator, the only one
    runs = pd.concat([probes, pd.DataFrame([probe_row("framing", "answer", "logistic", tables.SHUFFLED, "nested", 3, 0.6)])])
    assert tables.controls(runs, first)[tables.SHUFFLED] == pytest.approx(0.55)
    by_layer = probes[(probes["feature"] == tables.PROBE) | (probes["choice"] == "layer")]
    lens = by_layer[(by_layer["feature"] == tables.JLENS) & (by_layer["layer"] == first.layer)]["auroc"].iloc[0]
    assert tables.controls(by_layer, first)[tables.JLENS] == pytest.approx(lens)
    assert tables.WORDS not in tables.controls(by_layer, first)


def test_several_splits():
    probes = probes_of(questions=("lie",), positions=("answer",), estimators=("LDA",), layers=3)
    both = pd.concat([probes.assign(split="paraphrase", auroc=0.7), probes])
    text = printed(table(both))
    assert "(paraphrase)" in text
    assert "(domain)" in text
    (line,) = reading(both)
    assert "held-out domain: AUROC 0.54" in line
    assert len(shown(auroc_by_layer(both))) == 1


def test_notes_instead_of_numbers():
    probes = probes_of(questions=("round_lie",), positions=("gate",), estimators=("LDA",), layers=2)
    probes[[name for name in probes if name.startswith(SCORES)] + ["layer"]] = np.nan
    probes["note"] = "not estimable (n=3)"
    assert "not estimable" in printed(table(probes))
    assert reading(probes, transfer_of()) == [
        "round_lie: LDA at gate, rounds with a lie against rounds without, held-out domain: not estimable (n=3)."
    ]
    for figure in (auroc_by_layer(probes), side_by_side(probes)):
        figure.draw_without_rendering()
    assert "not estimable (n=3)" in [text.get_text() for text in shown(auroc_by_layer(probes))[0].texts]
    assert "not estimable" in [tick.get_text() for tick in shown(side_by_side(probes))[0].get_xticklabels()][0]
    assert "not estimable (n=3)" in printed(transfer_table(transfer_of()))


def read_one(question, auroc, low, high, words=None, transfer=None):
    probes = probes_of(questions=(question,), positions=("answer",), estimators=("logistic",), layers=2)
    nested = (probes["feature"] == tables.PROBE) & (probes["choice"] == "nested")
    probes.loc[nested, ["auroc", "auroc_low", "auroc_high"]] = auroc, low, high
    if words is not None:
        probes.loc[probes["feature"] == tables.WORDS, "auroc"] = words
    (line,) = reading(probes, transfer)
    return line


@pytest.mark.parametrize("question", [*LEARNED, "round_lie", "behaviour", "something else"])
@pytest.mark.parametrize("low", [0.35, 0.45, 0.55, 0.65, 0.8])
def test_above_only_if_the_interval_excludes(question, low):
    high = low + 0.1
    line = read_one(question, (low + high) / 2, low, high, words=0.7)
    assert ("inside chance" in line) == (low <= 0.5 <= high)
    assert ("above chance" in line) == (low > 0.5)
    assert ("below chance" in line) == (high < 0.5)
    assert ("bag of words (0.70)" in line) == (low > 0.7)
    words = "agent's words do so with 0.70" if question == "round_lie" else "words alone do so with 0.70"
    assert (words in line) == (0.5 < low <= 0.7)
    if low <= 0.5:
        assert "above" not in line


@pytest.mark.parametrize(("position", "said"), [("answer", "come later and rule nothing out"), ("claim", "the agent's words")])
def test_an_agents_words_explain_only_what_is_read_after_them(position, said):
    probes = probes_of(questions=("round_lie",), positions=(position,), estimators=("logistic",), layers=2)
    nested = (probes["feature"] == tables.PROBE) & (probes["choice"] == "nested")
    probes.loc[nested, ["auroc", "auroc_low", "auroc_high"]] = 0.7, 0.6, 0.8
    probes.loc[probes["feature"] == tables.WORDS, "auroc"] = 0.9
    (line,) = reading(probes)
    assert said in line
    assert "words of the prompt" not in line
    assert ("shows nothing beyond" in line) == (position == "claim")
    probes.loc[nested, ["auroc", "auroc_low", "auroc_high"]] = 0.5, 0.4, 0.6
    (line,) = reading(probes)
    assert ("inside chance (the agent's words, which come later: 0.90)" in line) == (position == "answer")


def test_framing_that_reads_the_instruction():
    line = read_one("framing", 0.99, 0.97, 1.0, words=1.0, transfer=transfer_of())
    assert "AUROC 0.99 [0.97, 1.00]" in line
    assert "the words alone do so with 1.00, so this shows nothing beyond reading the instruction" in line
    assert "0.72 [0.68, 0.76] on “secret or honest”" in line
    assert "It also fires on “secret or honest” and “incentive or honest”" in line
    assert "not told apart" in read_one("framing", 0.99, 0.97, 1.0)
    assert "no sign that any other note" in read_one("framing", 0.99, 0.97, 1.0, transfer=transfer_of(half=0.4))


@pytest.mark.parametrize(
    ("honest", "half", "said"),
    [
        (0.8, 0.05, "it does as well: it reads entitlement, not lying"),
        (0.6, 0.05, "less well but above chance"),
        (0.5, 0.05, "it is not above chance"),
        (0.2, 0.05, "it points the other way"),
        (0.65, 0.3, "not told apart"),
        (None, 0.05, "It was not tested under honest"),
    ],
)
def test_lie_beside_entitlement(honest, half, said):
    transfer = transfer_of()
    here = (transfer["train"] == "deny: owed or not") & (transfer["test"] == "honest: owed or not")
    transfer.loc[here, ["auroc", "auroc_low", "auroc_high"]] = (honest, honest - half, honest + half) if honest else np.nan
    assert said in read_one("lie", 0.8, 0.75, 0.85, transfer=transfer)
    assert "no sign of lying" in read_one("lie", 0.54, 0.48, 0.6, transfer=transfer)


def test_entitlement_under_deny():
    line = read_one("entitlement", 0.84, 0.8, 0.88, transfer=transfer_of())
    assert "0.71 [0.67, 0.75] on “deny: owed or not”" in line
    assert "not estimable (n=3) on “rounds: lied or not”" in line
    assert "can still be read in the same direction" in line


def test_every_number_of_the_reading_is_in_the_tables():
    probes, transfer = probes_of(), transfer_of()
    lines = reading(probes, transfer)
    assert len(lines) == 6
    known = {f"{value:.2f}" for frame in (probes, transfer) for value in frame.filter(like="auroc").to_numpy().ravel()}
    numbers = [number for line in lines for number in re.findall(r"\d\.\d\d", line)]
    assert len(numbers) > 40
    assert set(numbers) <= known
    assert "inside chance" in lines[2]
    assert "The other 4 estimators give 0.52 to 0.54" in lines[2]
    assert all(line.endswith(".") for line in lines)
    assert any("steering" in line for line in DOES_NOT_SHOW)


def test_analysis(tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        probes = probes_of(questions=("framing", "lie"), positions=("answer",), estimators=ESTIMATORS[:2], layers=2)
        probes.to_csv(tmp_path / name / "probes.csv", index=False)
    transfer_of(positions=("answer",)).to_csv(tmp_path / "one" / "transfer.csv", index=False)
    scores_of(("lie",), ("answer",)).to_csv(tmp_path / "one" / "scores.csv", index=False)
    script = Path(__file__).parents[1] / "analyses" / "framing_probes.py"

    def run(*folders):
        arguments = ["--probes", *folders, "--out", tmp_path / "out" / str(len(folders))]
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        runpy.run_path(str(script), run_name="__main__")
        return {path.name for path in arguments[-1].iterdir()}

    assert run(tmp_path / "one") == {"auroc_by_layer.png", "questions.png", "transfer.png", "scores.png", "framing_probes.csv"}
    drawn = pd.read_csv(tmp_path / "out" / "1" / "framing_probes.csv")
    assert len(drawn) == 4
    assert drawn.loc[drawn["question"] == "framing", tables.WORDS].eq(1.0).all()
    assert {"one_questions.png", "two_questions.png", "one_transfer.png", "framing_probes.csv"} <= run(
        tmp_path / "one", tmp_path / "two"
    )
    with pytest.raises(SystemExit):
        run(tmp_path)


def test_panels_and_legends_are_inside_and_apart():
    probes = probes_of(layers=2)
    figures = auroc_by_layer(probes), side_by_side(probes), transfer_map(transfer_of()), score_distributions(scores_of())
    for figure in figures:
        figure.draw_without_rendering()
        boxes = [axis.get_tightbbox() for axis in shown(figure)] + [legend.get_window_extent() for legend in figure.legends]
        assert len(boxes) > 1
        for at, one in enumerate(boxes):
            assert one.x0 >= 0
            assert one.y0 >= 0
            assert one.x1 <= figure.bbox.x1
            assert one.y1 <= figure.bbox.y1
            assert not any(one.shrunk(0.98, 0.98).overlaps(other.shrunk(0.98, 0.98)) for other in boxes[at + 1 :])
