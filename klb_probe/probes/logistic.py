"""L2-penalised logistic regression on standardised features, for data wider than it is long."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.preprocessing import StandardScaler

from klb_probe.probes.linear import LinearFit
from klb_probe.probes.row_space import RowSpace
from klb_probe.probes.training import checked

# With hundreds of standardised features and rows, 1e-5 is close to the difference of means and 1 close to the hard margin.
STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


class Logistic:
    """The minimiser of ``|w|^2 / 2 + C * sum(log loss)`` over standardised features, intercept free: scikit-learn's
    ``LogisticRegression(C=C)`` after ``StandardScaler``, to relative 1e-3 (tested).

    Settings are the C. The rows are brought to their principal coordinates once; there the Hessian is close to diagonal, so
    that L-BFGS in coordinates scaled by it needs few steps, and each C starts from the one before. Features that do not vary
    get weight 0.
    """

    name = "logistic"
    settings: tuple[float, ...] = STRENGTHS
    needs_contrast = False

    def fit(
        self,
        features: np.ndarray,
        labels: np.ndarray,
        contrast: np.ndarray | None = None,
        *,
        settings: Sequence[float] | None = None,
        seed: int = 0,
    ) -> list[LinearFit]:
        """One fit a C, see ``Estimator.fit``; nothing is random."""
        features, labels = checked(features, labels)
        settings = self.settings if settings is None else tuple(settings)
        scaler = StandardScaler().fit(features)
        space = RowSpace.of(scaler.transform(features))
        solutions: dict[float, np.ndarray] = {}
        start = np.zeros(len(space.squares) + 1)
        for strength in sorted(set(settings)):
            solutions[strength] = start = _solve(space, labels, strength, start)
        weights = np.stack([solutions[strength] for strength in settings])  # [setting, r + 1]
        directions = weights[:, :-1] @ space.basis.T / scaler.scale_
        biases = weights[:, -1] - directions @ scaler.mean_
        return [LinearFit(direction, float(bias)) for direction, bias in zip(directions, biases, strict=True)]


def _solve(space: RowSpace, labels: np.ndarray, strength: float, start: np.ndarray) -> np.ndarray:
    """Weights and intercept in principal coordinates, ``[r + 1]``."""
    x, sign = space.coordinates, np.where(labels, 1.0, -1.0)
    slope = expit(-sign * (x @ start[:-1] + start[-1]))
    curvature = np.mean(slope * (1 - slope))
    scale = np.sqrt(np.append(curvature * space.squares + 1 / strength, curvature * len(x)))

    def objective(scaled: np.ndarray) -> tuple[float, np.ndarray]:
        weights = scaled / scale
        margin = sign * (x @ weights[:-1] + weights[-1])
        pull = -sign * expit(-margin)
        gradient = np.append(pull @ x + weights[:-1] / strength, pull.sum())
        return np.logaddexp(0, -margin).sum() + weights[:-1] @ weights[:-1] / (2 * strength), gradient / scale

    options = {"maxiter": 2000, "maxcor": 20, "gtol": 1e-5, "ftol": 0.0}
    return minimize(objective, start * scale, jac=True, method="L-BFGS-B", options=options).x / scale
