"""Directions between class means, plain and whitened by the covariance within classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.linalg import solve

from klb_probe.errors import KlbError
from klb_probe.probes.linear import LinearFit
from klb_probe.probes.training import checked, class_means, midpoint_fit


class MeanDifference:
    """Mean of the True rows minus mean of the False rows, threshold at their midpoint (Marks & Tegmark 2023, section 5)."""

    name = "mean_difference"
    settings: tuple[float, ...] = (0.0,)
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
        """The same fit for every setting, see ``Estimator.fit``; nothing is random."""
        features, labels = checked(features, labels)
        true, false = class_means(features, labels)
        return [midpoint_fit(true - false, features, labels)] * len(self.settings if settings is None else settings)


class MassMean:
    """``Sigma^-1 (mean True - mean False)``: mass-mean probing (Marks & Tegmark 2023, section 5), that is Fisher's LDA.

    Sigma is the POOLED covariance within classes: rows centred on their own class, features standardised, shrunk towards a
    multiple of the identity by the coefficient of Ledoit & Wolf (2004), as ``sklearn.covariance.ledoit_wolf``, and scaled
    back. scikit-learn's ``LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")`` standardises and shrinks each class by
    itself and averages the results: with half as many rows to each covariance its direction differs somewhat from this one.
    Threshold at the midpoint. Whatever has more columns than rows is solved in the rows (Woodbury's identity).
    """

    name = "mass_mean"
    settings: tuple[float, ...] = (0.0,)
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
        """The same fit for every setting, see ``Estimator.fit``; nothing is random. KlbError if rows do not vary."""
        features, labels = checked(features, labels)
        true, false = class_means(features, labels)
        within = features - np.where(labels[:, None], true, false)
        scale = np.sqrt(np.mean(within**2, axis=0))
        # What is left of a constant feature is rounding; scaled up it would count as much as any other.
        still = scale <= 1e-9 * np.abs(features).max(axis=0)
        if still.all():
            raise KlbError("mass_mean needs rows that differ within a label; use mean_difference")
        scale[still], within[:, still] = 1.0, 0.0
        direction = _whitened(within / scale, (true - false) / scale) / scale
        return [midpoint_fit(direction, features, labels)] * len(self.settings if settings is None else settings)


def _whitened(rows: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Inverse of the Ledoit-Wolf covariance of centred ``rows [n, d]``, times a vector ``[d]``.

    With the Gram matrix G of the rows or of the columns: trace and squared norm of the covariance are those of G / n.
    """
    n, d = rows.shape
    wide = n < d
    gram = rows @ rows.T if wide else rows.T @ rows
    squares = np.einsum("nd,nd->n", rows, rows)  # squared length of each row
    mean_variance = squares.sum() / (n * d)
    norm = (gram**2).sum() / n**2
    noise = ((squares**2).sum() / n - norm) / (n * d)
    spread = norm / d - mean_variance**2
    shrinkage = min(noise / spread, 1.0) if spread > 0 else 1.0
    ridge = shrinkage * mean_variance
    kept = (1 - shrinkage) / n
    identity = np.eye(len(gram))
    if not wide:
        return solve(kept * gram + ridge * identity, vector, assume_a="pos")
    inner = solve(kept * gram + ridge * identity, kept * (rows @ vector), assume_a="pos")
    return (vector - rows.T @ inner) / ridge
