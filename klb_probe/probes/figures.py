"""Figures of probes. Each draws what a table holds and computes no statistic."""

from __future__ import annotations

import textwrap
from typing import Any, cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from klb_probe.figure import Figure
from klb_probe.probes.tables import (
    CHANCE,
    CONDITION,
    CONTROLS,
    JLENS,
    LENGTH,
    LOGIT,
    PROBE,
    RANDOM,
    SHUFFLED,
    SUBSPACE,
    WORDS,
    controls,
    counted,
    main_estimator,
    main_split,
    names_of,
    nested_probes,
    whole,
)
from klb_probe.probes.transfer_figure import transfer_map

__all__ = ["auroc_by_layer", "score_distributions", "side_by_side", "transfer_map"]

# Okabe-Ito colours, distinguishable by people with colour blindness: probes are solid and coloured, controls are not solid.
_ESTIMATORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
_BY_LAYER = {SUBSPACE: ("black", "--"), JLENS: ("#56B4E9", "--"), LOGIT: ("#777777", "--")}
_FLAT = {WORDS: ("black", ":"), LENGTH: ("#777777", ":"), RANDOM: ("#777777", "-."), CONDITION: ("black", "-.")}
_CONTROL_MARKS = dict(zip(CONTROLS, "xP^sDpvo", strict=True))
_LABELS = {True: "#D55E00", False: "#0072B2"}
_STYLES = ("-", "--", ":", "-.")
_BINS = 24
_ACROSS = 3
_LEGEND_INCHES = 1.9  # of one column


def auroc_by_layer(probes: pd.DataFrame) -> Figure:
    """A panel a question and position: AUROC of the probes by layer with 95 % bands, and the controls of ``probes.csv``.

    Grey band: range over the shuffled-label runs (a single run: its 95 % interval). Of other controls the strongest over
    estimators is drawn. Markers: the layer chosen within the training folds. Of several splits, held-out domains.
    """
    rows = main_split(probes)
    names = names_of(rows[rows["feature"] == PROBE]["estimator"])
    figure, panels = _panels(rows, 4.3, 3.0)
    for axis, question, position, here in panels:
        for at, name in enumerate(names):
            _draw_probe(axis, here[(here["feature"] == PROBE) & (here["estimator"] == name)], name, at)
        _draw_controls_by_layer(axis, here)
        axis.axhline(CHANCE, color="black", lw=0.6)
        if here["auroc"].isna().all():
            _say_why(axis, here)
        axis.set_title(f"{question}, {position}\n{_panel_count(here)}", fontsize=9)
        axis.set_xlabel("layer (output of block)")
        cast(MaxNLocator, axis.xaxis.get_major_locator()).set_params(integer=True)
        axis.set_ylabel("AUROC, held-out rows")
        axis.set_ylim(_lowest(rows), 1.03)
    _outside_legend(figure)
    splits = ", ".join(map(str, dict.fromkeys(rows["split"])))
    figure.suptitle(
        f"AUROC by layer, folds: {splits}; bands and bars: 95 % bootstrap over groups\n"
        "dots: layer chosen within the training folds, at the one chosen most often; thin line: chance",
        fontsize=10,
    )
    return figure


