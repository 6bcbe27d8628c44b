"""The contest's table as it is printed, and its figure."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from rich.table import Table

from klb_probe.contest.comparisons import HONEST, LYING, MAIN, MODELS
from klb_probe.contest.table import NULL
from klb_probe.contest.words import CHANCE, number, verdicts
from klb_probe.figure import Figure

SHOWN = (MAIN, LYING, MODELS, HONEST)
_MARKS = {"passes": "passes", "gap": "by the gap", "models": "passes?", "unknown": "passes?"}
_COLOURS = {"passes": "#009E73", "gap": "#009E73", "models": "#E69F00", "unknown": "#E69F00"}
_OTHER = "#0072B2"
_LENS_COLOURS = ("#0072B2", "#D55E00", "#009E73")


def printed(table: pd.DataFrame) -> Table:
    """An entry a line: the main comparison with its null, its recall, and the others."""
    out = Table(box=None, pad_edge=False, show_edge=False)
    out.add_column("entry", overflow="fold")
    for name in (MAIN.name, "null", "recall", *(one.name for one in SHOWN[1:]), "gap", "null", "n", "passes"):
        out.add_column(name, justify="right")
    for row in verdicts(table).to_dict("records"):
        main = row[MAIN.name]
        others = [_interval(row[one.name]) for one in SHOWN[1:]]
        n = f"{main.n_positive:.0f}+{main.n - main.n_positive:.0f} / {main.n_cases:.0f}"
        gap = row[LYING.name]
        cells = [_interval(main), number(main.null_q95), number(main.recall_1_percent), *others]
        cells += [_interval(gap, "gap"), number(gap.gap_null_q95), n]
        out.add_row(row["title"], *cells, _MARKS.get(row["verdict"], "-" if row["verdict"] == "undefined" else "no"))
    out.caption = (
        "AUROC [95 % interval over cases]; null: 95 % of random directions; recall at 1 % false positives; gap: AUROC of "
        f"{LYING.name}, liar minus ignorant; n: {MAIN.name}, rounds / cases"
    )
    out.caption_justify = "left"
    return out


def contest_figure(table: pd.DataFrame, about: str = "") -> Figure:
    """A dot and interval an entry and comparison; grey: what 95 % of random directions stay within. Computes nothing."""
    rows = verdicts(table).to_dict("records")
    figure = Figure(figsize=(3.1 * len(SHOWN) + 4.2, 0.26 * len(rows) + 1.8), layout="constrained")
    axes = figure.subplots(1, len(SHOWN), sharey=True, squeeze=False)[0]
    for axis, comparison in zip(axes, SHOWN, strict=True):
        for height, row in enumerate(rows):
            line = row[comparison.name]
            if pd.notna(line.null_q95):
                axis.barh(height, 2 * (line.null_q95 - CHANCE), left=1 - line.null_q95, height=0.9, color="#dddddd", lw=0)
            if pd.isna(line.auroc):
                continue
            colour = _COLOURS.get(row["verdict"], _OTHER)
            axis.plot([line.auroc_low, line.auroc_high], [height, height], color=colour, lw=1.4)
            axis.plot(line.auroc, height, "o", color=colour, ms=4)
        axis.axvline(CHANCE, color="black", lw=0.6)
        axis.set_xlim(-0.02, 1.02)
        axis.set_title(comparison.name, fontsize=9)
        axis.set_xlabel("AUROC")
    axes[0].set_yticks(range(len(rows)), [row["title"] for row in rows], fontsize=7)
    axes[0].invert_yaxis()
    figure.suptitle(
        f"{about}{': ' if about else ''}detectors, by AUROC of the liar's denials of what is owed against the ignorant one's\n"
        "95 % bootstrap over cases; grey: 95 % of random directions at that position; green: passes, or by the gap; orange: "
        "passes, but may read which model speaks",
        fontsize=9,
    )
    return figure


def _interval(line: Any, name: str = "auroc") -> str:
    value, low, high = (getattr(line, key) for key in (name, f"{name}_low", f"{name}_high"))
    return "-" if pd.isna(value) else f"{number(value)} [{number(low)}, {number(high)}]"


def layers_figure(table: pd.DataFrame, knowing: pd.DataFrame | None = None) -> Figure:
    """By position and layer: AUROC of every lens under three comparisons, and how many lies a lens knows of. Computes nothing.

    Args:
        table: Rows as in ``contest.csv``.
        knowing: Rows of ``statistics.csv`` of the liar's pairing (``klb-probe pair``); drawn as a last row where it has the
            share of lies with a margin toward owed.
    """
    lenses = table[(table["choice"] == "layer") & (table["kind"] == "lens")]
    null = table[(table["choice"] == "layer") & (table["kind"] == NULL)]
    positions = list(dict.fromkeys(null["position"]))
    shares = None if knowing is None else knowing_lies(knowing)
    rows = [comparison.name for comparison in SHOWN[:3]]
    height = len(rows) + (shares is not None and len(shares) > 0)
    figure = Figure(figsize=(3.4 * len(positions) + 0.8, 2.6 * height + 0.8), layout="constrained")
    axes = figure.subplots(height, len(positions), squeeze=False, sharex=True, sharey=True)
    for column, position in enumerate(positions):
        for axis, comparison in zip(axes[:, column], rows, strict=False):
            at = (null["position"] == position) & (null["comparison"] == comparison)
            band = null[at].sort_values("layer")
            axis.fill_between(
                band["layer"], 1 - band["null_q95"], band["null_q95"], color="#dddddd", lw=0, label="95 % of random directions"
            )
            here = lenses[(lenses["position"] == position) & (lenses["comparison"] == comparison)]
            for colour, (name, line) in zip(_LENS_COLOURS, here.groupby("entry", sort=False), strict=False):
                _draw_line(axis, line, ("auroc", "auroc_low", "auroc_high"), name, colour)
            axis.axhline(CHANCE, color="black", lw=0.6)
            axes[0, column].set_title(position, fontsize=9)
        if shares is not None and height > len(rows):
            axis, here = axes[-1, column], shares[shares["position"] == position]
            for colour, (name, line) in zip(_LENS_COLOURS, here.groupby("lens", sort=False), strict=False):
                _draw_line(axis, line, ("value", "low", "high"), name, colour)
        axes[-1, column].set_xlabel("layer (output of block)")
    for axis, name in zip(axes[:, 0], [*rows, "liar's lies with a margin\ntoward owed (share)"], strict=False):
        axis.set_ylabel(name, fontsize=8)
        axis.set_ylim(-0.02, 1.02)
    axes[0, 0].legend(fontsize=7, frameon=False)
    figure.suptitle("AUROC of the yes-minus-no margin by layer; bands: 95 % bootstrap over cases", fontsize=9)
    return figure


def knowing_lies(statistics: pd.DataFrame) -> pd.DataFrame:
    """Of ``statistics.csv``: the share of lies with a calibrated margin above 0, over all conditions, where it is defined."""
    chosen = (statistics["statistic"] == "knowing_lies") & (statistics["condition"] == "all") & statistics["value"].notna()
    return statistics[chosen]


def _draw_line(axis: Axes, line: pd.DataFrame, columns: tuple[str, str, str], name: str, colour: str) -> None:
    line = line.sort_values("layer")
    value, low, high = columns
    axis.plot(line["layer"], line[value], color=colour, lw=1.6, label=name)
    axis.fill_between(line["layer"], line[low], line[high], color=colour, alpha=0.15, lw=0)
