"""Loading a model by name, or wrapping one that is already loaded."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from klb_probe.errors import KlbError
from klb_probe.models.architecture import auto_class, refuse_unreadable
from klb_probe.models.backends import backend_class, backend_of, inner_model
from klb_probe.models.chat import ChatFormat, probe_chat_format
from klb_probe.models.gguf_cache import dequantised_folder
from klb_probe.models.hook_map import find_hook_map
from klb_probe.models.hub import first_line, hub_errors
from klb_probe.models.huggingface import CHUNK, HuggingFaceModel
from klb_probe.models.memory import warn_if_too_large
from klb_probe.models.placement import load_spread
from klb_probe.models.quantised import quantisation_config
from klb_probe.models.registry import DEFAULT_MODEL, ModelSource, registry, resolve
from klb_probe.organisms.adapters import merge, read_adapter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Layers go where there is room: all GPUs in turn, then the host's memory, then disk.
SPREAD = "auto-map"
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def load_model(
    name: Any = DEFAULT_MODEL,
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantise: str | None = None,
    revision: str | None = None,
    hooks: Iterable[Path] = (),
    backend: str | None = None,
    remote: bool = False,
    chunk: int = CHUNK,
) -> HuggingFaceModel:
    """Load a model by alias, hub id, local folder or ``.gguf`` file; an adapter is merged into its base.

    Args:
        name: What to load; or a model that is already loaded, for :func:`from_model`.
        device: ``auto`` (cuda, else mps, else cpu), a torch device, or ``auto-map``: accelerate's ``device_map="auto"``, all
            GPUs and, for what they cannot hold, the host's memory and disk.
        dtype: ``auto`` (the registry's; else float32 on a CPU and the checkpoint's on an accelerator) or a name in DTYPES.
        quantise: ``4bit`` or ``8bit`` weights, made by bitsandbytes while loading; the model's ``identity`` then says so.
        revision: Hub revision (branch, tag or commit) to pin.
        hooks: Folders with further hook maps.
        backend: What reads residuals: ``huggingface`` (the default), ``transformer_lens`` or ``nnsight``.
        remote: Read residuals and margins of a hub model that NDIF serves, through nnsight; its weights stay there.
        chunk: Most tokens of a prompt in one forward pass; longer ones are read piece by piece (by a server: whole).

    Raises:
        KlbError: With what is wrong and what to do, for everything a user can get wrong here.

    Examples:
        >>> model = klb.load_model("smollm2-135m", device="cpu")
        >>> model.n_layers, model.d_model
        (30, 576)
    """
    if isinstance(name, os.PathLike):
        name = os.fspath(name)
    if not isinstance(name, str):
        if (device, dtype, quantise, revision, remote) != ("auto", "auto", None, None, False):
            raise KlbError("a loaded model keeps its device, dtype, weights and revision, and is read here")
        return from_model(name, hooks=hooks, backend=backend, chunk=chunk)
    if remote:
        if quantise:
            raise KlbError("--remote reads weights as the server has them; leave out --quantise")
        return _served(name, device=device, dtype=dtype, revision=revision, hooks=hooks, backend=backend)
    backend_class(backend or "huggingface")  # a missing library shows before the weights are read
    source = resolve(name)
    place = _device(device)
    if dtype not in ("auto", *DTYPES):
        raise KlbError(f"unknown dtype {dtype!r}; one of auto, {', '.join(DTYPES)}")
    adapter = read_adapter(source.adapter) if source.adapter else None
    if adapter and adapter.organism.base_gguf_sha256 and not source.gguf:
        raise KlbError(f"{name} belongs to the GGUF weights of {source.base}, which are not here; {source.hint or 'get them'}")
    if adapter and (quantise or device == SPREAD):
        raise KlbError(f"{name} is an adapter, which is merged into whole weights: leave out --quantise and --device {SPREAD}")
    wanted = _dtype(dtype, source, place)
    sha256 = None
    folder = source.folder
    if source.gguf:
        with _quiet():
            folder, sha256 = dequantised_folder(source.gguf, source.sha256)
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
        placement: dict[str, Any] = {} if place.type == "cpu" else {"device_map": {"": place}}
        if quantise:  # without a map, transformers would quantise on a GPU that was not asked for
            placement = {"device_map": {"": place}, "quantization_config": quantisation_config(quantise, config, wanted, place)}
        if device != SPREAD:
            warn_if_too_large(name, config, wanted, place, quantise)
        load = partial(
            auto_class(config).from_pretrained,
            where,
            config=config,
            # A merged weight is rounded once: the sum, not the base before it.
            dtype="auto" if adapter else wanted,
            output_loading_info=True,
            **placement,
            **pinned,
        )
        model, loading = load_spread(load) if device == SPREAD else load()
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
    return from_model(model, tokenizer, name=source.name, identity=identity, hooks=hooks, backend=backend, chunk=chunk)


def _served(
    name: str, *, device: str, dtype: str, revision: str | None, hooks: Iterable[Path], backend: str | None
) -> HuggingFaceModel:
    if backend == "transformer_lens" or (device, dtype) != ("auto", "auto"):
        raise KlbError("--remote goes through nnsight, and the server decides on device and dtype")
    hub = registry()[name].hub if name in registry() else resolve(name).hub
    if hub is None:
        raise KlbError(f"--remote reads a model of the hub, by alias or owner/name; {name} is not one")
    backend_class("nnsight")
    from klb_probe.models.ndif import open_served

    return open_served(hub, name=name, revision=revision, hooks=hooks)


def load_chat(name: str = DEFAULT_MODEL, revision: str | None = None) -> ChatFormat:
    """A model's chat format alone: its tokenizer, not its weights. Raises KlbError as :func:`load_model` does."""
    return probe_chat_format(_read_alone(AutoTokenizer, name, revision))


