"""How much memory a model needs, from its config alone: it is built and run on the meta device, where tensors hold no data.

Counted this way, an estimate follows each architecture's own code: experts, shared keys and values, recurrent states.
"""

from __future__ import annotations

import copy
import inspect
import logging
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel

from klb_probe.models.architecture import auto_class
from klb_probe.models.quantised import weight_bytes

log = logging.getLogger(__name__)

# The one type that the meta device multiplies grouped experts in.
_STAND_IN = torch.bfloat16


@dataclass(frozen=True)
class MemoryEstimate:
    """What a model needs, in bytes.

    Attributes:
        parameters: Their number.
        weights: All parameters in the wanted type, or quantised.
        key_values: What is kept of the prompts in one batch: keys, values, recurrent states.
        working: Most that one forward pass of the batch holds beside weights and cache, where attention is fused.
        margin_lens: Rows of a margin lens and its sketch, float32.
        full_lens: A full Jacobian lens as it is stored, float16 (it is memory-mapped, one layer at a time in use).
    """

    parameters: int
    weights: int
    key_values: int
    working: int
    margin_lens: int
    full_lens: int

    @property
    def peak(self) -> int:
        """Weights, cache, one forward pass and a margin lens."""
        return self.weights + self.key_values + self.working + self.margin_lens


def meta_model(config: Any, dtype: torch.dtype = _STAND_IN) -> PreTrainedModel:
    """The model of a config on the meta device; the config is left as it is."""
    with torch.device("meta"):
        return auto_class(config).from_config(copy.deepcopy(config), dtype=dtype).eval()


def estimate_memory(
    config: Any,
    dtype: torch.dtype,
    *,
    tokens: int,
    batch: int,
    quantise: str | None = None,
    contrast_tokens: int = 2,
    k: int = 32,
) -> MemoryEstimate:
    """What reading ``batch`` prompts of ``tokens`` tokens at once needs.

    Args:
        config: Of a model that :func:`~klb_probe.models.architecture.auto_class` has a class for.
        dtype: Of weights and activations.
        tokens: Length of a prompt.
        batch: Prompts in one forward pass.
        quantise: ``4bit`` or ``8bit`` weights, as :func:`~klb_probe.models.load.load_model` takes it.
        contrast_tokens: Rows of the margin lens a layer, beside its sketch.
        k: Rows of the sketch.
    """
    model, text = meta_model(config, dtype), config.get_text_config()
    if any(parameter.ndim == 3 for parameter in model.parameters()):
        model = meta_model(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    cache = DynamicCache(config=text)
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad(), _FusedAttention(), _PeakBytes(model, dtype) as held:
        model(
            torch.zeros(batch, tokens, dtype=torch.long, device="meta"), logits_to_keep=1, use_cache=True, **{argument: cache}
        )
    kept = {StorageWeakRef(tensor.untyped_storage()).cdata: tensor for tensor in _tensors(cache)}
    key_values = sum(_size(tensor, dtype) for tensor in kept.values())
    layers, width = text.num_hidden_layers - 1, text.hidden_size
    return MemoryEstimate(
        parameters=parameters,
        weights=weight_bytes(model, dtype, quantise),
        key_values=key_values,
        working=held.peak - key_values,
        margin_lens=layers * (contrast_tokens + k) * width * 4,
        full_lens=layers * width * width * 2,
    )


def free_memory(place: torch.device) -> int | None:
    """Bytes that are free on a device; None where it does not say."""
    if place.type == "cuda":
        return torch.cuda.mem_get_info(place)[0]
    if place.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return psutil.virtual_memory().available if place.type == "cpu" else None


def free_everywhere() -> int:
    """Bytes that are free on all GPUs and the host, over which accelerate spreads a model before it turns to disk."""
    places = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return sum(free_memory(place) or 0 for place in (*places, torch.device("cpu")))


def warn_if_too_large(
    name: str, config: Any, dtype: torch.dtype | str, place: torch.device, quantise: str | None = None
) -> None:
    """Say so in one line, before anything is read, where the weights exceed the free memory of their device.

    Nothing is said of a checkpoint that comes quantised, whose weights are smaller than their number says.

    Args:
        name: Of the model.
        config: Its config.
        dtype: A type, or ``auto`` for the checkpoint's.
        place: Where the weights are to go.
        quantise: ``4bit`` or ``8bit`` weights.
    """
    if getattr(config, "quantization_config", None):
        return
    wanted = dtype if isinstance(dtype, torch.dtype) else config.dtype or torch.float32
    weights, free = weight_bytes(meta_model(config), wanted, quantise), free_memory(place)
    if free is not None and weights > free:
        log.warning(
            "%s has %.1f GB of weights in %s, but %s has %.1f GB free: it will not fit; take a smaller type or model",
            name, weights / 1e9, quantise or str(wanted).removeprefix("torch."), place, free / 1e9,
        )  # fmt: skip


class _FusedAttention(TorchFunctionMode):
    """Attention that holds its result alone, as the kernels of real devices do; the meta device's holds every weight."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            query, _, value = args[:3]
            return query.new_empty(*query.shape[:-1], value.shape[-1])
        return function(*args, **(kwargs or {}))


class _PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made inside hold at once, each storage counted once and a model's own not at all."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.peak, self._dtype = 0, dtype
        self._own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self._own:
                self._held[key] = (StorageWeakRef(tensor.untyped_storage()), _size(tensor, self._dtype))
        self.peak = max(self.peak, sum(size for _, size in self._held.values()))
        return output


def _size(tensor: Tensor, dtype: torch.dtype) -> int:
    """Bytes of a tensor's storage in a model of the wanted type."""
    size = tensor.untyped_storage().nbytes()
    return size // _STAND_IN.itemsize * dtype.itemsize if tensor.dtype == _STAND_IN else size


def _tensors(cache: DynamicCache) -> list[Tensor]:
    return [leaf for layer in cache.layers for leaf in tree_leaves(vars(layer)) if isinstance(leaf, Tensor) and leaf.ndim]
