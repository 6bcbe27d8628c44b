"""The Hugging Face backend: forward hooks on decoder blocks, nothing else touched."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from klb_probe.errors import KlbError
from klb_probe.models.block_output import Keep, through
from klb_probe.models.chat import probe_chat_format
from klb_probe.models.fingerprint import Sample, settings_hash, weight_samples, weights_fingerprint
from klb_probe.models.hook_map import HookMap, Layout, norm_eps, resolve_layout
from klb_probe.models.placement import all_weights, computing_device, mixture_explained, places, weight
from klb_probe.models.quantised import quantised_as
from klb_probe.models.readout import TokenReadout
from klb_probe.models.residual_model import Capture

# Largest accepted difference between decoding the last block and the model's own logits, relative to the largest logit.
# The closed form is float32 whatever the model is.
SELF_CHECK_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# Most tokens of a prompt in one forward pass: what a pass holds beside keys and values grows with them.
CHUNK = 4096
_SELF_CHECK_TEXT = "The customer asked whether the refund was due, and the agent looked it up."


class HuggingFaceModel:
    """A :class:`~klb_probe.models.residual_model.ResidualModel` over a loaded ``transformers`` causal language model.

    The model is put in evaluation mode; its parameters, flags and hooks are as before after every call. The other backends
    are this one with another way of reaching into a pass: :meth:`_hooks` and :meth:`_run`. Weights may lie on several devices
    (accelerate's ``device_map``); whatever is handed back is on :attr:`device`.

    A direction added by hand, with what :meth:`hook_name` names:

        >>> block = model.model.get_submodule(model.hook_name(2))
        >>> hook = block.register_forward_hook(lambda module, inputs, output: output + direction)
        >>> changed = model.residuals([ids], layers=[2], positions=[-1])
        >>> hook.remove()

    Attributes:
        chunk: Most tokens of a prompt in one forward pass; a longer one is read piece by piece, with the same numbers. Models
            whose rotary frequencies depend on the length of what is read are always read whole.
    """

    backend = "huggingface"

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, hook_map: HookMap, *, name: str, identity: dict[str, str | None]
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name
        # Rounded weights give other margins: wherever the model is named, this is said.
        self.identity = identity if (mark := quantised_as(model.config)) is None else identity | {"quantised": mark}
        self.chunk = CHUNK
        self._frequencies_change = _frequencies_change(model.config.get_text_config())
        self.layout = self._layout(hook_map)
        self.chat = probe_chat_format(tokenizer)
        self.n_layers = len(self.layout.blocks)
        with mixture_explained(model, name):
            self.fingerprint = weights_fingerprint(self._samples())
        self.settings = settings_hash(model.config.get_text_config(), self.layout.map)
        self.vocab_size, self.d_model = self.layout.unembed.weight.shape
        self.stop_ids = self._stop_ids()
        self.context_length: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        # transformers 5.2x renames the argument family by family.
        self._cache_argument = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
        with mixture_explained(model, name):
            self.self_check_error = self._self_check()

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.unembed.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where ids go in and what is read arrives."""
        device = computing_device(self.model.get_input_embeddings())
        assert device is not None  # an embedding has weights
        return device

    @property
    def where(self) -> str:
        """Type and place of the weights, in a few words."""
        mark = f"{self.identity['quantised']}, " if "quantised" in self.identity else ""
        return f"{mark}{str(self.dtype).removeprefix('torch.')} on {' + '.join(places(self.model))}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.n_layers} layers of width {self.d_model}, {self.where})"

    def hook_name(self, layer: int) -> str:
        """The output of block ``layer`` in the backend's own words: here the name of the module that returns it."""
        return f"{self.layout.paths['blocks']}.{self._checked([layer])[0]}"

    def _layout(self, hook_map: HookMap) -> Layout:
        return resolve_layout(self.model, hook_map)

    def _samples(self) -> dict[str, Sample]:
        return weight_samples(all_weights(self.model))

    def residuals(
        self, ids: Sequence[Sequence[int]], layers: Sequence[int], positions: Sequence[int], padding: str = "right"
    ) -> Tensor:
        lengths = torch.tensor([len(row) for row in ids])
        if any(p >= lengths.min() or p < -lengths.min() for p in positions):
            raise KlbError(f"positions {list(positions)} reach beyond the shortest prompt of {lengths.min()} tokens")
        longest = int(lengths.max())
        offsets = longest - lengths if padding == "left" else torch.zeros_like(lengths)
        batch = torch.zeros(len(ids), longest, dtype=torch.long)
        mask = torch.zeros_like(batch)
        for row, offset, target, real in zip(ids, offsets.tolist(), batch, mask, strict=True):
            target[offset : offset + len(row)] = torch.tensor(row)
            real[offset : offset + len(row)] = 1
        wanted = torch.tensor(positions)
        absolute = offsets[:, None] + torch.where(wanted < 0, lengths[:, None] + wanted, wanted)
        if padding != "left":
            return self._forward(batch, layers, absolute, ()).residuals
        # Position ids follow the mask: a left pad must not shift the positions of real tokens.
        inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        return self._forward(batch, layers, absolute, (), **inputs).residuals

    def capture(
        self, ids: Tensor, layers: Sequence[int], positions: Tensor, token_ids: Sequence[int], cache: Any = None
    ) -> Capture:
        keys_and_values = {} if cache is None else {self._cache_argument: cache}
        return self._forward(ids, layers, positions, token_ids, use_cache=cache is not None, **keys_and_values)

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config.get_text_config())

    def keeps_every_position(self) -> bool:
        # A sliding window keeps less, but it is the mask that makes it one: see `next_logits`.
        return {type(layer) for layer in self.new_cache().layers} <= {DynamicLayer, DynamicSlidingWindowLayer}

    @torch.no_grad()
    def next_logits(
        self, ids: Tensor, cache: DynamicCache, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        padded = {}
        if mask is not None and positions is not None:
            padded = {"attention_mask": mask.to(self.device), "position_ids": positions.to(self.device)}
        inputs = {self._cache_argument: cache, "use_cache": True, "logits_to_keep": 1, **padded}
        pieces = [ids] if mask is not None or self._frequencies_change else ids.split(self.chunk, dim=1)
        for piece in pieces:
            logits = self._run(self.model, piece.to(self.device), **inputs).logits[:, -1]
        if torch.isnan(logits).any():
            raise KlbError(f"{self.name}: logits are not numbers in {self.dtype}; load it with --dtype bfloat16 or float32")
        return logits

    def _stop_ids(self) -> frozenset[int]:
        """End of text by the tokenizer and by the generation config, which may list several (end of turn)."""
        said = self.model.generation_config.eos_token_id
        ids = [self.tokenizer.eos_token_id, *(said if isinstance(said, list) else [said])]
        return frozenset(i for i in ids if i is not None)

    def _forward(
        self, ids: Tensor, layers: Sequence[int], positions: Tensor, token_ids: Sequence[int], **inputs: Any
    ) -> Capture:
        whole = ids.shape[1] <= self.chunk or self._frequencies_change
        if whole or "attention_mask" in inputs:  # recurrent layers take no mask beside a cache
            return self._pass(ids, layers, positions, token_ids, **inputs)
        inputs = {self._cache_argument: self.new_cache()} | inputs | {"use_cache": True}
        positions = torch.where(positions < 0, positions + ids.shape[1], positions)
        captures, place = [], torch.zeros_like(positions)
        for number, piece in enumerate(ids.split(self.chunk, dim=1)):
            here = positions - number * self.chunk
            inside = (here >= 0) & (here < piece.shape[1])
            columns = inside.any(0)
            if not columns.any():
                self._pass(piece, [], torch.zeros(len(ids), 1, dtype=torch.long), (), **inputs)
                continue
            # Where a column is inside for some rows only, the others read something, which has no place.
            captures.append(self._pass(piece, layers, here[:, columns].clamp(0, piece.shape[1] - 1), token_ids, **inputs))
            place = torch.where(inside, sum(one.logits.shape[1] for one in captures[:-1]) + columns.cumsum(0) - 1, place)
        rows = torch.arange(len(ids))[:, None]
        residuals = torch.cat([one.residuals for one in captures], dim=2)[:, rows, place] if layers else torch.empty(0)
        return Capture(residuals, torch.cat([one.logits for one in captures], dim=1)[rows, place])

    @torch.no_grad()
    def _pass(self, ids: Tensor, layers: Sequence[int], positions: Tensor, token_ids: Sequence[int], **inputs: Any) -> Capture:
        captured: dict[int, Tensor] = {}
        rows = torch.arange(len(ids))[:, None]

        def keep(layer: int, output: Tensor) -> None:
            captured[layer] = output[rows.to(output.device), positions.to(output.device)].clone()

        # Where no logits are wanted, the head still has to be run somewhere.
        columns, inverse = torch.unique(
            positions if len(token_ids) else positions[:1, :1].expand_as(positions), return_inverse=True
        )
        moved = {key: value.to(self.device) if torch.is_tensor(value) else value for key, value in inputs.items()}
        with self._hooks(layers, keep):
            # A list and no tensor: accelerate would bring that to the first device, but the head may be on another.
            output = self._run(self.model, ids.to(self.device), logits_to_keep=columns.tolist(), **moved)
        wanted = torch.tensor(list(token_ids), dtype=torch.long, device=output.logits.device)
        logits = output.logits[..., wanted].float()[rows.to(wanted.device), inverse.to(wanted.device)]
        residuals = torch.stack([captured[layer].to(self.device) for layer in layers]) if layers else torch.empty(0)
        if not torch.isfinite(residuals).all():
            raise KlbError(f"{self.name}: residuals are not finite in {self.dtype}; load it with --dtype bfloat16 or float32")
        return Capture(residuals, logits)

    @contextmanager
    def gradient_graph(
        self, ids: Tensor, layers: Sequence[int], target_layer: int, first_position: int = 0
    ) -> Iterator[tuple[list[Tensor], Tensor]]:
        if not layers or max(layers) >= target_layer:
            raise KlbError(f"source layers {list(layers)} must lie below target layer {target_layer}")
        kept: dict[int, Tensor] = {}
        first = min(layers)

        def keep(layer: int, output: Tensor) -> Tensor | None:
            if layer == first:  # the graph starts here: nothing below is differentiated
                output = output.detach().requires_grad_()
            kept[layer] = output
            return output if layer == first else None

        flags = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        try:
            for parameter, _ in flags:
                parameter.requires_grad_(False)
            ids, inputs = ids.to(self.device), {"use_cache": False}
            if first_position:
                inputs = {"use_cache": True, self._cache_argument: self.new_cache()}
                with torch.no_grad():
                    self._run(self.model, ids[:, :first_position], logits_to_keep=1, **inputs)
            with torch.enable_grad(), self._hooks([*layers, target_layer], keep):
                # A list and no number: with that, Gemma 4 leaves all other positions out of its last blocks.
                self._run(self.model, ids[:, first_position:], logits_to_keep=[-1], **inputs)
            yield [kept[layer] for layer in layers], kept[target_layer]
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)

    @contextmanager
    def intervening(self, layer: int, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        # Hooks run in the order they were registered, so a capture inside comes after the change.
        def changed(_layer: int, output: Tensor) -> Tensor:
            return change(output.to(self.device, torch.promote_types(output.dtype, torch.float32))).to(output)

        with self._hooks([layer], changed):
            yield

    def _run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Every pass of the model comes through here: ``function`` is the model or its ``generate``."""
        return function(*args, **kwargs)

    @contextmanager
    def _hooks(self, layers: Sequence[int], keep: Keep) -> Iterator[None]:
        """Call ``keep(layer, output)`` at the output of blocks; a tensor it returns replaces the output."""

        def hook(layer: int) -> Callable[[nn.Module, Any, Any], Any]:
            return lambda _module, _inputs, output: through(keep, layer, output)

        handles = [self.layout.blocks[layer].register_forward_hook(hook(layer)) for layer in self._checked(layers)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _checked(self, layers: Sequence[int]) -> list[int]:
        """Each layer once, in order; KlbError for one that the model lacks."""
        if bad := [layer for layer in layers if not 0 <= layer < self.n_layers]:
            raise KlbError(f"{self.name} has layers 0-{self.n_layers - 1}, not {bad}")
        return sorted(set(layers))

    def token_readout(self, token_ids: Sequence[int]) -> TokenReadout:
        rows, head_bias, weight, norm_bias = self._readout_weights(token_ids)
        assert rows is not None  # a head has weights
        gain = torch.ones(self.d_model) if weight is None else weight
        return TokenReadout.fold(
            rows,
            torch.zeros(len(rows)) if head_bias is None else head_bias,
            gain + 1 if self.layout.map.norm.gain == "one_plus" else gain,
            torch.zeros(self.d_model) if norm_bias is None else norm_bias,
            eps=norm_eps(self.layout),
            centred=self.layout.map.norm.kind == "layer",
            softcap=self.layout.softcap,
            scale=self.layout.scale,
        )

    def _readout_weights(self, token_ids: Sequence[int]) -> tuple[Tensor | None, ...]:
        """Head rows and biases of some tokens, weight and bias of the final norm (float32); None for what it has not."""
        head, norm, wanted = self.layout.unembed, self.layout.final_norm, list(token_ids)
        found = [None if (one := weight(head, name)) is None else one[wanted] for name in ("weight", "bias")]
        found += [weight(norm, name) for name in ("weight", "bias")]
        return tuple(None if one is None else one.detach().float().cpu() for one in found)

    @torch.no_grad()
    def final_norm(self, residual: Tensor) -> Tensor:
        norm = self.layout.final_norm
        return norm(residual.to(device=computing_device(norm), dtype=self.dtype)).to(self.device)

    @torch.no_grad()
    def unembed(self, normed: Tensor) -> Tensor:
        head, cap = self.layout.unembed, self.layout.softcap
        logits = head(normed.to(computing_device(head))).to(self.device)
        if self.layout.scale != 1:
            logits = logits * self.layout.scale
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.no_grad()
    def generate(
        self, ids: Sequence[Sequence[int]], max_new_tokens: int, *, temperature: float, seed: int, stop: bool = True
    ) -> list[list[int]]:
        prompt = torch.tensor(ids, device=self.device)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            output = self._run(
                self.model.generate,
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_new_tokens,
                min_new_tokens=None if stop else max_new_tokens,
                pad_token_id=self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0,
                use_cache=True,  # each token is read once, as it comes, whatever the model's configuration says
                **(sampling or {"do_sample": False}),
            )
        return output[:, prompt.shape[1] :].tolist()

    def _self_check(self) -> float:
        """Decode the last block both ways and compare with the model's own logits; a mismatch is a wrong hook map."""
        ids = torch.tensor([self.tokenizer(_SELF_CHECK_TEXT)["input_ids"][:32]])
        positions = rearrange(torch.arange(ids.shape[1]), "p -> 1 p")
        some = torch.linspace(0, self.vocab_size - 1, 64).long().tolist()
        own = self.capture(ids, [self.n_layers - 1], positions, some)
        scale, decoded = own.logits.abs().max(), self._decoded(own.residuals[0], some)
        error = max(float((logits.to(scale.device) - own.logits).abs().max() / scale) for logits in decoded)
        if not error <= SELF_CHECK_TOLERANCE[self.dtype]:
            raise KlbError(
                f"hook map {self.layout.map.family} does not decode {type(self.model).__name__}: last block and own logits "
                f"differ by {error:.2g} of the largest logit (allowed {SELF_CHECK_TOLERANCE[self.dtype]:.0e})"
            )
        if not self.keeps_every_position():
            self._check_reading_on(ids, own.residuals)
        return error

    def _decoded(self, last: Tensor, token_ids: Sequence[int]) -> list[Tensor]:
        """Logits of some tokens from the last block's output, in every way that there is."""
        whole = self.unembed(self.final_norm(last))[..., list(token_ids)].float()
        return [whole, self.token_readout(token_ids).to(last.device).logits(last)]

    def _check_reading_on(self, ids: Tensor, whole: Tensor) -> None:
        """Refuse recurrent layers that go on from a shared prefix as if nothing had been read: prompts share prefixes here."""
        cache, half = self.new_cache(), ids.shape[1] // 2
        self.capture(ids[:, :half], [], torch.tensor([[0]]), [], cache)
        rest = rearrange(torch.arange(ids.shape[1] - half), "p -> 1 p")
        read_on = self.capture(ids[:, half:], [self.n_layers - 1], rest, [], cache).residuals
        error = float((read_on - whole[:, :, half:]).abs().max() / whole.abs().max())
        if not error <= SELF_CHECK_TOLERANCE[self.dtype]:
            raise KlbError(
                f"{type(self.model).__name__} cannot be read: its recurrent layers lose a prefix that was read before, and "
                f"prompts share prefixes here (residuals differ by {error:.2g} of the largest)"
            )


def _frequencies_change(config: Any) -> bool:
    """Whether rotary frequencies depend on the length of a pass, so that keys of a piece are not those of the whole."""
    said = getattr(config, "rope_parameters", None) or {}
    kinds = [str(one.get("rope_type")) for one in (said, *said.values()) if isinstance(one, dict)]
    return any(kind == "longrope" or "dynamic" in kind for kind in kinds)
