"""Intervals of ratios by resampling whole clusters: one matrix of draws times the sums of each cluster."""

from __future__ import annotations

import warnings

import numpy as np

LEVEL = 0.95
DRAWS = 10_000


def resample(strata: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """How often each cluster is drawn, ``[draw, cluster]``: as many from every stratum as it has, with replacement.

    ``strata``: the stratum of each cluster, ``[cluster]``.
    """
    rng = np.random.default_rng(seed)
    weights = np.zeros((draws, len(strata)))
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)
        weights[:, members] = rng.multinomial(len(members), np.full(len(members), 1 / len(members)), size=draws)
    return weights


def ratios(weights: np.ndarray, numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """The drawn ratios ``[draw, statistic]`` of sums by cluster ``[cluster, statistic]``; NaN where nothing was drawn."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return (weights @ numerators) / (weights @ denominators)


def interval(drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The percentile interval of each statistic ``[draw, statistic]``; draws without a value are left out."""
    tail = (1 - LEVEL) / 2
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
        low, high = np.nanquantile(drawn, [tail, 1 - tail], axis=0)
    return low, high
