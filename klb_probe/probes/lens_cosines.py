"""Does a probe point where the lens reads? Cosines of directions with the lens's yes-minus-no direction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from einops import einsum

from klb_probe.lens.margin import LogitLens, MarginLens


def lens_direction(lens: LogitLens | MarginLens, layer: int) -> np.ndarray | None:
    """The lens's yes-minus-no direction ``[d]`` (float32) at the output of block ``layer``; None for a layer it does not read.

    It is the gradient of the margin's numerator: the mean over the contrast's pairs of the yes row minus the no row, folded
    with the final norm's gain (and its mean subtraction, for LayerNorm), transported by ``J_l`` for a margin lens below its
    target layer; the identity readout above. A vector added to all head rows cancels. The reduction ``first`` takes the
    first pair only; ``max`` and ``logsumexp`` are not linear, and get the mean of the pairs as ``mean`` does. Biases, the
    norm's scale and a soft-cap are left out.
    """
    if not lens.reads(layer):
        return None
    rows = lens.readout.directions
    if isinstance(lens, MarginLens) and layer < lens.metadata.target_layer:
        rows = lens.rows[lens.metadata.source_layers.index(layer)]
    differences = (rows[0::2] - rows[1::2]).float().cpu().numpy()
    return differences[0] if lens.contrast.reduction == "first" else differences.mean(0)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of two vectors ``[d]``, in [-1, 1]; NaN if one is zero or not finite."""
    a, b = (np.asarray(vector, dtype=np.float64) for vector in (a, b))
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    if not np.isfinite(norms) or norms == 0:
        return float("nan")
    return float(np.clip(einsum(a, b, "d, d ->") / norms, -1, 1))


def lens_cosines(directions: np.ndarray, layers: Sequence[int], lens: LogitLens | MarginLens) -> np.ndarray:
    """Cosine ``[layer]`` of a direction a layer ``[layer, d]`` with the lens's own there; NaN where one is undefined.

    Args:
        directions: One direction a layer, in the residual's coordinates.
        layers: Which block's output each belongs to.
        lens: The lens; both are read in the same coordinates, so no centring is needed.
    """
    own = [lens_direction(lens, layer) for layer in layers]
    return np.array(
        [np.nan if read is None else cosine(direction, read) for direction, read in zip(directions, own, strict=True)]
    )
