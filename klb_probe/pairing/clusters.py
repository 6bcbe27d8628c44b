"""Statistics of margins with intervals that resample whole trajectories, as many of every condition as there are.

Rounds of one trajectory share a customer whose trust is carried along, so they are not independent; trajectories are. All
statistics of one table are computed on the same draws. Every function takes ``values [round, layer]`` and masks ``[round]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from klb_probe.metrics.bootstrap import DRAWS, interval, ratios, resample


@dataclass(frozen=True)
class Estimate:
    """A statistic by layer with its 95 % percentile interval; arrays ``[layer]``. An undefined value is NaN.

    Attributes:
        n_trajectories: Trajectories that bear on it (resampling units); below two there is no interval.
    """

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n_trajectories: int


class Clusters:
    """Bootstrap over the trajectories of a table of rounds."""

    def __init__(self, rounds: pd.DataFrame, *, draws: int = DRAWS, seed: int = 0) -> None:
        """``rounds``: one line a round, with ``trajectory`` and ``condition``."""
        self.index, self.names = pd.factorize(rounds["trajectory"], sort=True)
        condition = rounds.groupby(self.index)["condition"].first().to_numpy(str)
        self.weights = resample(condition, draws, seed)  # [draw, trajectory]

    def auroc(
        self, values: np.ndarray, positive: np.ndarray, negative: np.ndarray, strata: np.ndarray | None = None
    ) -> Estimate:
        """P(value of a positive round > value of a negative one), ties half; only within a stratum where there are some."""
        strata = np.zeros(len(values), int) if strata is None else pd.factorize(strata)[0]
        value, drawn = [], []
        for column in np.asarray(values, float).T:
            wins, trials = self._wins(column, positive, negative, strata)
            with np.errstate(invalid="ignore", divide="ignore"):
                value.append(wins.sum() / trials.sum())
                drawn.append(self._twice(wins) / self._twice(trials))
        return self._estimate(np.array(value), np.stack(drawn, axis=1), positive | negative)

    def _wins(
        self, column: np.ndarray, positive: np.ndarray, negative: np.ndarray, strata: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Comparisons won and held, rounds of one trajectory against those of another ``[trajectory, trajectory]``."""
        member = np.eye(len(self.names))[self.index]
        wins, trials = np.zeros((2, len(self.names), len(self.names)))
        for stratum in np.unique(strata[positive]):
            upper, lower = positive & (strata == stratum), negative & (strata == stratum)
            wins += member[upper].T @ np.heaviside(column[upper][:, None] - column[lower], 0.5) @ member[lower]
            trials += np.outer(member[upper].sum(0), member[lower].sum(0))
        return wins, trials

    def _twice(self, sums: np.ndarray) -> np.ndarray:
        """Sums over pairs of trajectories in each draw ``[draw]``."""
        return ((self.weights @ sums) * self.weights).sum(1)

    def difference_within(
        self, values: np.ndarray, positive: np.ndarray, negative: np.ndarray, strata: np.ndarray
    ) -> tuple[Estimate, int]:
        """Mean of positive minus mean of negative rounds within a stratum, then the mean over strata; and their number.

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
        return ratios(np.vstack([np.ones(len(self.names)), self.weights]), sums, counts)

    def offset(self, values: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """The midpoint of two groups' means: of the sample, then of each draw ``[1 + draw, layer]``."""
        weights = np.vstack([np.ones(len(self.names)), self.weights])
        member = np.eye(len(self.names))[self.index]
        means = [
            ratios(weights, member[side].T @ values[side], np.tile(member[side].sum(0)[:, None], values.shape[1]))
            for side in (first, second)
        ]
        return (means[0] + means[1]) / 2

    def low_end(self, values: np.ndarray, chosen: np.ndarray, share: float) -> np.ndarray:
        """The highest threshold with at most ``share`` of the chosen rounds strictly below: ``[1 + draw, layer]``."""
        weights = np.vstack([np.ones(len(self.names)), self.weights])[:, self.index[chosen]]
        total = weights.sum(1)
        ends = []
        for column in values[chosen].T:
            order = np.argsort(column)
            passed = np.cumsum(weights[:, order], axis=1) > share * total[:, None] + 1e-9
            ends.append(np.where(total > 0, column[order][passed.argmax(1)], np.nan))
        return np.stack(ends, axis=1)

    def share(self, values: np.ndarray, chosen: np.ndarray, threshold: np.ndarray, *, above: bool) -> np.ndarray:
        """Share of chosen rounds strictly above (or below) a threshold that is drawn along: ``[1 + draw, layer]``."""
        weights = np.vstack([np.ones(len(self.names)), self.weights])[:, self.index[chosen]]
        total, shares = weights.sum(1), []
        for column, bound in zip(values[chosen].T, threshold.T, strict=True):
            beyond = column > bound[:, None] if above else column < bound[:, None]
            with np.errstate(invalid="ignore", divide="ignore"):
                shares.append(np.where(np.isnan(bound), np.nan, (weights * beyond).sum(1) / total))
        return np.stack(shares, axis=1)

    def estimate(self, whole: np.ndarray, bearing: np.ndarray) -> Estimate:
        """From ``[1 + draw, layer]``: the sample first. ``bearing``: the rounds that went in."""
        return self._estimate(whole[0], whole[1:], bearing)

    def spearman(self, values: np.ndarray, other: np.ndarray, chosen: np.ndarray) -> Estimate:
        """Spearman's correlation with ``other [round]`` over the chosen rounds; ranks of the sample are kept in all draws."""
        ranks, with_other = rankdata(values[chosen], axis=0), rankdata(other[chosen])[:, None]
        member = np.eye(len(self.names))[self.index[chosen]]
        weights = np.vstack([np.ones(len(self.names)), self.weights])
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
        n = len(np.unique(self.index[bearing]))
        low, high = interval(drawn) if n >= 2 else np.full((2, len(value)), np.nan)
        return Estimate(value, low, high, n)
