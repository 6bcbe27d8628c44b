"""Figures. Each takes a table that is also written to a file, so that any figure can be drawn again."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg", force=False)

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

LENS_TITLES = {"margin": "J-Lens", "logit": "logit lens (twin)"}
# Okabe-Ito colours, distinguishable by people with colour blindness; the line style carries the entitlement.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_DIFFERENCES = ("#666666", "#56B4E9", "#E69F00")


def margins_by_depth(summary: pd.DataFrame, model: str, contrast: str) -> Figure:
    """Three rows by lens: margin by layer (one line a framing x entitlement), its contrasts, and AUROC of entitlement.

    Bands are 95 % bootstrap intervals over pairs; crosses at the last layer mark the model's own margin; dotted lines
    in the last row hold 95 % of the lens's random readouts between them.
    """
    lenses = list(dict.fromkeys(summary["lens"]))
    framings = list(dict.fromkeys(summary.loc[summary["statistic"] == "auroc", "framing"]))
    colours = dict(zip(framings, _COLOURS * len(framings), strict=False))
    figure = Figure(figsize=(5.6 * len(lenses) + 1, 10), layout="constrained")
    axes = figure.subplots(3, len(lenses), squeeze=False, sharex=True, sharey="row")
    for column, lens in enumerate(lenses):
        table = summary[summary["lens"] == lens]
        _draw_margins(axes[0, column], table, framings, colours)
        _draw_contrasts(axes[1, column], table, colours)
        _draw_auroc(axes[2, column], table, framings, colours)
        axes[0, column].set_title(LENS_TITLES.get(lens, lens))
        axes[2, column].set_xlabel("layer (output of block)")
    axes[0, 0].set_ylabel("yes-minus-no margin (logits)")
    axes[1, 0].set_ylabel("contrast of margins (logits)")
    axes[2, 0].set_ylabel("AUROC of entitlement")
    for row in axes:
        row[0].legend(fontsize=8, frameon=False)
    counts = summary.loc[summary["statistic"] == "auroc"].iloc[0]
    figure.suptitle(
        f"{model}: {contrast}\n{counts['n_pairs']} pairs of a case and its twin, {counts['n']} prompts a framing; "
        "bands: 95 % bootstrap over pairs",
        fontsize=10,
    )
    return figure


def _draw_margins(axis: Axes, table: pd.DataFrame, framings: list[str], colours: dict[str, str]) -> None:
    means = table[table["statistic"] == "mean_margin"]
    for framing in framings:
        for entitled, style in ((True, "-"), (False, "--")):
            line = means[(means["framing"] == framing) & (means["entitled"] == entitled)]
            _draw_line(axis, line, colours[framing], f"{framing}, {_owed(entitled)}", style)
            last = line.iloc[-1]
            own = "model's own margin" if (framing, entitled) == (framings[-1], False) else None
            axis.plot(last["layer"], last["value"], "x", color="black", ms=7, label=own, zorder=5)
    axis.axhline(0, color="black", lw=0.6)


def _draw_contrasts(axis: Axes, table: pd.DataFrame, colours: dict[str, str]) -> None:
    for framing, line in table[table["statistic"] == "entitlement_contrast"].groupby("framing", sort=False):
        _draw_line(axis, line, colours[framing], f"owed minus not owed, {framing}")
    moved = table[table["statistic"] == "framing_contrast"]
    for number, (name, lines) in enumerate(moved.groupby("framing", sort=False)):
        for entitled, style in ((True, "-."), (False, ":")):
            line = lines[lines["entitled"] == entitled]
            _draw_line(axis, line, _DIFFERENCES[number % len(_DIFFERENCES)], f"{name}, {_owed(entitled)}", style)
    axis.axhline(0, color="black", lw=0.6)


def _draw_auroc(axis: Axes, table: pd.DataFrame, framings: list[str], colours: dict[str, str]) -> None:
    scores = table[table["statistic"] == "auroc"]
    for framing in framings:
        line = scores[scores["framing"] == framing]
        for edge, label in ((line["null_q95"], f"95 % of random readouts, {framing}"), (1 - line["null_q95"], None)):
            axis.plot(line["layer"], edge, ":", color=colours[framing], lw=1, label=label)
        _draw_line(axis, line, colours[framing], framing)
    axis.axhline(0.5, color="black", lw=0.6)
    axis.set_ylim(0, 1)


def _draw_line(axis: Axes, line: pd.DataFrame, colour: str, label: str, style: str = "-") -> None:
    axis.plot(line["layer"], line["value"], style, color=colour, label=label, lw=1.6)
    axis.fill_between(line["layer"], line["low"], line["high"], color=colour, alpha=0.15, lw=0)


def _owed(entitled: bool) -> str:
    return "owed" if entitled else "not owed"
