"""What is known of a model before its weights are read: its hook map, how it is spoken to, what it will need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from klb_probe.errors import KlbError
from klb_probe.lens.contrast import TokenContrast
from klb_probe.models.chat import ChatFormat, automatic_prefix
from klb_probe.models.hook_map import find_hook_map, norm_eps, resolve_layout
from klb_probe.models.load import SPREAD
from klb_probe.models.memory import estimate_memory, free_everywhere, free_memory, meta_model
from klb_probe.models.quantised import QUANTISATIONS, quantised_as

# Tokens shown before the answer.
_SHOWN = 6


def map_facts(config: Any, hooks: Iterable[Path] = ()) -> dict[str, Any]:
    """The hook map as it resolves on the model of a config. Raises KlbError as loading the model would."""
    model, text = meta_model(config), config.get_text_config()
    layout = resolve_layout(model, find_hook_map(model, hooks))
    return {
        "class": type(model).__name__,
        "model_type": config.model_type,
        "family": layout.map.family,
        **layout.paths,
        "n_layers": len(layout.blocks),
        "d_model": layout.unembed.weight.shape[1],
        "vocab_size": layout.unembed.weight.shape[0],
        "norm": layout.map.norm.model_dump() | {"eps": norm_eps(layout)},
        "tied": layout.unembed.weight is model.get_input_embeddings().weight,
        "head_bias": getattr(layout.unembed, "bias", None) is not None,
        "softcap": layout.softcap,
        "scale": layout.scale,
        "context_length": getattr(text, "max_position_embeddings", None),
    }


def chat_facts(chat: ChatFormat) -> dict[str, Any]:
    """How prompts are made: template, system role, BOS, thinking, and the last tokens before an answer."""
    tokenizer, ids = chat.tokenizer, chat.encode("s", "u")
    try:
        contrast = str(TokenContrast.of(chat))
    except KlbError as error:
        contrast = str(error)
    return {
        "style": chat.style,
        "bos": tokenizer.bos_token,
        "bos_in_prompt": tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id,
        "before_plain_text": tokenizer.convert_ids_to_tokens(automatic_prefix(tokenizer)),
        "thinking": chat.thinking.how,
        "before_answer": [tokenizer.decode([token]) for token in ids[-_SHOWN:]],
        "answer_prefix": chat.answer_prefix,
        "contrast": contrast,
    }


def memory_facts(
    config: Any,
    dtype: torch.dtype,
    place: torch.device | None,
    *,
    tokens: int,
    batch: int,
    quantise: str | None = None,
) -> dict[str, Any]:
    """The memory estimate in bytes, and what is free on the device; with ``place`` None, on all devices together."""
    already = quantised_as(config)
    quantised = quantise or (already if already in QUANTISATIONS else None)
    estimate = estimate_memory(config, dtype, tokens=tokens, batch=batch, quantise=quantised)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "quantised": quantised,
        "comes_quantised": already if quantised is None else None,
        "device": SPREAD if place is None else str(place),
        "tokens": tokens,
        "batch": batch,
        **asdict(estimate),
        "peak": estimate.peak,
        "free": free_everywhere() if place is None else free_memory(place),
    }


def loaded_facts(model: Any) -> dict[str, Any]:
    """What only the weights say."""
    return {
        "self_check_error": model.self_check_error,
        "stop_ids": {token: model.tokenizer.decode([token]) for token in sorted(model.stop_ids)},
        "keeps_every_position": model.keeps_every_position(),
    }
