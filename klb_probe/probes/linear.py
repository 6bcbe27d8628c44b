"""What every estimator gives: a direction and a bias in the residual's own coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class LinearFit:
    """``score(x) = x . direction + bias``; positive scores say the label is True.

    Attributes:
        direction: ``[d]``, in raw coordinates: any standardisation is folded in.
        bias: So that 0 is the estimator's own threshold.
    """

    direction: np.ndarray
    bias: float

    def score(self, features: np.ndarray) -> np.ndarray:
        """Scores ``[...]`` of features ``[..., d]``."""
        return features @ self.direction + self.bias


class Estimator(Protocol):
    """One way to find a direction.

    Attributes:
        name: As the command names it.
        settings: Strengths to choose from inside the training folds (L2 for logistic regression); one, if there is no choice.
        needs_contrast: Whether it learns from pairs of rows that differ in the label alone (LAT, CCS).
    """

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> tuple[float, ...]: ...

    @property
    def needs_contrast(self) -> bool: ...

    def fit(
        self,
        features: np.ndarray,
        labels: np.ndarray,
        contrast: np.ndarray | None = None,
        *,
        settings: Sequence[float] | None = None,
        seed: int = 0,
    ) -> list[LinearFit]:
        """One fit a setting (all of the estimator's by default).

        Args:
            features: ``[row, d]`` float32.
            labels: ``[row]`` bool, both values present.
            contrast: ``[row]`` integers: two rows with the same number >= 0 are a contrast pair with opposite labels; -1: none.
            settings: The settings to fit.
            seed: Of anything random.
        """
        ...
