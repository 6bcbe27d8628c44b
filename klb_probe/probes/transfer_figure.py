"""The heat map of transfers between populations."""

from __future__ import annotations

import textwrap

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from klb_probe.figure import Figure
from klb_probe.probes.tables import CHANCE, main_estimator, main_split, names_of, number, whole

_AUROC = LinearSegmentedColormap.from_list("auroc", ["#D55E00", "white", "#0072B2"])  # Okabe-Ito orange and blue
_DARK = 0.38  # distance from chance beyond which a cell needs white letters


def transfer_map(transfer: pd.DataFrame, estimator: str | None = None) -> Figure:
    """AUROC by trained on (down) and tested on (across); a row of panels a family, a column a position.

    White is chance, blue above and orange below, on a fixed scale from 0 to 1. A hatched cell has no number.

    Args:
        transfer: Rows as in ``transfer.csv``; of rows by layer only the nested choice is drawn.
        estimator: Default: logistic regression, else the first.
    """
    estimator = estimator or main_estimator(transfer)
    rows = main_split(transfer[(transfer["estimator"] == estimator) & (transfer["choice"] != "layer")])
    panels = [(*key, here) for key, here in rows.groupby(["family", "position"], sort=False)]
    families, positions = (names_of(rows[key]) for key in ("family", "position"))
    heights = [rows.loc[rows["family"] == name, "train"].nunique() for name in families]
    cells = max((rows.loc[rows["family"] == name, "test"].nunique() for name in families), default=1)
    across = max(len(positions), 1)
    size = (max(7.2, (1.15 * cells + 1.3) * across + 1), max(3.4, sum(0.75 * height + 1.1 for height in heights) + 0.9))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(max(len(families), 1), across, squeeze=False, height_ratios=heights or None)
    for axis in axes.flat:
        axis.set_axis_off()
    for family, position, here in panels:
        axis = axes[families.index(family), positions.index(position)]
        axis.set_axis_on()
        image = _draw_transfers(axis, here)
        axis.set_title(f"{family}: {position}", fontsize=9)
    if panels:
        figure.colorbar(image, ax=axes, label="AUROC (0.5: chance)", shrink=0.9)
    else:
        axes[0, 0].text(0.5, 0.5, "no transfer to draw", ha="center")
    figure.suptitle(
        f"Transfer of {estimator or 'probes'}: AUROC [95 %, bootstrap over groups], n tested; hatched: no number", fontsize=10
    )
    return figure


def _draw_transfers(axis: Axes, rows: pd.DataFrame) -> AxesImage:
    trains, tests = names_of(rows["train"]), names_of(rows["test"])
    # The same population has the same place on both sides, so that the diagonal is a probe on its own kind of rows.
    tests = [name for name in trains if name in tests] + [name for name in tests if name not in trains]
    grid = rows.groupby(["train", "test"])["auroc"].first().unstack().reindex(index=trains, columns=tests)
    image = axis.imshow(grid.to_numpy(dtype=float), cmap=_AUROC, vmin=0, vmax=1, aspect="auto")
    empty = {(down, across) for down in range(len(trains)) for across in range(len(tests))}
    for line in rows.itertuples():
        down, across = trains.index(line.train), tests.index(line.test)
        words = f"n = {whole(line.n)}"
        if pd.notna(line.auroc):
            words = f"{number(line.auroc)}\n[{number(line.auroc_low)}, {number(line.auroc_high)}]\n{words}"
            empty.discard((down, across))
        colour = "white" if abs(line.auroc - CHANCE) > _DARK else "black"
        back = {"facecolor": "white", "edgecolor": "none", "pad": 1.5} if pd.isna(line.auroc) else None
        axis.text(across, down, words, ha="center", va="center", fontsize=7, color=colour, bbox=back)
    for down, across in empty:
        axis.add_patch(Rectangle((across - 0.5, down - 0.5), 1, 1, fill=False, hatch="////", ec="#AAAAAA", lw=0))
    axis.set_xticks(range(len(tests)), [textwrap.fill(name, 14) for name in tests], fontsize=7)
    axis.set_yticks(range(len(trains)), [textwrap.fill(name, 14) for name in trains], fontsize=7)
    axis.set_xlabel("tested on", fontsize=8)
    axis.set_ylabel("trained on", fontsize=8)
    return image
