"""Rows that a probe learns from or is tested on, with their labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Population:
    """Rows of a probe data table, and a yes/no label for each.

    Attributes:
        name: Such as ``deny: owed or not``.
        rows: Indices into the table ``[n]``, ascending, unique.
        labels: ``[n]`` bool.
        contrast: Number of each row's contrast pair (two rows that differ in the label alone), -1 for none: ``[n]``.
    """

    name: str
    rows: np.ndarray
    labels: np.ndarray
    contrast: np.ndarray
