"""Reading prompts with several lenses in one prefix-sharing pass, with a state that survives interruption."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from klb_probe.errors import KlbError
from klb_probe.files import write_safetensors
from klb_probe.lens.margin import Lens
from klb_probe.models.huggingface import SELF_CHECK_TOLERANCE
from klb_probe.models.prefix import prefill
from klb_probe.models.residual_model import ResidualModel


@dataclass
class Readouts:
    """Readouts of prompts at their last token, filled batch by batch.

    Attributes:
        margins: ``[prompt, lens, layer]`` float32; NaN where a lens does not read a layer.
        random: Random readouts ``[prompt, lens, layer, k]`` float32.
        own: The model's own margin ``[prompt]``.
        scale: Largest own logit of the contrast in absolute value ``[prompt]``; the unit of the last-block check.
        done: Which prompts have been read ``[prompt]``.
        key: Hash of model, lenses and prompts: what may be resumed.
        n_own: Leading lenses that must read the model's own margin at the last block.
    """

    margins: Tensor
    random: Tensor
    own: Tensor
    scale: Tensor
    done: Tensor
    key: str
    n_own: int

    _TENSORS: ClassVar[tuple[str, ...]] = ("margins", "random", "own", "scale", "done")

    @classmethod
    def empty(cls, n_prompts: int, n_lenses: int, n_layers: int, k: int, key: str, n_own: int) -> Readouts:
        """Nothing read yet."""
        return cls(
            margins=torch.full((n_prompts, n_lenses, n_layers), torch.nan),
            random=torch.full((n_prompts, n_lenses, n_layers, k), torch.nan),
            own=torch.full((n_prompts,), torch.nan),
            scale=torch.full((n_prompts,), torch.nan),
            done=torch.zeros(n_prompts, dtype=torch.bool),
            key=key,
            n_own=n_own,
        )

    def save(self, path: Path) -> None:
        """Write all of it in one rename."""
        write_safetensors(path, {name: getattr(self, name) for name in self._TENSORS}, {"key": self.key})

    def restore(self, path: Path) -> None:
        """Take over what an earlier run left; KlbError when it read other prompts, or with another model or lens."""
        try:
            with safe_open(path, "pt") as file:
                if (file.metadata() or {}).get("key") != self.key:
                    raise KlbError(f"{path.parent}: another run (prompts, model or lens differ); pass --overwrite")
                for name in self._TENSORS:
                    getattr(self, name).copy_(file.get_tensor(name))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise KlbError(f"{path} cannot be read ({error}); pass --overwrite to start again") from None

    @property
    def last_block_error(self) -> float:
        """Largest difference, over lenses and prompts read, between the last block's margin and the model's own."""
        difference = (self.margins[:, : self.n_own, -1] - self.own[:, None])[self.done]
        return float(difference.abs().max()) if len(difference) else 0.0

    def check_last_block(self, dtype: torch.dtype) -> None:
        """Every lens must read the model's own margin at the last block."""
        allowed = SELF_CHECK_TOLERANCE[dtype] * max(1.0, float(self.scale[self.done].max()))
        if not self.last_block_error <= allowed:
            raise KlbError(
                f"last block and the model's own margin differ by {self.last_block_error:.2g} (allowed {allowed:.2g}): "
                "the hook map or the lens does not fit this model"
            )


def readout_key(model: ResidualModel, lenses: Sequence[Lens], lens_hashes: Sequence[str], ids: Sequence[Sequence[int]]) -> str:
    """Hash of everything that readouts depend on."""
    parts = [model.fingerprint, str(model.dtype), *(lens.name for lens in lenses), *lens_hashes]
    parts += [str(lenses[0].contrast), str(lenses[0].contrast.token_ids), repr([list(row) for row in ids])]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def read_prompts(
    model: ResidualModel,
    lenses: Sequence[Lens],
    ids: Sequence[Sequence[int]],
    readouts: Readouts,
    *,
    batch_size: int = 8,
    on_batch: Callable[[int], object] = lambda _: None,
) -> None:
    """Read every prompt that ``readouts`` lacks, at its last token, all layers and lenses from one forward pass.

    Raises KlbError if the last block does not give the model's own margin.
    """
    todo = (~readouts.done).nonzero()[:, 0].tolist()
    if not todo:
        return
    layers = range(model.n_layers)
    contrast = lenses[0].contrast
    for indices, capture in prefill(model, [ids[i] for i in todo], layers, contrast.token_ids, batch_size=batch_size):
        rows = torch.tensor([todo[i] for i in indices])
        for number, lens in enumerate(lenses):
            read = [layer for layer in layers if lens.reads(layer)]  # the others stay NaN
            decoded = [lens.decode(capture.residuals[layer, :, 0], layer) for layer in read]
            here = rows[:, None], number, torch.tensor(read)
            readouts.margins[here] = torch.stack([d.margin for d in decoded], dim=-1).cpu()
            readouts.random[here] = torch.stack([d.random for d in decoded], dim=-2).cpu()
        logits = capture.logits[:, 0].cpu()
        readouts.own[rows] = contrast.margin(logits)
        readouts.scale[rows] = logits.abs().amax(-1)
        readouts.done[rows] = True
        readouts.check_last_block(model.dtype)
        on_batch(len(rows))
