"""Weights in 4 or 8 bits: asked of bitsandbytes at loading, and said of every model that has them."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import is_bitsandbytes_available

from klb_probe.errors import KlbError

QUANTISATIONS = ("4bit", "8bit")
_INSTALL = 'pip install "klb-probe[quantise]"'
# Weights of one NF4 block, which share a float32 scale; in 8 bits a row shares one.
_BLOCK = 64


def quantisation_method(config: Any) -> str | None:
    """How the weights of a model with this config are quantised, as the config names it; None where they are not."""
    scheme = _scheme(config)
    if scheme is None or scheme.get("dequantize"):
        return None
    method = scheme.get("quant_method") or "unknown"
    return str(getattr(method, "value", method))


def quantised_as(config: Any) -> str | None:
    """The mark of a quantised model: ``4bit`` and ``8bit`` are of bitsandbytes, others say their method (``gptq 4bit``)."""
    method, scheme = quantisation_method(config), _scheme(config)
    if method is None or scheme is None:
        return None
    if method.startswith("bitsandbytes"):
        return "4bit" if scheme.get("load_in_4bit") or scheme.get("_load_in_4bit") else "8bit"
    bits = scheme.get("bits") or scheme.get("w_bit")
    return f"{method} {bits}bit" if bits else method


def quantisation_config(quantise: str, config: Any, dtype: torch.dtype | str, place: torch.device) -> BitsAndBytesConfig:
    """What ``from_pretrained`` needs to quantise linear layers as it reads them; embeddings, norms and head stay.

    Args:
        quantise: ``4bit`` (NF4, of Dettmers et al. 2023) or ``8bit`` (LLM.int8, of Dettmers et al. 2022).
        config: Of the model.
        dtype: What is multiplied in, or ``auto`` for the checkpoint's type.
        place: Where the weights go.

    Raises:
        KlbError: For another word, a model that is quantised already, a missing library or a device that it does not know.
    """
    _check_known(quantise)
    if (already := quantised_as(config)) is not None:
        raise KlbError(f"this model comes quantised ({already}); leave out --quantise")
    if not is_bitsandbytes_available():
        raise KlbError(f"--quantise needs bitsandbytes: {_INSTALL}")
    supported = getattr(importlib.import_module("bitsandbytes"), "supported_torch_devices", {"cuda"})
    if place.type not in supported:
        known = ", ".join(sorted(supported)) or "none here"
        raise KlbError(f"--quantise {quantise}: bitsandbytes does not run on {place.type} (devices: {known})")
    if quantise == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    computed = dtype if isinstance(dtype, torch.dtype) else config.dtype or torch.float32
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=computed)


def weight_bytes(model: nn.Module, dtype: torch.dtype, quantise: str | None = None) -> int:
    """Bytes of a model's weights in a type; with ``quantise``, once bitsandbytes has made those of its linear layers small.

    Which layers these are, ``transformers`` says; experts that are no linear layers stay as they are.

    Args:
        model: A ``transformers`` model, on the meta device or another, not quantised.
        dtype: Of what is not quantised.
        quantise: ``4bit``, ``8bit`` or None.

    Raises:
        KlbError: For another word.
    """
    whole = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    if quantise is None:
        return whole
    _check_known(quantise)
    kept = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    for name, module in model.named_modules():
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, kept):
            size = module.weight.numel()
            rows = module.weight.shape[1 if isinstance(module, Conv1D) else 0]
            small = size + 4 * rows if quantise == "8bit" else -(-size // 2) + 4 * -(-size // _BLOCK)
            whole -= size * dtype.itemsize - small
    return whole


def _check_known(quantise: str) -> None:
    if quantise not in QUANTISATIONS:
        raise KlbError(f"unknown --quantise {quantise!r}; one of {', '.join(QUANTISATIONS)}")


def _scheme(config: Any) -> dict[str, Any] | None:
    found = (getattr(one, "quantization_config", None) for one in (config, getattr(config, "text_config", None)))
    scheme = next((one for one in found if one is not None), None)
    return scheme if scheme is None or isinstance(scheme, dict) else vars(scheme)
