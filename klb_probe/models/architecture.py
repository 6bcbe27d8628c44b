"""Which architectures can be read at all, and which class of transformers loads them: both by the config alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from klb_probe.errors import KlbError

_UNREADABLE: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda config: config.is_encoder_decoder, "it is an encoder-decoder, whose blocks also read an encoder's states"),
    (
        lambda config: getattr(config, "altup_num_inputs", 1) > 1 or getattr(config, "hc_mult", 1) > 1,
        "its blocks carry several residual streams, and a lens reads one",
    ),
    (
        lambda config: getattr(config, "use_bidirectional_attention", None) in (True, "all"),
        "its attention also looks ahead, so that a position is not decided by what comes before it",
    ),
)


def refuse_unreadable(config: Any, name: str) -> None:
    """Refuse a model that has no one causal residual stream, whatever a hook map says.

    Raises KlbError that names the model and what stands in the way.
    """
    both = (config, config.get_text_config())
    if reasons := [reason for refused, reason in _UNREADABLE if any(map(refused, both))]:
        raise KlbError(f"{name} (model_type {config.model_type}) cannot be read: {reasons[0]}")


def auto_class(config: Any) -> Any:
    """The class that loads a model of this config with its head: for text alone if there is one; None for neither.

    A multimodal wrapper without such a class is loaded whole, and its text model is read inside it.
    """
    classes = (AutoModelForCausalLM, AutoModelForImageTextToText)
    return next((auto for auto in classes if type(config) in auto._model_mapping), None)
