"""The Hugging Face backend: forward hooks on decoder blocks, nothing else touched."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from klb_probe.errors import KlbError
from klb_probe.models.chat import probe_chat_format
from klb_probe.models.hook_map import HookMap, norm_eps, resolve_layout
from klb_probe.models.readout import TokenReadout
from klb_probe.models.residual_model import Capture

# Largest accepted difference between decoding the last block and the model's own logits, relative to the largest logit.
# The closed form is float32 whatever the model is.
SELF_CHECK_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# Of a config: where it came from, and what the weights and the call say anyway.
_NOT_DECIDING = ("_name_or_path", "transformers_version", "dtype", "architectures", "use_cache", "return_dict")
_SELF_CHECK_TEXT = "The customer asked whether the refund was due, and the agent looked it up."


class HuggingFaceModel:
    """A :class:`~klb_probe.models.residual_model.ResidualModel` over a loaded ``transformers`` causal language model.

    The model is put in evaluation mode; its parameters, flags and hooks are as before after every call.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, hook_map: HookMap, *, name: str, identity: dict[str, str | None]
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name
        self.identity = identity
        self.layout = resolve_layout(model, hook_map)
        self.chat = probe_chat_format(tokenizer)
        self.n_layers = len(self.layout.blocks)
        self.fingerprint = self._fingerprint()
        self.settings = self._settings()
        self.vocab_size, self.d_model = self.layout.unembed.weight.shape
        self.stop_ids = self._stop_ids()
        self.context_length: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        # transformers 5.2x renames the argument family by family.
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.self_check_error = self._self_check()

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.unembed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    def _fingerprint(self) -> str:
        """A hash of a strided sample of every weight tensor, in bfloat16: the same for float32 and bfloat16 copies."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            flat = tensor.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // 256)][:256].to("cpu", torch.bfloat16)
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(sample.view(torch.int16).numpy().tobytes())
        return digest.hexdigest()

    def _settings(self) -> str:
        """A hash of what decides residuals beside the weights: the text model's config and the hook map."""
        config = {k: v for k, v in self.model.config.get_text_config().to_dict().items() if k not in _NOT_DECIDING}
        said = json.dumps([config, self.layout.map.model_dump(mode="json")], sort_keys=True, default=str)
        return hashlib.sha256(said.encode()).hexdigest()

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
        padded = {} if mask is None else {"attention_mask": mask.to(self.device), "position_ids": positions.to(self.device)}
        inputs = {self._cache_argument: cache, "use_cache": True, "logits_to_keep": 1, **padded}
        logits = self.model(ids.to(self.device), **inputs).logits[:, -1]
        if torch.isnan(logits).any():
            raise KlbError(f"{self.name}: logits are not numbers in {self.dtype}; load it with --dtype bfloat16 or float32")
        return logits

    def _stop_ids(self) -> frozenset[int]:
        """End of text by the tokenizer and by the generation config, which may list several (end of turn)."""
        said = self.model.generation_config.eos_token_id
        ids = [self.tokenizer.eos_token_id, *(said if isinstance(said, list) else [said])]
        return frozenset(i for i in ids if i is not None)

    @torch.no_grad()
    def _forward(
        self, ids: Tensor, layers: Sequence[int], positions: Tensor, token_ids: Sequence[int], **inputs: Any
    ) -> Capture:
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
            output = self.model(ids.to(self.device), logits_to_keep=columns.to(self.device), **moved)
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
                    self.model(ids[:, :first_position], logits_to_keep=1, **inputs)
            with torch.enable_grad(), self._hooks([*layers, target_layer], keep):
                self.model(ids[:, first_position:], logits_to_keep=1, **inputs)
            yield [kept[layer] for layer in layers], kept[target_layer]
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)

    @contextmanager
    def intervening(self, layer: int, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        # Hooks run in the order they were registered, so a capture inside comes after the change.
        def changed(_layer: int, output: Tensor) -> Tensor:
            return change(output.to(torch.promote_types(output.dtype, torch.float32))).to(output.dtype)

        with self._hooks([layer], changed):
            yield

    @contextmanager
    def _hooks(self, layers: Sequence[int], keep: Any) -> Iterator[None]:
        """Call ``keep(layer, output)`` at the output of blocks; a tensor it returns replaces the output."""
        if bad := [layer for layer in layers if not 0 <= layer < self.n_layers]:
            raise KlbError(f"{self.name} has layers 0-{self.n_layers - 1}, not {bad}")

        def hook(layer: int) -> Any:
            def run(_module: nn.Module, _inputs: Any, output: Any) -> Any:
                hidden = output if torch.is_tensor(output) else output[0]
                if hidden.ndim != 3:
                    raise KlbError(f"block {layer} returned shape {tuple(hidden.shape)}, not [batch, sequence, d_model]")
                replacement = keep(layer, hidden)
                if replacement is None:
                    return None
                return replacement if torch.is_tensor(output) else (replacement, *output[1:])

            return run

        handles = [self.layout.blocks[layer].register_forward_hook(hook(layer)) for layer in dict.fromkeys(layers)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def token_readout(self, token_ids: Sequence[int]) -> TokenReadout:
        head, norm = self.layout.unembed, self.layout.final_norm
        rows = head.weight.detach()[list(token_ids)].float().cpu()
        weight = getattr(norm, "weight", None)
        gain = torch.ones(self.d_model) if weight is None else weight.detach().float().cpu()
        norm_bias, head_bias = getattr(norm, "bias", None), getattr(head, "bias", None)
        return TokenReadout.fold(
            rows,
            torch.zeros(len(rows)) if head_bias is None else head_bias.detach()[list(token_ids)].float().cpu(),
            gain + 1 if self.layout.map.norm.gain == "one_plus" else gain,
            torch.zeros(self.d_model) if norm_bias is None else norm_bias.detach().float().cpu(),
            eps=norm_eps(self.layout),
            centred=self.layout.map.norm.kind == "layer",
            softcap=self.layout.softcap,
            scale=self.layout.scale,
        )

    @torch.no_grad()
    def final_norm(self, residual: Tensor) -> Tensor:
        return self.layout.final_norm(residual.to(self.layout.unembed.weight.device, self.dtype))

    @torch.no_grad()
    def unembed(self, normed: Tensor) -> Tensor:
        logits, cap = self.layout.unembed(normed), self.layout.softcap
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
            output = self.model.generate(
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
        last = own.residuals[0].to(self.layout.unembed.weight.device)
        decoded = self.unembed(self.final_norm(last))[..., some].float()
        closed_form = self.token_readout(some).to(last.device).logits(last)
        scale = own.logits.abs().max()
        error = max(float((logits - own.logits).abs().max() / scale) for logits in (decoded, closed_form))
        if not error <= SELF_CHECK_TOLERANCE[self.dtype]:
            raise KlbError(
                f"hook map {self.layout.map.family} does not decode {type(self.model).__name__}: last block and own logits "
                f"differ by {error:.2g} of the largest logit (allowed {SELF_CHECK_TOLERANCE[self.dtype]:.0e})"
            )
        if not self.keeps_every_position():
            self._check_reading_on(ids, own.residuals)
        return error

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
