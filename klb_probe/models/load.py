"""Loading a model by name, or wrapping one that is already loaded."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from klb_probe.errors import KlbError
from klb_probe.models.chat import ChatFormat, probe_chat_format
from klb_probe.models.gguf_cache import dequantised_folder
from klb_probe.models.hook_map import find_hook_map
from klb_probe.models.hub import first_line, hub_errors
from klb_probe.models.huggingface import HuggingFaceModel
from klb_probe.models.registry import DEFAULT_MODEL, ModelSource, resolve
from klb_probe.organisms.adapters import merge, read_adapter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def load_model(
    name: str = DEFAULT_MODEL,
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    hooks: Iterable[Path] = (),
) -> HuggingFaceModel:
    """Load a model by alias, hub id, local folder or ``.gguf`` file; an adapter is merged into its base.

    Args:
        name: What to load.
        device: ``auto`` (cuda, else mps, else cpu), or a torch device.
        dtype: ``auto`` (the registry's; else float32 on a CPU and the checkpoint's on an accelerator) or a name in DTYPES.
        revision: Hub revision (branch, tag or commit) to pin.
        hooks: Folders with further hook maps.

    Raises:
        KlbError: With what is wrong and what to do, for everything a user can get wrong here.
    """
    source = resolve(name)
    place = _device(device)
    if dtype not in ("auto", *DTYPES):
        raise KlbError(f"unknown dtype {dtype!r}; one of auto, {', '.join(DTYPES)}")
    adapter = read_adapter(source.adapter) if source.adapter else None
    if adapter and adapter.organism.base_gguf_sha256 and not source.gguf:
        raise KlbError(f"{name} belongs to the GGUF weights of {source.base}, which are not here; {source.hint or 'get them'}")
    wanted = _dtype(dtype, source, place)
    sha256 = None
    if source.gguf:
        with _quiet():
            folder, sha256 = dequantised_folder(source.gguf, source.sha256)
    else:
        folder = source.folder
    where: str = str(folder or source.hub)
    if revision and not source.hub:
        raise KlbError(f"--revision pins a hub repository; {name} is read from {where}")
    # Code from a repository is never run.
    pinned: dict[str, Any] = {"trust_remote_code": False}
    if source.hub and revision:
        pinned["revision"] = revision
    with _quiet(), _explained(source):
        config = AutoConfig.from_pretrained(where, **pinned)
        _check_causal(config, name)
        # Straight to the device: the weights of a large model need not fit the host's memory first.
        placement = {} if place.type == "cpu" else {"device_map": {"": place}}
        model, loading = AutoModelForCausalLM.from_pretrained(
            # A merged weight is rounded once: the sum, not the base before it.
            where,
            config=config,
            dtype="auto" if adapter else wanted,
            output_loading_info=True,
            **placement,
            **pinned,
        )
        tokenizer = AutoTokenizer.from_pretrained(where, **pinned)
    if missing := sorted(loading["missing_keys"]):  # transformers would fill them with random numbers
        raise KlbError(f"{where} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}")
    identity = {
        "name": source.name,
        "hub": source.hub,
        "revision": getattr(config, "_commit_hash", None) if source.hub else None,
        "folder": str(source.folder) if source.folder else None,
        "gguf_sha256": sha256,
    }
    if adapter:
        hooks = list(hooks)
        base = from_model(model, tokenizer, name=source.base, hooks=hooks)
        merge(model, adapter, name=base.name, fingerprint=base.fingerprint)
        _cast(model, wanted)
        identity |= {"base": source.base, "adapter_sha256": adapter.organism.adapter_sha256}
    return from_model(model, tokenizer, name=source.name, identity=identity, hooks=hooks)


def load_chat(name: str = DEFAULT_MODEL) -> ChatFormat:
    """A model's chat format alone: its tokenizer, not its weights. Raises KlbError as :func:`load_model` does."""
    source = resolve(name)
    with _quiet():
        folder = dequantised_folder(source.gguf, source.sha256)[0] if source.gguf else source.folder
    with _quiet(), _explained(source):
        tokenizer = AutoTokenizer.from_pretrained(str(folder or source.hub), trust_remote_code=False)
    return probe_chat_format(tokenizer)


def from_model(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    name: str | None = None,
    identity: dict[str, str | None] | None = None,
    hooks: Iterable[Path] = (),
) -> HuggingFaceModel:
    """Wrap a causal language model of ``transformers`` that is already in memory, as it is."""
    if not isinstance(model, PreTrainedModel):
        raise KlbError(f"expected a transformers model, not {type(model).__name__}")
    name = name or model.config.name_or_path or type(model).__name__
    return HuggingFaceModel(model, tokenizer, find_hook_map(model, hooks), name=name, identity=identity or {"name": name})


def _device(device: str) -> torch.device:
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cuda", "mps", "cpu"):
        raise KlbError(f"unknown device {device!r}; one of auto, cuda, cuda:N, mps, cpu")
    if (place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count()) or (
        place.type == "mps" and not torch.backends.mps.is_available()
    ):
        raise KlbError(f"device {device} is not available here; use --device auto or cpu")
    return place


def _dtype(dtype: str, source: ModelSource, place: torch.device) -> torch.dtype | str:
    if dtype != "auto":
        return DTYPES[dtype]
    if source.dtype:
        return DTYPES[source.dtype]
    return torch.float32 if place.type == "cpu" else "auto"


def _cast(model: PreTrainedModel, dtype: torch.dtype | str) -> None:
    """Parameters only: buffers such as rotary frequencies keep the precision the loader gave them."""
    if isinstance(dtype, torch.dtype):
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        model.config.dtype = dtype


def _check_causal(config: Any, name: str) -> None:
    architectures = config.architectures or ["(none named)"]
    causal = all(a.endswith(_CAUSAL_SUFFIXES) for a in architectures) or architectures == ["(none named)"]
    if config.is_encoder_decoder or not causal or type(config) not in AutoModelForCausalLM._model_mapping:
        raise KlbError(f"{name} is not a causal language model (architecture {', '.join(architectures)})")


@contextlib.contextmanager
def _explained(source: ModelSource) -> Iterator[None]:
    """Turn what hub and loader raise into one line with a remedy."""
    if source.hub:
        hint = f" ({source.hint})" if source.hint else ""
        with hub_errors(source.hub, instead="pass a local folder or .gguf file", hint=hint):
            yield
        return
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise KlbError(f"cannot load {source.folder or source.gguf}: {first_line(error)}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the loaders' own bars and advice; ours say what a user needs."""
    bars, level = transformers.utils.logging.is_progress_bar_enabled(), transformers.utils.logging.get_verbosity()
    hub_logger = logging.getLogger("huggingface_hub")
    hub_level = hub_logger.level
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    hub_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
        transformers.utils.logging.set_verbosity(level)
        hub_logger.setLevel(hub_level)
