"""Statistics of margins and scores with intervals that resample whole clusters, as many of every stratum as there are.

Rounds of one trajectory share a customer whose trust is carried along, and a case and its twin share almost all of their text,
so single rows are not independent; whole trajectories, or cases with their twins, are. All statistics of one table are computed
on the same draws. Every function takes ``values [row, layer]`` and masks ``[row]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from einops import einsum
from numpy.typing import ArrayLike
from scipy.stats import rankdata

from klb_probe.metrics.bootstrap import DRAWS, interval, ratios, resample


@dataclass(frozen=True)
class Estimate:
    """A statistic by layer with its 95 % percentile interval; arrays ``[layer]``. An undefined value is NaN.

    Attributes:
        n_clusters: Clusters that bear on it (resampling units); below two, or with one a stratum, there is no interval.
    """

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n_clusters: int


class Clusters:
    """Bootstrap over the clusters of a table."""

    def __init__(self, cluster: ArrayLike, stratum: ArrayLike | None = None, *, draws: int = DRAWS, seed: int = 0) -> None:
        """``cluster``: the resampling unit of each row ``[row]``; ``stratum``: what it is drawn within ``[row]``."""
        self.index, self.names = pd.factorize(np.asarray(cluster), sort=True)
        stratum = np.zeros(len(self.index), int) if stratum is None else np.asarray(stratum)
        first = np.unique(self.index, return_index=True)[1]
        self.weights = resample(stratum[first], draws, seed)  # [draw, cluster]

    def auroc(
        self,
        values: np.ndarray,
        positive: np.ndarray,
        negative: np.ndarray,
        strata: np.ndarray | None = None,
        *,
        copies: bool = True,
    ) -> Estimate:
        """P(value of a positive row > value of a negative one), ties half; only within a stratum where there are some."""
        return self.estimate(self.auroc_draws(values, positive, negative, strata, copies=copies), positive | negative)

    def auroc_draws(
        self,
        values: np.ndarray,
        positive: np.ndarray,
        negative: np.ndarray,
        strata: np.ndarray | None = None,
        *,
        copies: bool = True,
    ) -> np.ndarray:
        """That AUROC: of the sample, then of each draw ``[1 + draw, layer]``.

        ``copies``: whether a cluster that is drawn twice is compared with its own copy. With few clusters a stratum this gives
        comparisons within a cluster more weight in the draws than they have in the sample, and moves the interval.
        """
        values = np.asarray(values, float)
        strata = np.zeros(len(values), int) if strata is None else pd.factorize(strata)[0]
        weights = self._with_sample()
        # What w copies add to w * w comparisons of a cluster with itself, to be taken off.
        surplus = np.zeros_like(weights) if copies else weights * (weights - 1)
        wins, trials = np.zeros((len(weights), values.shape[1])), np.zeros(len(weights))
        for stratum in np.intersect1d(strata[positive], strata[negative]):
            upper, lower = (np.flatnonzero(side & (strata == stratum)) for side in (positive, negative))
            (first, above), (second, below) = self._members(upper), self._members(lower)
            both, *own = np.intersect1d(first, second, return_indices=True)
            first, second, extra = weights[:, first], weights[:, second], surplus[:, both]
            held = np.outer(above.sum(1), below.sum(1))
            trials += einsum(first @ held, second, "b g, b g -> b") - extra @ held[tuple(own)]
            for number, column in enumerate(values.T):
                won = above @ np.heaviside(column[upper][:, None] - column[lower], 0.5) @ below.T  # [cluster, cluster]
                wins[:, number] += einsum(first @ won, second, "b g, b g -> b") - extra @ won[tuple(own)]
        with np.errstate(invalid="ignore", divide="ignore"):
            return wins / trials[:, None]

    def _members(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The clusters of some rows, and which row is in which ``[cluster, row]``."""
        clusters, index = np.unique(self.index[rows], return_inverse=True)
        return clusters, np.eye(len(clusters))[:, index]

    def difference_within(
        self, values: np.ndarray, positive: np.ndarray, negative: np.ndarray, strata: np.ndarray
    ) -> tuple[Estimate, int]:
        """Mean of positive minus mean of negative rows within a stratum, then the mean over strata; and their number.

        Strata without both are left out, in each draw anew.
        """
        stratum, names = pd.factorize(strata)
        both = np.isin(np.arange(len(names)), stratum[positive]) & np.isin(np.arange(len(names)), stratum[negative])
        chosen = both[stratum] & (positive | negative)
        estimates = []
        for column in np.asarray(values, float).T:
            means = [self._means(column, side & chosen, stratum, len(names)) for side in (positive, negative)]
            gap = (means[0] - means[1])[:, both]  # [point and draws, stratum]
            there = ~np.isnan(gap)
            with np.errstate(invalid="ignore", divide="ignore"):
                estimates.append(np.nansum(gap, axis=1) / there.sum(1))
        whole = np.stack(estimates, axis=1)
        return self._estimate(whole[0], whole[1:], chosen), int(both.sum())

    def _means(self, column: np.ndarray, chosen: np.ndarray, stratum: np.ndarray, n_strata: int) -> np.ndarray:
        """Means by stratum: of the sample, then of each draw ``[1 + draw, stratum]``."""
        sums, counts = np.zeros((2, len(self.names), n_strata))
        np.add.at(sums, (self.index[chosen], stratum[chosen]), column[chosen])
        np.add.at(counts, (self.index[chosen], stratum[chosen]), 1)
        return ratios(self._with_sample(), sums, counts)

    def mean(self, values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Mean over the chosen rows: of the sample, then of each draw ``[1 + draw, layer]``."""
        clusters, member = self._members(np.flatnonzero(chosen))
        counts = np.tile(member.sum(1)[:, None], values.shape[1])
        return ratios(self._with_sample()[:, clusters], member @ values[chosen], counts)

    def offset(self, values: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """The midpoint of two groups' means: of the sample, then of each draw ``[1 + draw, layer]``."""
        return (self.mean(values, first) + self.mean(values, second)) / 2

    def low_end(self, values: np.ndarray, chosen: np.ndarray, share: float) -> np.ndarray:
        """The highest threshold with at most ``share`` of the chosen rows strictly below: ``[1 + draw, layer]``."""
        weights = self._with_sample()[:, self.index[chosen]]
        total, ends = weights.sum(1), []
        for column in values[chosen].T:
            order, width = np.argsort(column), 32  # a small share is mostly reached within a few rows, in every draw
            while True:
                passed = np.cumsum(weights[:, order[:width]], axis=1) > share * total[:, None] + 1e-9
                if width >= len(order) or passed[:, -1].all():
                    break
                width *= 4
            ends.append(np.where(total > 0, column[order][passed.argmax(1)], np.nan))
        return np.stack(ends, axis=1)

    def share(self, values: np.ndarray, chosen: np.ndarray, threshold: np.ndarray, *, above: bool) -> np.ndarray:
        """Share of chosen rows strictly above (or below) a threshold that is drawn along: ``[1 + draw, layer]``."""
        weights = self._with_sample()[:, self.index[chosen]]
        total, shares = weights.sum(1), []
        for column, bound in zip(values[chosen].T, threshold.T, strict=True):
            beyond = column > bound[:, None] if above else column < bound[:, None]
            with np.errstate(invalid="ignore", divide="ignore"):
                shares.append(np.where(np.isnan(bound), np.nan, einsum(weights, beyond.astype(float), "b r, b r -> b") / total))
        return np.stack(shares, axis=1)

    def _with_sample(self) -> np.ndarray:
        """How often each cluster is in the sample (once), then in each draw ``[1 + draw, cluster]``."""
        return np.vstack([np.ones(len(self.names)), self.weights])

    def estimate(self, whole: np.ndarray, bearing: np.ndarray) -> Estimate:
        """From ``[1 + draw, layer]``: the sample first. ``bearing``: the rows that went in."""
        return self._estimate(whole[0], whole[1:], bearing)

    def spearman(self, values: np.ndarray, other: np.ndarray, chosen: np.ndarray) -> Estimate:
        """Spearman's correlation with ``other [row]`` over the chosen rows; ranks of the sample are kept in all draws."""
        ranks, with_other = rankdata(values[chosen], axis=0), rankdata(other[chosen])[:, None]
        member = np.eye(len(self.names))[self.index[chosen]]
        weights = self._with_sample()
        n = weights @ member.sum(0)[:, None]

        def mean(products: np.ndarray) -> np.ndarray:
            with np.errstate(invalid="ignore", divide="ignore"):
                return weights @ (member.T @ products) / n

        ranks, with_other = ranks - ranks.mean(0), with_other - with_other.mean()
        covariance = mean(ranks * with_other) - mean(ranks) * mean(with_other)
        spread = (mean(ranks**2) - mean(ranks) ** 2) * (mean(with_other**2) - mean(with_other) ** 2)
        with np.errstate(invalid="ignore", divide="ignore"):
            whole = np.where(spread > 1e-9, covariance / np.sqrt(spread), np.nan)
        return self._estimate(whole[0], whole[1:], chosen)

    def _estimate(self, value: np.ndarray, drawn: np.ndarray, bearing: np.ndarray) -> Estimate:
        clusters = np.unique(self.index[bearing])
        n = len(clusters)
        # Strata of one cluster each are the same in every draw: that is no interval of no width, but none.
        low, high = interval(drawn) if n >= 2 and np.ptp(self.weights[:, clusters]) > 0 else np.full((2, len(value)), np.nan)
        return Estimate(value, low, high, n)
