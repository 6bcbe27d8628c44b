"""Dose and response of a steered direction, drawn from what the summary holds."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from klb_probe.figure import Figure
from klb_probe.probes.steering import ABLATE, ADD, PROBE, RANDOM
from klb_probe.probes.steering_passes import PLACES
from klb_probe.probes.steering_summary import ALL, OTHER, OWED, RAW

# Okabe-Ito blue; the random directions are grey.
_COLOURS = {PROBE: "#0072B2", RANDOM: "#777777"}
_LABELS = {PROBE: "probe direction (95 % bootstrap over pairs)", RANDOM: "random directions (median, 95 % of them)"}
_TITLES = {
    OWED: "change of the margin\ntoward owed (logits)",
    RAW: "change of the yes-minus-no\nmargin (logits)",
    OTHER: "likeliest next token\nneither yes nor no (share)",
}


def dose_response(summary: pd.DataFrame, title: str, at: str) -> Figure:
    """A column a framing; the probe's line against the band of random directions, ablations as points beside them.

    Args:
        summary: As :func:`~klb_probe.probes.steering_summary.steering_summary` gives it.
        title: Names the model and the direction.
        at: Where the residual was changed: ``answer`` or ``all``.
    """
    framings = [name for name in dict.fromkeys(summary["framing"]) if name != ALL]
    figure = Figure(figsize=(4.6 * len(framings) + 0.8, 7.6), layout="constrained")
    axes = figure.subplots(len(_TITLES), len(framings), squeeze=False, sharex=True, sharey="row")
    for column, framing in zip(axes.T, framings, strict=True):
        here = summary[summary["framing"] == framing]
        for axis, statistic in zip(column, _TITLES, strict=True):
            _draw(axis, here[here["statistic"] == statistic])
        before = here[(here["statistic"] == OTHER) & ~here["direction"].isin([PROBE, RANDOM])]["value"].item()
        without = column[-1].axhline(before, color="black", lw=0.8, ls=":", label="without intervention")
        column[-1].set_ylim(-0.03, 1.03)
        counts = here[here["direction"] == PROBE].iloc[0]
        column[0].set_title(f"{framing}\nn = {counts['n']:.0f} prompts, {counts['n_pairs']:.0f} pairs")
        column[-1].set_xlabel(f"dose {PLACES[at]}\n(mean residual norms of the layer)")
    for row, label in zip(axes, _TITLES.values(), strict=True):
        row[0].set_ylabel(label)
    axes[0, 0].legend(fontsize=7, frameon=False)
    axes[-1, 0].legend(handles=[without], fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=10)
    return figure


def _draw(axis: Axes, lines: pd.DataFrame) -> None:
    added = lines[lines["mode"] == ADD]
    largest = added["dose"].abs().max() if len(added) else 1.0
    for offset, (name, colour) in enumerate(_COLOURS.items()):
        line = added[added["direction"] == name].sort_values("dose")
        if len(line):
            axis.plot(line["dose"], line["value"], "-o", ms=3, color=colour, label=_LABELS[name])
            axis.fill_between(line["dose"], line["low"], line["high"], color=colour, alpha=0.2, lw=0)
        for point in lines[(lines["mode"] == ABLATE) & (lines["direction"] == name)].itertuples():
            # Drawn as a range, not as an error bar: a median may lie anywhere between its quantiles.
            at = largest * (1.2 + 0.08 * offset)
            axis.plot(at, point.value, "s", ms=5, color=colour, label=None if len(line) else _LABELS[name])
            axis.vlines(at, point.low, point.high, color=colour, lw=2, alpha=0.5)
    if (lines["mode"] == ABLATE).any():
        axis.annotate("ablate", (largest * 1.24, 0.97), xycoords=("data", "axes fraction"), ha="center", va="top", fontsize=7)
    axis.axhline(0, color="black", lw=0.6)
