"""Means, contrasts and AUROC of margins, with intervals that resample whole pairs.

The unit of resampling is the minimal pair (a case and its twin under all paraphrases), because prompts of one pair share
almost all of their text. Every function works on all layers at once.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from einops import einsum
from scipy.stats import rankdata

LEVEL = 0.95
DRAWS = 10_000


@dataclass(frozen=True)
class Estimate:
    """A statistic by layer with its percentile interval; arrays ``[layer]``. An undefined value is NaN.

    Attributes:
        n: Prompts that went in.
        n_pairs: Pairs (resampling units) they come from.
    """

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: int
    n_pairs: int


class PairBootstrap:
    """Bootstrap over pairs: the same draws serve every statistic, so that differences keep their pairing."""

    def __init__(self, pairs: np.ndarray, *, draws: int = DRAWS, seed: int = 0) -> None:
        """``pairs``: the pair of each prompt, ``[prompt]``."""
        self.names, self.index = np.unique(pairs, return_inverse=True)
        size = len(self.names)
        rng = np.random.default_rng(seed)
        self.weights = rng.multinomial(size, np.full(size, 1 / size), size=draws).astype(float)
        self.member = np.eye(size)[self.index]  # [prompt, pair]

    def mean(self, values: np.ndarray, chosen: np.ndarray) -> Estimate:
        """Mean of ``values [prompt, layer]`` over the chosen prompts (boolean ``[prompt]``)."""
        point, draws = self._mean(values, chosen)
        return self._estimate(point, draws, chosen)

    def difference(self, values: np.ndarray, first: np.ndarray, second: np.ndarray) -> Estimate:
        """Mean over ``first`` minus mean over ``second``."""
        (point_a, draws_a), (point_b, draws_b) = self._mean(values, first), self._mean(values, second)
        return self._estimate(point_a - point_b, draws_a - draws_b, first | second)

    def auroc(self, values: np.ndarray, chosen: np.ndarray, positive: np.ndarray) -> Estimate:
        """P(value of a positive prompt > value of a negative one), ties half, over the chosen prompts."""
        wins, trials = self._wins(values, chosen & positive, chosen & ~positive)
        drawn = np.stack([einsum(self.weights @ layer, self.weights, "b g, b g -> b") for layer in wins], axis=-1)
        with np.errstate(invalid="ignore", divide="ignore"):
            point = wins.sum((1, 2)) / trials.sum()
            draws = drawn / einsum(self.weights @ trials, self.weights, "b g, b g -> b")[:, None]
        return self._estimate(point, draws, chosen)

    def _mean(self, values: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        member, values = self.member[chosen], np.asarray(values, dtype=float)
        sums, counts = member.T @ values[chosen], member.sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return sums.sum(0) / counts.sum(), (self.weights @ sums) / (self.weights @ counts)[:, None]

    def _wins(self, values: np.ndarray, positive: np.ndarray, negative: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Won comparisons ``[layer, pair, pair]``, positives of one pair against negatives of another, and their number."""
        upper, lower = self.member[positive], self.member[negative]
        wins = np.stack(
            [upper.T @ np.heaviside(column[positive][:, None] - column[negative], 0.5) @ lower for column in values.T]
        )
        return wins, np.outer(upper.sum(0), lower.sum(0))

    def _estimate(self, point: np.ndarray, draws: np.ndarray, chosen: np.ndarray) -> Estimate:
        tail = (1 - LEVEL) / 2
        # A draw without one of the groups has no value; it is left out of the interval.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
            low, high = np.nanquantile(draws, [tail, 1 - tail], axis=0)
        return Estimate(point, low, high, int(chosen.sum()), int(np.unique(self.index[chosen]).size))


def plain_auroc(values: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """AUROC of ``values [prompt, ...]`` for a boolean ``[prompt]``, from ranks, without an interval: ``[...]``."""
    n_positive = positive.sum()
    ranks = rankdata(values, axis=0)[positive].sum(0)
    return (ranks - n_positive * (n_positive + 1) / 2) / (n_positive * (~positive).sum())


def null_quantile(random: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """95th percentile of max(A, 1 - A) over random readouts ``[prompt, layer, row]``: ``[layer]``.

    A random direction has no sign, so its AUROC is folded; a margin lies outside the null when its own folded AUROC
    exceeds this.
    """
    return folded_quantile(plain_auroc(random, positive))


def folded_quantile(scores: np.ndarray) -> np.ndarray:
    """95th percentile of max(s, 1 - s) over the last axis, by ranks: a fresh random readout exceeds it 1 time in 20."""
    return np.quantile(np.maximum(scores, 1 - scores), LEVEL, axis=-1, method="weibull")
