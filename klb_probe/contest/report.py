"""The contest's table as it is printed, and its figure."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg", force=False)

import pandas as pd
from matplotlib.figure import Figure
from rich.table import Table

from klb_probe.contest.comparisons import HONEST, LYING, MAIN, MODELS
from klb_probe.contest.words import CHANCE, number, verdicts

SHOWN = (MAIN, LYING, MODELS, HONEST)
_MARKS = {"passes": "passes", "models": "passes?", "unknown": "passes?", "null": "no", "chance": "no", "below": "no"}
_COLOURS = {"passes": "#009E73", "models": "#E69F00", "unknown": "#E69F00"}
_OTHER = "#0072B2"


def printed(table: pd.DataFrame) -> Table:
    """An entry a line: the main comparison with its null, its recall, and the others."""
    out = Table(box=None, pad_edge=False, show_edge=False)
    out.add_column("entry", overflow="fold")
    for name in (MAIN.name, "null 95 %", "recall 1 %", *(one.name for one in SHOWN[1:]), "n", "passes"):
        out.add_column(name, justify="right")
    for row in verdicts(table).to_dict("records"):
        main = row[MAIN.name]
        others = [_interval(row[one.name]) for one in SHOWN[1:]]
        n = f"{main.n_positive:.0f}+{main.n - main.n_positive:.0f} / {main.n_cases:.0f}"
        cells = [_interval(main), number(main.null_q95), number(main.recall_1_percent), *others, n]
        out.add_row(row["title"], *cells, _MARKS.get(row["verdict"], "-"))
    out.caption = f"AUROC [95 % interval over cases]; n: {MAIN.name}, rounds / cases"
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
        "95 % bootstrap over cases; grey: 95 % of random directions at that position; green: passes; orange: passes, but may "
        "read which model speaks",
        fontsize=9,
    )
    return figure


def _interval(line: Any) -> str:
    if pd.isna(line.auroc):
        return "-"
    return f"{number(line.auroc)} [{number(line.auroc_low)}, {number(line.auroc_high)}]"
