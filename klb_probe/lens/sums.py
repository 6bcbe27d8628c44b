"""Running sums of a fit: what a checkpoint holds and a lens is made from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor


@dataclass
class RunningSums:
    """Sums over the prompts used so far, in float32 whatever the model is, the even and the odd ones apart.

    Attributes:
        halves: ``[2, layer, row, d_model]``: the sum over even-numbered and over odd-numbered used prompts.
        norms: ``[layer]`` float64 sums of the prompts' Jacobian norms; zero unless the fit normalises.
        index: Prompts of the corpus dealt with.
        used: Prompts that were long enough, so far.
        normalise: Whether every prompt counts with its direction only (see :meth:`add`).
    """

    halves: Tensor
    norms: Tensor
    index: int = 0
    used: int = 0
    normalise: bool = False

    @classmethod
    def zeros(cls, layers: int, rows: int, d_model: int, *, normalise: bool = False) -> RunningSums:
        """Nothing summed yet."""
        return cls(torch.zeros(2, layers, rows, d_model), torch.zeros(layers, dtype=torch.float64), normalise=normalise)

    def add(self, rows: Tensor, norms: Tensor | None = None) -> None:
        """Add one prompt's ``[layer, row, d_model]``; with ``norms`` ``[layer]``, divided by them.

        A few prompts of a heavy-tailed model can have Jacobians many times larger than all others; divided by its norm,
        each prompt weighs the same, and the mean norm restores the scale afterwards.
        """
        if norms is not None:
            self.norms += norms
            rows = rows / rearrange(norms, "layer -> layer 1 1").to(rows)
        self.halves[self.used % 2] += rows
        self.used += 1
        self.index += 1

    def skip(self) -> None:
        """Pass over a prompt that is too short."""
        self.index += 1

    @property
    def mean_norms(self) -> Tensor | None:
        """Mean norm of the prompts' Jacobians ``[layer]``, or None for a fit that does not normalise."""
        return self.norms / self.used if self.normalise else None

    def mean(self) -> Tensor:
        """The estimate ``[layer, row, d_model]``."""
        mean = (self.halves[0] + self.halves[1]) / self.used
        return mean if self.mean_norms is None else mean * rearrange(self.mean_norms, "layer -> layer 1 1").to(mean)


def split_half_agreement(even: Iterable[Tensor], odd: Iterable[Tensor]) -> float:
    """Median over layers of the cosine between two halves' estimates, one tensor a layer; their scales do not matter."""
    cosines = [torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) for a, b in zip(even, odd, strict=True)]
    return float(torch.stack(cosines).double().quantile(0.5))
