"""Final norm and unembedding in closed form, for the few tokens a margin needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from einops import reduce
from torch import Tensor


@dataclass(frozen=True)
class TokenReadout:
    """``logit_t(u) = cap(directions_t . u / scale(u) + bias_t)`` for a residual ``u`` of the final basis.

    ``scale(u)`` is the final norm's: root mean square of ``u`` (RMSNorm) or of ``u`` minus its mean (LayerNorm), with
    eps. The norm's gain, and the mean subtraction of a LayerNorm, are folded into ``directions``; the norm's and the
    head's biases into ``bias``; a scale of the logits into both. FACTS: one row a token is all that a margin needs.

    Attributes:
        directions: ``[token, d_model]`` float32.
        bias: ``[token]`` float32.
        eps: The norm's epsilon.
        centred: True for LayerNorm.
        softcap: Final logit soft-cap, or None.
    """

    directions: Tensor
    bias: Tensor
    eps: float
    centred: bool
    softcap: float | None

    @classmethod
    def fold(
        cls,
        head: Tensor,
        head_bias: Tensor,
        gain: Tensor,
        norm_bias: Tensor,
        *,
        eps: float,
        centred: bool,
        softcap: float | None,
        scale: float = 1.0,
    ) -> TokenReadout:
        """Fold ``[token, d_model]`` head rows with the norm's gain and bias (both ``[d_model]``) and the logits' scale."""
        directions = scale * head * gain
        readout = cls(directions, scale * (head @ norm_bias + head_bias), eps, centred, softcap)
        return replace(readout, directions=readout.centre(directions))

    def to(self, device: torch.device | str) -> TokenReadout:
        """The same readout on another device."""
        return replace(self, directions=self.directions.to(device), bias=self.bias.to(device))

    def centre(self, vectors: Tensor) -> Tensor:
        """Subtract the mean over the last axis for LayerNorm (symmetric, so it also maps cotangents); else unchanged."""
        return vectors - reduce(vectors, "... d -> ... 1", "mean") if self.centred else vectors

    def logits(self, residual: Tensor) -> Tensor:
        """Logits ``[..., token]`` of residuals ``[..., d_model]``, in float32."""
        residual = residual.float()
        mean_square = reduce(self.centre(residual).square(), "... d -> ...", "mean")
        return self.from_products(residual @ self.directions.T, mean_square)

    def from_products(self, products: Tensor, mean_square: Tensor) -> Tensor:
        """Logits ``[..., token]`` from ``directions . u`` ``[..., token]`` and the mean square of (centred) ``u``."""
        logits = self.scaled(products, mean_square) + self.bias
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def scaled(self, products: Tensor, mean_square: Tensor) -> Tensor:
        """Products ``[..., row]`` of some rows with ``u``, over the norm's scale of ``u``."""
        return products * torch.rsqrt(mean_square + self.eps)[..., None]
