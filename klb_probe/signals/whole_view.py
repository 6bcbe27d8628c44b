"""One prompt, whole: the margin at every layer and token, and the tokens a lens reads where the answer starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from torch import Tensor

from klb_probe.errors import KlbError
from klb_probe.lens.contrast import TokenContrast
from klb_probe.models.huggingface import SELF_CHECK_TOLERANCE
from klb_probe.models.residual_model import ResidualModel, chunks

if TYPE_CHECKING:
    from klb_probe.figure import Figure

# A function of residuals [..., d_model] and their layer: margins [...], or logits [..., token].
Reader = Callable[[Tensor, int], Tensor]

# Positions in one forward pass: the model computes its full logits at each of them.
_SPAN = 64


@dataclass(frozen=True, repr=False)
class WholeView:
    """Margins of one prompt.

    Attributes:
        ids: Token ids of the prompt.
        texts: Text of each token.
        lenses: Names, in the order of the margins' first axis.
        layers: Layers read, ascending; the last block is the last.
        margins: ``[lens, layer, position]`` in logits, float32.
        answer: Residuals of every block at the last position ``[block, d_model]``, in the model's dtype.
        last_block_error: Largest difference, over lenses and positions, between the last block's margin and the model's own.
    """

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    lenses: tuple[str, ...]
    layers: tuple[int, ...]
    margins: Tensor
    answer: Tensor
    last_block_error: float

    @property
    def frame(self) -> pd.DataFrame:
        """Tidy: position, token_id, token, lens, layer, margin; position varies slowest."""
        n_lenses, n_layers, n_positions = self.margins.shape
        each = n_lenses * n_layers
        return pd.DataFrame(
            {
                "position": np.repeat(np.arange(n_positions), each),
                "token_id": np.repeat(np.array(self.ids), each),
                "token": np.repeat(np.array(self.texts, dtype=object), each),
                "lens": np.tile(np.repeat(np.array(self.lenses, dtype=object), n_layers), n_positions),
                "layer": np.tile(self.layers, n_positions * n_lenses),
                "margin": rearrange(self.margins, "lens layer p -> (p lens layer)").numpy(),
            }
        )

    def plot(self, title: str = "") -> Figure:
        """Layer by token; see :func:`klb_probe.heat_map.heat_map`."""
        from klb_probe.heat_map import heat_map

        return heat_map(self.frame, title)

    def __repr__(self) -> str:
        return f"WholeView({len(self.ids)} tokens, {len(self.layers)} layers, lenses {', '.join(self.lenses)})"


def view_prompt(
    model: ResidualModel,
    ids: Sequence[int],
    contrast: TokenContrast,
    readers: Mapping[str, Reader],
    *,
    layers: Sequence[int] | None = None,
) -> WholeView:
    """Read one prompt at every position.

    Args:
        model: The model.
        ids: Token ids of the prompt.
        contrast: The tokens of the margin.
        readers: Margin of residuals, by lens name.
        layers: Layers to read besides the last block (default: all).

    Raises:
        KlbError: When a lens does not give the model's own margin at the last block.
    """
    cache, blocks = model.new_cache(), range(model.n_layers)
    chosen = sorted({*(blocks if layers is None else layers), blocks[-1]})
    captures = [
        model.capture(torch.tensor([list(span)]), blocks, torch.arange(len(span))[None], contrast.token_ids, cache)
        for span in chunks(ids, _SPAN)
    ]
    residuals = torch.cat([capture.residuals[:, 0] for capture in captures], dim=1)  # [block, position, d_model]
    own_logits = torch.cat([capture.logits[0] for capture in captures]).cpu()
    # Layers outside, so that a lens which reads its matrices from disk reads each once.
    margins = torch.stack(
        [torch.stack([read(residuals[layer], layer).float().cpu() for read in readers.values()]) for layer in chosen], dim=1
    )
    error = float((margins[:, -1] - contrast.margin(own_logits)).abs().max())
    allowed = SELF_CHECK_TOLERANCE[model.dtype] * max(1.0, float(own_logits.abs().max()))
    if not error <= allowed:
        raise KlbError(
            f"last block and the model's own margin differ by {error:.2g} (allowed {allowed:.2g}): "
            "the hook map or the lens does not fit this model"
        )
    texts = tuple(model.tokenizer.decode([token]) for token in ids)
    return WholeView(tuple(ids), texts, tuple(readers), tuple(chosen), margins, residuals[:, -1], error)


def logit_lens_logits(model: ResidualModel) -> Reader:
    """The logit lens over the tokenizer's tokens, ``[..., token]`` float32; head rows beyond them are padding, never read."""
    return lambda residual, _layer: model.unembed(model.final_norm(residual))[..., : len(model.tokenizer)].float()


def top_tokens(
    model: ResidualModel, view: WholeView, readers: Mapping[str, Reader], layers: Sequence[int], k: int
) -> pd.DataFrame:
    """The ``k`` tokens with the highest logits at the last position.

    Columns: lens, layer, position, rank (from 1), token_id, token, logit.

    Args:
        model: The model.
        view: The prompt, read.
        readers: Logits over the tokenizer's tokens, by lens name.
        layers: Layers to read.
        k: Tokens a layer.
    """
    if bad := [layer for layer in layers if not 0 <= layer < model.n_layers]:
        raise KlbError(f"{model.name} has layers 0-{model.n_layers - 1}, not {', '.join(map(str, bad))}")
    rows = []
    for lens, read in readers.items():
        for layer in layers:
            logits = read(view.answer[layer], layer)
            for rank, (logit, token) in enumerate(zip(*logits.topk(min(k, len(logits))), strict=True), 1):
                text = model.tokenizer.decode([int(token)])
                rows.append((lens, layer, len(view.ids) - 1, rank, int(token), text, float(logit)))
    return pd.DataFrame(rows, columns=["lens", "layer", "position", "rank", "token_id", "token", "logit"])
