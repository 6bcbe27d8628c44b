"""Contrast pairs of training rows, and the direction their differences share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sklearn.decomposition import PCA

from klb_probe.errors import KlbError
from klb_probe.probes.linear import LinearFit
from klb_probe.probes.training import checked, midpoint_fit, oriented


def pair_halves(
    features: np.ndarray, contrast: np.ndarray | None, name: str, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The two halves of the contrast pairs ``[pair, d]``, each pair in random order, so that the order holds no label.

    A row whose other one is not there makes no pair. KlbError for fewer than 2 pairs, three rows of one number, or pairs that
    do not differ.
    """
    contrast = np.full(len(features), -1) if contrast is None else np.asarray(contrast)
    numbers, counts = np.unique(contrast[contrast >= 0], return_counts=True)
    if (counts > 2).any():
        raise KlbError(f"{name} learns from pairs; contrast {numbers[counts > 2][0]} has {counts.max()} rows")
    paired = np.flatnonzero(np.isin(contrast, numbers[counts == 2]))
    pairs = paired[np.argsort(contrast[paired], kind="stable")].reshape(-1, 2)
    if len(pairs) < 2:
        raise KlbError(f"{name} needs at least 2 contrast pairs of training rows, there are {len(pairs)}; use logistic")
    first, second = (features[rows] for rows in rng.permuted(pairs, axis=1).T)
    if np.array_equal(first, second):
        raise KlbError(f"{name} learns from differences; the two rows of every contrast pair are equal")
    return first, second


class Lat:
    """First principal component of the differences of contrast pairs, each taken in a random direction: linear artificial
    tomography (Zou et al. 2023, Representation Engineering, section 3.1).

    Unsupervised but for its sign and threshold: True rows of the training data score higher, threshold at the midpoint.
    """

    name = "lat"
    settings: tuple[float, ...] = (0.0,)
    needs_contrast = True

    def fit(
        self,
        features: np.ndarray,
        labels: np.ndarray,
        contrast: np.ndarray | None = None,
        *,
        settings: Sequence[float] | None = None,
        seed: int = 0,
    ) -> list[LinearFit]:
        """The same fit for every setting, see ``Estimator.fit``; the seed orders the pairs and starts the solver."""
        features, labels = checked(features, labels)
        first, second = pair_halves(features, contrast, self.name, np.random.default_rng(seed))
        differences = first - second
        solver = "arpack" if min(differences.shape) > 2 else "full"
        component = PCA(n_components=1, svd_solver=solver, random_state=seed).fit(differences).components_[0]
        fit = oriented(midpoint_fit(component, features, labels), features, labels)
        return [fit] * len(self.settings if settings is None else settings)
