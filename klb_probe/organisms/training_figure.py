"""The curve of a training, drawn from ``training.csv``."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from klb_probe.figure import Figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GREY = "#666666"


def training_figure(curve: pd.DataFrame, name: str) -> Figure:
    """Loss, and the share of right answers, by step; held-out values as points.

    Args:
        curve: Columns step, loss, right, and held_out_loss, held_out_right, held_out_right_<format> where measured.
        name: For the title.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    losses, shares = figure.subplots(1, 2)
    window = max(1, len(curve) // 40)
    losses.plot(curve["step"], curve["loss"], color=_GREY, lw=0.5, alpha=0.5)
    losses.plot(curve["step"], curve["loss"].rolling(window, min_periods=1).mean(), color=_GREY, label="training")
    _draw_held_out(losses, curve, "held_out_loss", "held out", _COLOURS[0])
    losses.set(xlabel="step", ylabel="loss (nats)", yscale="log")
    shares.plot(curve["step"], curve["right"].rolling(window, min_periods=1).mean(), color=_GREY, label="training")
    _draw_held_out(shares, curve, "held_out_right", "held out", _COLOURS[0])
    formats = [column for column in curve if column.startswith("held_out_right_")]
    for number, column in enumerate(formats, 1):
        label = f"held out, {column.removeprefix('held_out_right_')}"
        _draw_held_out(shares, curve, column, label, _COLOURS[number % len(_COLOURS)], style="--")
    shares.set(xlabel="step", ylabel="share of answers right", ylim=(0, 1.02))
    losses.legend(fontsize=8, frameon=False)
    shares.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))  # beside it, clear of lines near 1
    figure.suptitle(name, fontsize=10)
    return figure


def _draw_held_out(axis: Axes, curve: pd.DataFrame, column: str, label: str, colour: str, style: str = "-") -> None:
    measured = curve.dropna(subset=[column]) if column in curve else curve.iloc[:0]
    if len(measured):
        axis.plot(measured["step"], measured[column], style, marker="o", ms=3, lw=1.2, color=colour, label=label)
