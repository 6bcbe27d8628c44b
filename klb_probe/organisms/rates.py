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
from scipy.stats import binomtest

from klb_probe.metrics.bootstrap import LEVEL, interval, ratios, resample

DRAWS = 2_000


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
    if value in (0, 1) or units == len(event):
        return Rate(value, *_wilson(value, units), len(event), units)
    low, high = _bootstrap(_sums(event, index), np.bincount(index))
    return Rate(value, low, high, len(event), units)


def balanced_accuracy(right: ArrayLike, owed: ArrayLike, unit: ArrayLike) -> Rate:
    """The mean of the shares right among rows that are owed something and among those that are not, all ``[row]``."""
    right, owed = np.asarray(right, float), np.asarray(owed, bool)
    if owed.all() or not owed.any():
        return UNDEFINED
    index, names = pd.factorize(np.asarray(unit))
    sides = np.stack([owed, ~owed], 1)
    recalls = [float(right[side].mean()) for side in sides.T]
    if set(recalls) <= {0.0, 1.0}:
        bounds = [_wilson(value, len(np.unique(index[side]))) for value, side in zip(recalls, sides.T, strict=True)]
        low, high = np.mean(bounds, axis=0)
    else:
        low, high = _bootstrap(_sums(right[:, None] * sides, index), _sums(sides, index))
    return Rate(float(np.mean(recalls)), float(low), float(high), len(right), len(names))


def ratio(amounts: ArrayLike, sizes: ArrayLike) -> Rate:
    """The sum of amounts over the sum of sizes, both ``[unit]``."""
    amounts, sizes = np.asarray(amounts, float), np.asarray(sizes, float)
    if not len(amounts):
        return UNDEFINED
    low, high = _bootstrap(amounts, sizes) if len(amounts) > 1 else (math.nan, math.nan)
    return Rate(float(amounts.sum() / sizes.sum()), low, high, int(sizes.sum()), len(amounts))


def _wilson(value: float, n: int) -> tuple[float, float]:
    found = binomtest(round(value * n), n).proportion_ci(LEVEL, method="wilson")
    return float(found.low), float(found.high)


def _bootstrap(numerators: np.ndarray, denominators: np.ndarray) -> tuple[float, float]:
    """The interval of the mean of ratios; both are ``[unit]`` or ``[unit, ratio]``."""
    tops, bottoms = (np.reshape(np.asarray(one, float), (len(one), -1)) for one in (numerators, denominators))
    drawn = ratios(resample(np.zeros(len(tops)), DRAWS, 0), tops, bottoms).mean(1, keepdims=True)
    (low,), (high,) = interval(drawn)
    return float(low), float(high)


def _sums(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    sums = np.zeros((index.max() + 1, *values.shape[1:]))
    np.add.at(sums, index, values)
    return sums
