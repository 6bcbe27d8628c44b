"""What is done at the output of a decoder block, whichever library stands there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from klb_probe.errors import KlbError

# Sees the layer and the residual ``[batch, sequence, d_model]``; what it returns, if anything, replaces the residual.
Keep = Callable[[int, Tensor], Tensor | None]


def through(keep: Keep, layer: int, output: Any) -> Any:
    """What a block that returned ``output``, a tensor or a tuple, returns after ``keep``; None where that changes nothing."""
    hidden = output if torch.is_tensor(output) else output[0]
    if hidden.ndim != 3:
        raise KlbError(f"block {layer} returned shape {tuple(hidden.shape)}, not [batch, sequence, d_model]")
    replacement = keep(layer, hidden)
    if replacement is None or torch.is_tensor(output):
        return replacement
    return (replacement, *output[1:])