def load_config(name: str = DEFAULT_MODEL, revision: str | None = None) -> Any:
    """A model's config alone, for what can be said without its weights. Raises KlbError as :func:`load_model` does."""
    config = _read_alone(AutoConfig, name, revision)
    _check_causal(config, name)
    return config


def planned(name: str, device: str = "auto", dtype: str = "auto") -> tuple[torch.device, torch.dtype | str]:
    """Where :func:`load_model` would put a model's weights, and in what type (``auto``: the checkpoint's)."""
    if dtype not in ("auto", *DTYPES):
        raise KlbError(f"unknown dtype {dtype!r}; one of auto, {', '.join(DTYPES)}")
    place = _device(device)
    return place, _dtype(dtype, resolve(name), place)


def _read_alone(auto: Any, name: str, revision: str | None) -> Any:
    source = resolve(name)
    with _quiet():
        folder = dequantised_folder(source.gguf, source.sha256)[0] if source.gguf else source.folder
    with _quiet(), _explained(source):
        return auto.from_pretrained(str(folder or source.hub), trust_remote_code=False, revision=revision or "main")


def from_model(
    model: Any,
    tokenizer: Any = None,
    *,
    name: str | None = None,
    identity: dict[str, str | None] | None = None,
    hooks: Iterable[Path] = (),
    backend: str | None = None,
    chunk: int = CHUNK,
) -> HuggingFaceModel:
    """Wrap a causal language model that is already in memory, as it is.

    Args:
        model: A ``transformers`` model, a TransformerLens ``TransformerBridge`` or an nnsight ``LanguageModel``.
        tokenizer: Its tokenizer; by default the one that ``model`` has. TransformerLens gives a bridge one that puts BOS before
            plain text; pass the model's own to read such text as the other backends do (chats are the same with both).
        name: What to call it.
        identity: Where it came from.
        hooks: Folders with further hook maps.
        backend: As in :func:`load_model`, for a ``transformers`` model; the others are read by their own library.
        chunk: As in :func:`load_model`.

    Raises:
        KlbError: For anything else, or without a tokenizer.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
        >>> random = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=49152, max_position_embeddings=8192)).eval()
        >>> small = klb.from_model(random, model.tokenizer, name="small")
        >>> small.n_layers, small.d_model
        (4, 16)
    """
    inner, kind = inner_model(model), backend_of(model)
    if kind != "huggingface" and backend not in (None, kind):
        raise KlbError(f"a {type(model).__name__} is read by backend {kind}, not {backend}")
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    if tokenizer is None:
        raise KlbError(f"pass the tokenizer of this {type(model).__name__} too: from_model(model, tokenizer)")
    name = name or inner.config.name_or_path or type(inner).__name__
    read_by, hook_map = backend_class(backend or kind), find_hook_map(inner, hooks)
    wrapped = read_by(model, tokenizer, hook_map, name=name, identity=identity or {"name": name})
    wrapped.chunk = chunk
    return wrapped


def _device(device: str) -> torch.device:
    if device in ("auto", SPREAD):
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cuda", "mps", "cpu"):
        raise KlbError(f"unknown device {device!r}; one of auto, {SPREAD}, cuda, cuda:N, mps, cpu")
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
    if config.is_encoder_decoder or not causal or auto_class(config) is None:
        raise KlbError(f"{name} is not a causal language model (architecture {', '.join(architectures)})")
    refuse_unreadable(config, name)


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
