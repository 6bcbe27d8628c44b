"""Figures of lies beside margins. Each draws what a table holds and computes nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from klb_probe.figure import Figure
from klb_probe.pairing.baselines import LENGTH, MONITOR, OWN, RANDOM_Q95, WORDS
from klb_probe.plots import LENS_TITLES

# Okabe-Ito colours, distinguishable by people with colour blindness; line styles tell the same things apart.
_LIED = {True: ("#D55E00", "--", "lies"), False: ("#0072B2", "-", "non-lies")}
_LENSES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_BASELINES = {OWN: ("black", "-."), LENGTH: ("#E69F00", ":"), WORDS: ("#56B4E9", "--"), MONITOR: ("#CC79A7", "-.")}
_MOST_NAMES = 25  # cases that are named
_MOST_LINES = 20  # of an example's text
_TEXT_WIDTH = 62  # characters


def turns_figure(curves: pd.DataFrame, readings: pd.DataFrame, title: str) -> Figure:
    """Margin by the agent's turn, lies against non-lies: means with bands, single rounds faint."""
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    axis = figure.subplots()
    for lied, curve in curves.groupby("lied"):
        colour, style, name = _LIED[bool(lied)]
        for _, walk in readings[readings["lied"] == lied].groupby("round_id"):
            axis.plot(walk["turn"], walk["margin"], color=colour, lw=0.5, alpha=0.15)
        n_rounds = readings.loc[readings["lied"] == lied, "round_id"].nunique()
        n_walks = readings.loc[readings["lied"] == lied, "trajectory"].nunique()
        label = f"{name}: {n_rounds} rounds, {n_walks} trajectories"
        axis.plot(curve["turn"], curve["value"], style, color=colour, lw=2, marker="o", ms=3, label=label)
        axis.fill_between(curve["turn"], curve["low"], curve["high"], color=colour, alpha=0.2, lw=0)
        for point in curve.itertuples():
            below = (0, -12 if lied else 6)
            place = (point.turn, point.value)
            axis.annotate(str(point.n), place, below, textcoords="offset points", ha="center", fontsize=7, color=colour)
    axis.axhline(0, color="black", lw=0.6)
    axis.set_xlabel("the agent's turn in the round (0: first)")
    axis.set_ylabel("margin (logits)")
    cast(MaxNLocator, axis.xaxis.get_major_locator()).set_params(integer=True)
    axis.legend(fontsize=8, frameon=False)
    figure.suptitle(
        f"{title}\nmean over owed rounds; band: 95 % bootstrap over trajectories; numbers: rounds (n); thin: single rounds",
        fontsize=9,
    )
    return figure


