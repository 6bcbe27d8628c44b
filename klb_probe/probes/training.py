"""What the estimators share: checked training rows, and a threshold between two class means."""

from __future__ import annotations

import numpy as np

from klb_probe.errors import KlbError
from klb_probe.probes.linear import LinearFit


def checked(features: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Features as float64 ``[row, d]`` and labels as bool ``[row]``; KlbError where no probe can be trained on them.

    float64, because a few residual dimensions can be a thousand times larger than the rest.
    """
    features, labels = np.asarray(features, np.float64), np.asarray(labels, bool)
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise KlbError(f"a probe needs features [row, d] and a label a row; given {features.shape} and {labels.shape}")
    if not np.isfinite(features).all():
        raise KlbError("a probe cannot be trained: features hold values that are not finite; extract them again in float32")
    if labels.all() or not labels.any():
        raise KlbError(f"a probe needs rows of both labels; all {len(labels)} are {bool(labels.all())}")
    return features, labels


def class_means(features: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean of the True rows, mean of the False rows: ``[d]`` each."""
    return features[labels].mean(axis=0), features[~labels].mean(axis=0)


def midpoint_fit(direction: np.ndarray, features: np.ndarray, labels: np.ndarray) -> LinearFit:
    """A direction with its threshold halfway between the projections of the class means."""
    true, false = class_means(features, labels)
    return LinearFit(direction, -float(direction @ (true + false)) / 2)


def oriented(fit: LinearFit, features: np.ndarray, labels: np.ndarray) -> LinearFit:
    """The fit, negated if that makes the True rows of the training data score higher."""
    true, false = class_means(features, labels)
    sign = 1.0 if fit.direction @ (true - false) >= 0 else -1.0
    return LinearFit(sign * fit.direction, sign * fit.bias)