def _panels(rows: pd.DataFrame, wide: float, high: float) -> tuple[Figure, list[tuple[Axes, str, str, pd.DataFrame]]]:
    """Axes for each question and position that exist, at most three across; questions of several positions start a row."""
    by_question = [
        [(question, position, here) for position, here in asked.groupby("position", sort=False)]
        for question, asked in rows.groupby("question", sort=False)
    ]
    if all(len(positions) == 1 for positions in by_question):
        by_question = [[one for positions in by_question for one in positions]]
    lines = [found[at : at + _ACROSS] for found in by_question for at in range(0, len(found), _ACROSS)]
    across, down = max(map(len, lines), default=1), max(len(lines), 1)
    figure = Figure(figsize=(max(7.6, wide * across), high * down + 1.4), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    if not lines:
        axes[0, 0].text(0.5, 0.5, "nothing to draw", ha="center")
    panels = []
    for row, line in zip(axes, lines or [[]], strict=True):
        panels += [(axis, *one) for axis, one in zip(row, line, strict=False)]
        for axis in row[len(line) :]:
            axis.set_axis_off()
    return figure, panels


def _say_why(axis: Axes, rows: pd.DataFrame) -> None:
    """Notes instead of numbers, in a panel that has none."""
    notes = "; ".join(dict.fromkeys(rows["note"].dropna())) or "not estimable"
    axis.text(0.5, 0.75, textwrap.fill(notes, 40), ha="center", va="center", fontsize=8, transform=axis.transAxes)
    axis.tick_params(bottom=False, labelbottom=False)


def _panel_count(rows: pd.DataFrame) -> str:
    probes = rows[rows["feature"] == PROBE]
    lines = pd.concat([probes[probes["choice"] == "nested"], probes, rows])
    return counted(next(lines.itertuples()))


def _lowest(rows: pd.DataFrame) -> float:
    """The lower end of a common AUROC axis."""
    least = np.nanmin([CHANCE - 0.15, rows["auroc"].min(), rows["auroc_low"].min()])
    return max(-0.03, float(least) - 0.03)


def _draw_controls_by_layer(axis: Axes, rows: pd.DataFrame) -> None:
    by_layer = rows[(rows["choice"] == "layer") & rows["auroc"].notna()]
    shuffled = by_layer[by_layer["feature"] == SHUFFLED].groupby("layer")
    if len(shuffled):
        low, high, what = shuffled["auroc"].min(), shuffled["auroc"].max(), "range"
        if shuffled.size().max() == 1 and by_layer.loc[by_layer["feature"] == SHUFFLED, "auroc_low"].notna().any():
            low, high, what = shuffled["auroc_low"].min(), shuffled["auroc_high"].max(), "95 %"
        label = f"{SHUFFLED} ({what})"
        axis.fill_between(low.index, low, high, color="#999999", alpha=0.35, lw=0, zorder=0.5, label=label)
    for name, (colour, style) in _BY_LAYER.items():
        line = by_layer[by_layer["feature"] == name].groupby("layer")["auroc"].max()
        if len(line):
            axis.plot(line.index, line, style, color=colour, lw=1.3, zorder=1.5, label=name)
    for name, (colour, style) in _FLAT.items():
        values = rows.loc[(rows["feature"] == name) & (rows["choice"] != "layer"), "auroc"].dropna()
        if len(values):
            axis.axhline(values.max(), color=colour, ls=style, lw=1.3, zorder=1.5, label=name)


def _draw_probe(axis: Axes, rows: pd.DataFrame, name: str, at: int) -> None:
    colour = _ESTIMATORS[at % len(_ESTIMATORS)]
    line = rows[(rows["choice"] == "layer") & rows["auroc"].notna()].sort_values("layer")
    if len(line):
        axis.plot(line["layer"], line["auroc"], color=colour, lw=1.5, label=name)
        axis.fill_between(line["layer"], line["auroc_low"], line["auroc_high"], color=colour, alpha=0.1, lw=0)
    for chosen in rows[(rows["choice"] == "nested") & rows["auroc"].notna()].itertuples():
        # Estimators that chose the same layer would hide each other; with few layers they must not come near the next.
        place = chosen.layer + min(0.25, 0.02 * line["layer"].nunique()) * (at % len(_ESTIMATORS) - 2)
        axis.errorbar(place, chosen.auroc, _bars(chosen), color=colour, marker="o", mec="black", ms=5, lw=1.3, zorder=3)


def _bars(line: Any) -> list[list[float]]:
    """Lengths of the error bar below and above a row's AUROC; none where the row has no interval."""
    return np.nan_to_num([[line.auroc - line.auroc_low], [line.auroc_high - line.auroc]]).clip(0).tolist()


def _outside_legend(figure: Figure) -> None:
    """One legend for all panels under the figure, so that it hides no curve."""
    shown: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    if shown:
        labels = sorted(shown, key=lambda label: label.startswith(CONTROLS))  # probes first
        columns = int(figure.get_figwidth() // _LEGEND_INCHES)
        handles = [shown[label] for label in labels]
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def score_distributions(scores: pd.DataFrame, estimator: str | None = None) -> Figure:
    """Histograms of out-of-fold scores, a panel a question and position, a line a framing and label.

    Args:
        scores: Rows as in ``scores.csv``.
        estimator: Default: logistic regression, else the first.
    """
    estimator = estimator or main_estimator(scores)
    rows = scores[(scores["estimator"] == estimator) & scores["score"].notna()]
    rows = rows.assign(framing=rows["framing"].astype(object).where(rows["framing"].notna(), "rounds"))  # rounds have none
    framings = names_of(rows["framing"])
    figure, panels = _panels(rows, 4.0, 3.2)
    for axis, question, position, here in panels:
        edges = np.histogram_bin_edges(here["score"], _BINS)
        groups = here.groupby(["framing", here["label"].astype(bool)], sort=False)
        for (framing, label), group in groups:
            each, colour = np.full(len(group), 1 / len(group)), _LABELS[bool(label)]
            style = _STYLES[framings.index(framing) % len(_STYLES)]
            name = f"{framing}, {'yes' if label else 'no'}: n = {len(group)}"
            if len(groups) < 4:  # more would cover each other
                axis.hist(group["score"], list(edges), weights=each, histtype="stepfilled", color=colour, alpha=0.15)
            axis.hist(group["score"], list(edges), weights=each, histtype="step", color=colour, ls=style, lw=1.5, label=name)
        axis.axvline(0, color="black", lw=0.6)
        axis.set_xlabel("score (s.d. of training negatives)")
        axis.set_ylabel("share of rows")
        columns = 1 if len(groups) < 4 else 2
        axis.legend(
            title=f"{question}, {position}", loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0, alignment="left",
            ncols=columns, handlelength=1.3, columnspacing=1, fontsize=7.5, title_fontsize=9, frameon=False,
        )  # fmt: skip
    figure.suptitle(
        f"Out-of-fold scores of {estimator or 'probes'}, layer chosen within the folds\n"
        "yes, no: the label; share: within a framing and label; line: mean of training negatives",
        fontsize=10,
    )
    return figure


def side_by_side(probes: pd.DataFrame) -> Figure:
    """Questions beside each other: nested AUROC of every estimator with its interval, and its strongest controls.

    A row of questions a position (positions of few questions share one); the marks right of the dots are controls, of
    several estimators' the strongest.
    """
    nested = main_split(nested_probes(probes))
    names = names_of(nested["estimator"])
    lines = _lines(nested)
    width = max(map(len, lines), default=1)
    figure = Figure(figsize=(max(7.6, 1.5 * width + 1.5), 3.0 * max(len(lines), 1) + 1.4), layout="constrained")
    axes = figure.subplots(max(len(lines), 1), 1, squeeze=False)[:, 0]
    for axis, line in zip(axes, lines or [[]], strict=True):
        for at, rows in enumerate(line):
            for probe in rows[rows["auroc"].notna()].itertuples():
                which = names.index(probe.estimator)
                place, colour = at - 0.36 + 0.08 * which, _ESTIMATORS[which % len(_ESTIMATORS)]
                axis.errorbar(place, probe.auroc, _bars(probe), color=colour, marker="o", ms=5, lw=1.4, label=probe.estimator)
            _draw_controls(axis, probes, rows, at)
        for edge in range(1, len(line)):
            axis.axvline(edge - 0.5, color="#CCCCCC", lw=0.8)
        axis.axhline(CHANCE, color="black", lw=0.6)
        axis.set_xticks(range(len(line)), map(_tick, line), fontsize=8)
        axis.set_xlim(-0.5, width - 0.5)
        axis.set_ylim(_lowest(nested), 1.03)
        axis.set_ylabel("AUROC, held-out rows")
        axis.set_xlabel("question and position")
    _outside_legend(figure)
    figure.suptitle(
        "Probes (dots; bars: 95 % bootstrap over groups) beside controls (marks)\n"
        "layer chosen within the training folds; thin line: chance",
        fontsize=10,
    )
    return figure


def _lines(nested: pd.DataFrame) -> list[list[pd.DataFrame]]:
    """The rows of each question and position, in lines no longer than the position with most questions (or three)."""
    positions = [
        [rows for _, rows in here.groupby("question", sort=False)] for _, here in nested.groupby("position", sort=False)
    ]
    most = max([3, *map(len, positions)])
    lines: list[list[pd.DataFrame]] = []
    for questions in positions:
        if lines and len(lines[-1]) + len(questions) <= most:
            lines[-1] += questions
        else:
            lines.append(questions)
    return lines


def _tick(rows: pd.DataFrame) -> str:
    line = next(rows.itertuples())
    none = "\nnot estimable" if rows["auroc"].isna().all() else ""
    return f"{line.question}\n{line.position}\nn = {whole(line.n)}, {whole(line.n_groups)} groups{none}"


def _draw_controls(axis: Axes, probes: pd.DataFrame, rows: pd.DataFrame, at: int) -> None:
    beside = [controls(probes, line) for line in rows.itertuples()]
    for which, (name, mark) in enumerate(_CONTROL_MARKS.items()):
        values = [values[name] for values in beside if name in values]
        if values:
            place = at + 0.06 + 0.055 * which
            axis.plot(place, max(values), mark, color="#555555", mfc="none", ms=5, label=name)
