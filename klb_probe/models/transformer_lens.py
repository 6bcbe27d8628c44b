"""The TransformerLens backend: residuals are read and changed at the hook points of a ``TransformerBridge``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge import AttentionBridge, TransformerBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import PreTrainedModel

from klb_probe.errors import KlbError
from klb_probe.models.block_output import Keep
from klb_probe.models.fingerprint import Sample, weight_samples
from klb_probe.models.hook_map import HookMap, Layout
from klb_probe.models.huggingface import SELF_CHECK_TOLERANCE, HuggingFaceModel
from klb_probe.models.placement import is_spread


class TransformerLensModel(HuggingFaceModel):
    """A :class:`~klb_probe.models.residual_model.ResidualModel` over a TransformerLens bridge without weight processing.

    Residuals are those of ``blocks.{layer}.hook_resid_post``, read, changed and differentiated there. Everything else
    (tokens, key-value caches, generation, readout) is that of the ``transformers`` model inside the bridge, whose every
    pass runs through the bridge's components; names of weights, and so the fingerprint, are those it has without them.

    A direction added by hand, with what :meth:`hook_name` names:

        >>> def add(residual, hook):
        ...     return residual + direction
        >>> logits = model.bridge.run_with_hooks(torch.tensor([ids]), fwd_hooks=[(model.hook_name(2), add)])

    Attributes:
        bridge: The bridge.
    """

    backend = "transformer_lens"

    def __init__(
        self,
        model: PreTrainedModel | TransformerBridge,
        tokenizer: Any,
        hook_map: HookMap,
        *,
        name: str,
        identity: dict[str, str | None],
    ) -> None:
        """A ``transformers`` model is put into a bridge, which replaces its modules and makes its attention eager.

        Raises:
            KlbError: For a bridge with processed weights, an architecture that TransformerLens does not know, or one whose
                key-value cache it does not fill.
        """
        self.bridge = model if isinstance(model, TransformerBridge) else bridge_over(model)
        if self.bridge.compatibility_mode and getattr(self.bridge, "_weights_processed", True):
            raise KlbError(
                f"{name}: this TransformerBridge has processed weights, so its residuals are not the model's; boot one and "
                "leave out enable_compatibility_mode(), or call it with no_processing=True"
            )
        self._attention = [module for module in self.bridge.modules() if _rebuilds_attention(module)]
        super().__init__(self.bridge.original_model, tokenizer, hook_map, name=name, identity=identity)
        self._check_cache()

    def hook_name(self, layer: int) -> str:
        """The hook point after block ``layer``."""
        return f"blocks.{self._checked([layer])[0]}.hook_resid_post"

    def _layout(self, hook_map: HookMap) -> Layout:
        layout = super()._layout(hook_map)
        return replace(layout, final_norm=_unwrapped(layout.final_norm), unembed=_unwrapped(layout.unembed))

    def _samples(self) -> dict[str, Sample]:
        added = {id(buffer) for buffer in self.layout.unembed.buffers()}  # a zero bias, where the head has none
        named = {_name_without_bridge(self.model, key): tensor for key, tensor in self.model.state_dict(keep_vars=True).items()}
        return weight_samples((name, one) for name, one in named.items() if name is not None and id(one) not in added)

    def _run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for module in self._attention:
                stack.callback(module.register_forward_pre_hook(_name_cache, with_kwargs=True).remove)
            return super()._run(function, *args, **kwargs)

    @contextmanager
    def _hooks(self, layers: Sequence[int], keep: Keep) -> Iterator[None]:
        def at(layer: int) -> Callable[..., Tensor | None]:
            return lambda residual, hook: keep(layer, residual)

        with self.bridge.hooks([(self.hook_name(layer), at(layer)) for layer in self._checked(layers)]):
            yield

    def _check_cache(self) -> None:
        """A cache that the bridge leaves empty changes every number read after a shared prefix, and says nothing."""
        ids = torch.arange(8)[None] % self.vocab_size
        last = torch.tensor([[3]])
        whole = self.capture(ids, [self.n_layers - 1], last + 4, []).residuals
        cache = self.new_cache()
        self.capture(ids[:, :4], [], last, [], cache)
        continued = self.capture(ids[:, 4:], [self.n_layers - 1], last, [], cache).residuals
        error = float((whole - continued).abs().max() / whole.abs().max())
        if not error <= SELF_CHECK_TOLERANCE[self.dtype]:
            raise KlbError(
                f"{self.name}: TransformerLens loses the keys and values of {type(self.model).__name__} (residuals after a "
                f"cached prefix differ by {error:.2g}); use --backend huggingface"
            )


def bridge_over(model: PreTrainedModel) -> TransformerBridge:
    """A bridge around a loaded model: its components replace modules of the model, its weights stay as they are.

    Attention becomes eager, as TransformerLens boots it: without that, hooks on attention patterns never fire. The bridge
    has no tokenizer, since TransformerLens would change the one it is given.
    """
    if is_spread(model):
        raise KlbError(f"TransformerLens takes no {type(model).__name__} spread over devices; use --backend huggingface")
    model.set_attn_implementation("eager")
    try:
        return build_bridge_from_module(model, type(model).__name__, hf_config=model.config)
    except ValueError as error:
        raise KlbError(f"TransformerLens has no bridge for {type(model).__name__}; use --backend huggingface") from error


def _rebuilds_attention(module: nn.Module) -> bool:
    return isinstance(module, AttentionBridge) and type(module).forward is not AttentionBridge.forward


def _name_cache(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """TransformerLens 4.3 looks for the cache under the name it had before transformers 5.2x."""
    if kwargs.get("cache") is None or "past_key_values" in kwargs:
        return None
    return args, {**kwargs, "past_key_values": kwargs["cache"]}


def _unwrapped(module: nn.Module) -> nn.Module:
    while isinstance(module, GeneralizedComponent) and module.original_component is not None:
        module = module.original_component
    return module


def _name_without_bridge(model: nn.Module, key: str) -> str | None:
    """The name that a tensor has without the bridge; None for a component's second path to it, or a copy of its own."""
    module, kept = model, []
    *path, tensor = key.split(".")
    for part in path:
        inner = isinstance(module, GeneralizedComponent)
        if inner and part != "_original_component":
            return None
        module = module.get_submodule(part)
        if not inner:
            kept.append(part)
    return ".".join([*kept, tensor])
