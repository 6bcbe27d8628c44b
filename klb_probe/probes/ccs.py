"""Contrast-consistent search: a probe that two halves of a contrast pair must answer oppositely."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.preprocessing import StandardScaler

from klb_probe.probes.contrast_pairs import pair_halves
from klb_probe.probes.linear import LinearFit
from klb_probe.probes.row_space import RowSpace
from klb_probe.probes.training import checked, oriented

RESTARTS = 8


class Ccs:
    """Minimises the mean over pairs of ``(p(a) - (1 - p(b)))^2 + min(p(a), p(b))^2`` for ``p = sigmoid(w x + b)`` over
    features standardised by the paired rows, plus ``penalty / 2 * |w|^2`` (Burns et al. 2022, section 2.2; their code has
    weight decay in its place). The best of several random starts by that objective.

    Two differences from the paper. Their pairs are one text completed with Yes and with No; ours are minimal pairs: a case
    and its twin, or one situation under two framings. Which of a pair is ``a`` is random, so that no label leaks through the
    order, and hence there is one mean to subtract, not one for each half. Unsupervised but for the sign, which is set on
    TRAINING labels (True rows score higher), never on test labels. The threshold is the probe's own: p = 1/2.
    """

    name = "ccs"
    settings: tuple[float, ...] = (0.0,)
    needs_contrast = True
    penalty = 0.1  # lower ones recover planted directions less well: with fewer pairs than features they fit the noise

    def fit(
        self,
        features: np.ndarray,
        labels: np.ndarray,
        contrast: np.ndarray | None = None,
        *,
        settings: Sequence[float] | None = None,
        seed: int = 0,
    ) -> list[LinearFit]:
        """The same fit for every setting, see ``Estimator.fit``; the seed orders the pairs and draws the starts."""
        features, labels = checked(features, labels)
        rng = np.random.default_rng(seed)
        paired = np.concatenate(pair_halves(features, contrast, self.name, rng))
        scaler = StandardScaler().fit(paired)
        space = RowSpace.of(scaler.transform(paired))
        a, b = np.split(space.coordinates, 2)
        weights, bias = _search(a, b, self.penalty, rng)
        direction = space.basis @ weights / scaler.scale_
        fit = oriented(LinearFit(direction, float(bias - direction @ scaler.mean_)), features, labels)
        return [fit] * len(self.settings if settings is None else settings)


def _search(a: np.ndarray, b: np.ndarray, penalty: float, rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """Weights ``[r]`` and bias of the best start, for the two halves ``[pair, r]``."""
    pairs = len(a)

    def objective(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        weights, bias = parameters[:-1], parameters[-1]
        p, q = expit(a @ weights + bias), expit(b @ weights + bias)
        off, lower = p + q - 1, np.minimum(p, q)
        pull_p = (2 * off + 2 * lower * (p <= q)) * p * (1 - p) / pairs
        pull_q = (2 * off + 2 * lower * (q < p)) * q * (1 - q) / pairs
        gradient = np.append(pull_p @ a + pull_q @ b + penalty * weights, pull_p.sum() + pull_q.sum())
        return np.mean(off**2 + lower**2) + penalty / 2 * weights @ weights, gradient

    differences = a - b
    found = []
    for _ in range(RESTARTS):
        start = rng.standard_normal(pairs) @ differences  # large along what the pairs differ in
        start /= np.std(differences @ start)
        found.append(minimize(objective, np.append(start, 0.0), jac=True, method="L-BFGS-B", options={"maxiter": 500}))
    best = min(found, key=lambda result: result.fun)
    return best.x[:-1], float(best.x[-1])
