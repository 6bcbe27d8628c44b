"""The whole-view figure: layer x token margins of one prompt."""

from __future__ import annotations

import numpy as np
import pandas as pd

from klb_probe.figure import Figure
from klb_probe.plots import LENS_TITLES

SHOWN_TOKENS = 80
_INCHES_PER_TOKEN = 0.16
_LONGEST_LABEL = 12


def heat_map(frame: pd.DataFrame, title: str) -> Figure:
    """Margins by layer and token, one panel a lens, of a table as :attr:`WholeView.frame` makes it.

    Shows the last 80 tokens of a longer prompt. The colour scale is centred at 0 and each panel has its own, because
    lenses differ in range; the last layer of every panel is the model's own margin.
    """
    lenses = list(dict.fromkeys(frame["lens"]))
    last = int(frame["position"].max())
    first = max(0, last + 1 - SHOWN_TOKENS)
    shown = frame[frame["position"] >= first]
    tokens = shown.drop_duplicates("position")["token"]
    width = max(7.0, _INCHES_PER_TOKEN * len(tokens) + 2.5)
    figure = Figure(figsize=(width, 4.2 * len(lenses) + 1.2), layout="constrained")
    for axis, lens in zip(figure.subplots(len(lenses), 1, squeeze=False)[:, 0], lenses, strict=True):
        grid = shown[shown["lens"] == lens].pivot(index="layer", columns="position", values="margin")
        largest = float(np.abs(grid.to_numpy()).max()) or 1.0
        image = axis.imshow(
            grid, origin="lower", aspect="auto", cmap="RdBu_r", vmin=-largest, vmax=largest, interpolation="nearest",
            extent=(first - 0.5, last + 0.5, -0.5, len(grid) - 0.5),
        )  # fmt: skip
        if list(grid.index) != list(range(len(grid))):  # a lens of some layers
            axis.set_yticks(range(len(grid)), map(str, grid.index), fontsize=7)
        # parse_math: a token may hold dollar signs.
        axis.set_xticks(range(first, last + 1), map(_label, tokens), rotation=90, fontsize=6, parse_math=False)
        axis.set_title(LENS_TITLES.get(lens, lens))
        axis.set_ylabel("layer (output of block)")
        axis.set_xlabel(f"token (positions {first}-{last}; the last is where the answer starts)")
        figure.colorbar(image, ax=axis, label="yes-minus-no margin (logits)", pad=0.01)
    figure.suptitle(title, fontsize=10)
    return figure


def _label(token: str) -> str:
    shown = token.replace("\n", "\\n").replace("\t", "\\t")
    return shown if len(shown) <= _LONGEST_LABEL else shown[: _LONGEST_LABEL - 1] + "…"
