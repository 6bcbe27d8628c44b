"""Where a residual is read: token ids, and which of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Site:
    """One place in one text; its residual is the mean over ``positions``.

    Attributes:
        ids: Token ids up to the last position (what comes after cannot matter under causal attention).
        positions: Indices into ``ids``, ascending.
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]

    @classmethod
    def of(cls, ids: tuple[int, ...] | list[int], positions: tuple[int, ...]) -> Site:
        """The site of some positions of a longer text."""
        return cls(tuple(ids[: positions[-1] + 1]), positions)

    @cached_property
    def key(self) -> str:
        """A hash of ids and positions: the same text read at the same place has the same residual."""
        return hashlib.sha256(np.array([*self.ids, -1, *self.positions], dtype="<i8").tobytes()).hexdigest()[:32]
