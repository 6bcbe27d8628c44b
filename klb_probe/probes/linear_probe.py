"""A trained probe of one question at one position and layer, ready to score residuals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from klb_probe.errors import KlbError
from klb_probe.probes.linear import LinearFit
from klb_probe.summary import as_html, in_a_line, number

Residuals = TypeVar("Residuals", np.ndarray, torch.Tensor)


@dataclass(frozen=True, repr=False)
class LinearProbe:
    """``score(residual) = residual . direction + bias``; positive scores say the question's label is True.

    Attributes:
        direction: ``[d]`` float32, in the residual's own coordinates.
        bias: So that 0 is the estimator's own threshold.
        layer: The block whose output it reads, 0-based.
        mean: Mean residual of the training rows, ``[d]`` float32.
        norm: Mean length of the training residuals.
        spread: Standard deviation of the training residuals along ``unit``: a step along the direction in natural size.
    """

    question: str
    estimator: str
    position: str
    layer: int
    direction: np.ndarray
    bias: float
    mean: np.ndarray
    norm: float
    spread: float

    @classmethod
    def of(
        cls, fit: LinearFit, residuals: np.ndarray, *, question: str, estimator: str, position: str, layer: int
    ) -> LinearProbe:
        """The probe of a fit and the residuals ``[row, d]`` it was trained on."""
        residuals = np.asarray(residuals, np.float64)
        projections = residuals @ _unit(fit.direction)
        return cls(
            question=question,
            estimator=estimator,
            position=position,
            layer=layer,
            direction=np.asarray(fit.direction, np.float32),
            bias=float(fit.bias),
            mean=residuals.mean(axis=0).astype(np.float32),
            norm=float(np.linalg.norm(residuals, axis=1).mean()),
            spread=float(projections.std()),
        )

    @property
    def unit(self) -> np.ndarray:
        """The direction at length 1, ``[d]`` float32 (all zero for a probe that found nothing)."""
        return _unit(self.direction)

    def _facts(self) -> dict[str, Any]:
        return {
            "question": self.question,
            "estimator": self.estimator,
            "reads": f"layer {self.layer} at {self.position}, {len(self.direction)} dimensions",
            "spread along it": number(self.spread, 3),
            "mean norm of the residuals": number(self.norm, 1),
            "bias": number(self.bias, 3),
        }

    def __repr__(self) -> str:
        return in_a_line("LinearProbe", self._facts())

    def _repr_html_(self) -> str:
        return as_html("Linear probe", self._facts(), note="A positive score says the question's label is true.")

    def score(self, residuals: Residuals) -> Residuals:
        """Scores ``[...]`` of residuals ``[..., d]``, NumPy or torch, any float type; float32 of the same kind.

        Raises KlbError for residuals of another width.
        """
        if not (shape := np.shape(residuals)) or shape[-1] != len(self.direction):
            raise KlbError(f"residuals have shape {tuple(shape)}; this probe reads [..., {len(self.direction)}]")
        if isinstance(residuals, torch.Tensor):
            return residuals.float() @ torch.from_numpy(self.direction).to(residuals.device) + self.bias
        return np.asarray(residuals, np.float32) @ self.direction + np.float32(self.bias)


def _unit(direction: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(direction)
    return direction / length if length > 0 else direction
