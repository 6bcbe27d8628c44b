"""Shares with 95 % intervals. What is asked of one record, or of a case and its twin, is one unit of resampling.

Shares of units that stand for one row each have Wilson's interval, all others the percentile interval of a bootstrap over
units. Where nothing varies the bootstrap has no width; Wilson's interval of the number of units stands in for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.special import ndtri

from klb_probe.metrics.bootstrap import LEVEL, interval, ratios, resample

DRAWS = 2_000
_WIDTH = 1e-9


@dataclass(frozen=True)
class Rate:
    """A number with its interval; NaN where it is not defined.

    Attributes:
        n: Rows it is a share of.
        units: Units of resampling among them.
    """

    value: float
    low: float
    high: float
    n: int
    units: int


UNDEFINED = Rate(math.nan, math.nan, math.nan, 0, 0)


def share(event: ArrayLike, unit: ArrayLike) -> Rate:
    """The share of rows with an event ``[row]``; ``unit`` is the resampling unit of each row."""
    event = np.asarray(event, float)
    if not len(event):
        return UNDEFINED
    index, names = pd.factorize(np.asarray(unit))
    value, units = float(event.mean()), len(names)
    bounds = _wilson(value, units)
    if units < len(event):
        bounds = _bootstrap(_sums(event, index), np.bincount(index)) or bounds
    return Rate(value, *bounds, len(event), units)


def balanced_accuracy(right: ArrayLike, owed: ArrayLike, unit: ArrayLike) -> Rate:
    """The mean of the shares right among rows that are owed something and among those that are not, all ``[row]``."""
    right, owed = np.asarray(right, float), np.asarray(owed, bool)
    if owed.all() or not owed.any():
        return UNDEFINED
    index, names = pd.factorize(np.asarray(unit))
    sides = np.stack([owed, ~owed], 1)
    recalls = [float(right[side].mean()) for side in sides.T]
    bounds = _bootstrap(_sums(right[:, None] * sides, index), _sums(sides, index))
    if bounds is None:
        each = [_wilson(value, len(np.unique(index[side]))) for value, side in zip(recalls, sides.T, strict=True)]
        low, high = np.mean(each, axis=0)
        bounds = float(low), float(high)
    return Rate(float(np.mean(recalls)), *bounds, len(right), len(names))


def ratio(amounts: ArrayLike, sizes: ArrayLike) -> Rate:
    """The sum of amounts over the sum of sizes, both ``[unit]``; without an interval where nothing varies."""
    amounts, sizes = np.asarray(amounts, float), np.asarray(sizes, float)
    if not len(amounts):
        return UNDEFINED
    value = float(amounts.sum() / sizes.sum())
    bounds = (_bootstrap(amounts, sizes) if len(amounts) > 1 else None) or (math.nan, math.nan)
    return Rate(value, *bounds, int(sizes.sum()), len(amounts))


def _wilson(value: float, n: int) -> tuple[float, float]:
    """Of a share that need not be a whole number of the ``n`` units, as SciPy's ``binomtest`` asks for."""
    z = float(ndtri(0.5 + 0.5 * LEVEL))
    whole = 2 * (n + z**2)
    middle, half = (2 * n * value + z**2) / whole, z / whole * math.sqrt(4 * n * value * (1 - value) + z**2)
    return 0.0 if value == 0 else middle - half, 1.0 if value == 1 else middle + half


def _bootstrap(numerators: np.ndarray, denominators: np.ndarray) -> tuple[float, float] | None:
    """The interval of the mean of ratios, both ``[unit]`` or ``[unit, ratio]``; None where it has no width."""
    tops, bottoms = (np.reshape(np.asarray(one, float), (len(one), -1)) for one in (numerators, denominators))
    drawn = ratios(resample(np.zeros(len(tops)), DRAWS, 0), tops, bottoms).mean(1, keepdims=True)
    (low,), (high,) = interval(drawn)
    return (float(low), float(high)) if high - low > _WIDTH else None


def _sums(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    sums = np.zeros((index.max() + 1, *values.shape[1:]))
    np.add.at(sums, index, values)
    return sums