def auroc_figure(statistics: pd.DataFrame, baselines: pd.DataFrame, title: str, *, condition: str = "all") -> Figure:
    """AUROC of the margin for a lie by layer: a panel a position, a line a lens, baselines across, random readouts dotted.

    Positions where nothing could be estimated say so.
    """
    scores = statistics[(statistics["statistic"] == "auroc") & (statistics["condition"] == condition)]
    beside = baselines[baselines["condition"] == condition]
    positions = list(dict.fromkeys(scores["position"]))
    across = min(3, max(len(positions), 1))
    down = -(-len(positions) // across) or 1
    figure = Figure(figsize=(max(7.6, 4.6 * across), 3.7 * down + 0.8), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharey=True)
    for axis, position in zip(axes.flat, positions, strict=False):
        _draw_position(axis, scores[scores["position"] == position], beside[beside["position"] == position])
        axis.set_title(_counted(position, scores[scores["position"] == position].iloc[0]), fontsize=9)
    for axis in axes.flat[len(positions) :]:
        axis.set_axis_off()
    for row in axes:
        row[0].set_ylabel("AUROC of margin for a lie")
    figure.suptitle(
        f"{title}, {condition} rounds\n0.5: chance; below: low margins go with lies. Band: 95 % bootstrap over trajectories",
        fontsize=9,
    )
    return figure


def _counted(position: str, line: pd.Series) -> str:
    return f"{position} ({line['n_lies']} lies, {line['n_nonlies']} non-lies)"


def _draw_position(axis: Axes, scores: pd.DataFrame, beside: pd.DataFrame) -> None:
    axis.set_ylim(-0.02, 1.02)
    axis.set_xlabel("layer (output of block)")
    axis.axhline(0.5, color="black", lw=0.6)
    if scores["value"].isna().all():
        axis.text(0.5, 0.6, scores["note"].iloc[0], transform=axis.transAxes, ha="center", fontsize=8)
        return
    cast(MaxNLocator, axis.xaxis.get_major_locator()).set_params(integer=True)
    for number, (lens, line) in enumerate(scores.groupby("lens", sort=False)):
        colour = _LENSES[number % len(_LENSES)]
        axis.plot(line["layer"], line["value"], color=colour, lw=1.8, marker=".", label=LENS_TITLES.get(str(lens), str(lens)))
        axis.fill_between(line["layer"], line["low"], line["high"], color=colour, alpha=0.15, lw=0)
    null = beside[(beside["baseline"] == RANDOM_Q95) & beside["layer"].notna() & beside["value"].notna()]
    for edge, label in ((null["value"], "95 % of random readouts"), (1 - null["value"], None)):
        if len(null):
            axis.plot(null["layer"].astype(int), edge, ":", color="#666666", lw=1.2, label=label)
    for name, (colour, style) in _BASELINES.items():
        for value in beside.loc[beside["baseline"] == name, "value"].dropna():
            axis.axhline(value, color=colour, ls=style, lw=1.1, label=name)
    axis.legend(fontsize=6.5, frameon=False, loc="best", ncols=2)


def slopes_figure(slopes: pd.DataFrame, title: str) -> Figure:
    """Within-case comparison: a line a case from its mean margin without a lie to that with one; the mean of cases in black."""
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    axis = figure.subplots()
    for case in slopes.itertuples():
        colour = _LIED[case.lied < case.honest][0]
        axis.plot([0, 1], [case.honest, case.lied], color=colour, alpha=0.6, lw=1.2, marker="o", ms=3)
    if 0 < len(slopes) <= _MOST_NAMES:
        _name_cases(axis, slopes.sort_values("lied"))
    if len(slopes):
        label = f"mean of {len(slopes)} cases"
        axis.plot([0, 1], [slopes["honest"].mean(), slopes["lied"].mean()], color="black", lw=2.5, marker="s", label=label)
        axis.legend(fontsize=8, frameon=False)
    else:
        axis.text(0.5, 0.5, "no case has both lies and non-lies", transform=axis.transAxes, ha="center")
    axis.set_xticks([0, 1], ["non-lies", "lies"])
    axis.set_xlim(-0.15, 2.0)
    axis.set_ylabel("mean margin of the case (logits)")
    n_honest, n_lied = slopes["n_honest"].sum(), slopes["n_lied"].sum()
    figure.suptitle(
        f"{title}\n{n_honest} rounds without and {n_lied} with a lie (n; by case in brackets); orange falls, blue rises",
        fontsize=9,
    )
    return figure


def _name_cases(axis: Axes, ordered: pd.DataFrame) -> None:
    """Names beside the right ends, moved apart where they would overlap."""
    everything = ordered[["honest", "lied"]].to_numpy()
    step, lowest = np.ptp(everything) / 32, -np.inf
    for case in ordered.itertuples():
        lowest = max(case.lied, lowest + step)
        axis.plot([1.01, 1.09], [case.lied, lowest], color="#999999", lw=0.4)
        label = f"{case.case} ({case.n_honest}, {case.n_lied})"
        axis.annotate(label, (1.09, lowest), (2, -2), textcoords="offset points", fontsize=6.5)


def examples_figure(examples: Sequence[dict[str, Any]], title: str) -> Figure:
    """Single rounds: what was said on the left, the margin by turn and layer on the right.

    Each example has ``why``, ``name``, ``transcript`` (role, text) and ``margins``: layers down, turns across.
    """
    figure = Figure(figsize=(12, 3.6 * max(len(examples), 1) + 0.6), layout="constrained")
    if not examples:
        figure.text(0.5, 0.5, "no round to show", ha="center")
        return figure
    axes = figure.subplots(len(examples), 2, squeeze=False, width_ratios=(1.25, 1))
    bound = max(float(np.abs(example["margins"].to_numpy()).max()) for example in examples) or 1.0
    for (words, strip), example in zip(axes, examples, strict=True):
        words.set_axis_off()
        words.set_title(f"{example['why']}\n{example['name']}", fontsize=8, loc="left")
        text = _wrapped(example["transcript"])
        words.text(0, 1, text, va="top", fontsize=7, family="monospace", transform=words.transAxes, parse_math=False)
        margins = example["margins"]
        image = strip.imshow(
            margins.to_numpy(), cmap="PuOr_r", vmin=-bound, vmax=bound, aspect="auto", origin="lower", interpolation="nearest"
        )
        strip.set_xticks(range(margins.shape[1]), [str(turn) for turn in margins.columns])
        step = max(1, len(margins) // 8)
        strip.set_yticks(range(0, len(margins), step), [str(layer) for layer in margins.index[::step]])
        strip.set_xlabel("the agent's turn")
        strip.set_ylabel("layer (output of block)")
    figure.colorbar(image, ax=axes[:, 1], label="margin (logits)")
    figure.suptitle(title, fontsize=9)
    return figure


def _wrapped(transcript: Sequence[Sequence[str]]) -> str:
    lines = []
    for role, text in transcript:
        lines += textwrap.wrap(f"{role}: {text}", _TEXT_WIDTH, subsequent_indent="   ")
    return "\n".join(lines if len(lines) <= _MOST_LINES else [*lines[: _MOST_LINES - 1], "…"])
