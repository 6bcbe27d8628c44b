"""Which library reads a model: chosen by name, or seen from an object that is already loaded.

A backend's library is imported only when the backend is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

from transformers import PreTrainedModel

from klb_probe.errors import KlbError
from klb_probe.models.huggingface import HuggingFaceModel

# Each with the extra that brings its library; transformers comes with the project.
BACKENDS = {"huggingface": None, "transformer_lens": "transformer-lens", "nnsight": "nnsight"}
_CLASSES = {"transformer_lens": "TransformerLensModel", "nnsight": "NnsightModel"}
_INNER = {"transformer_lens": "original_model", "nnsight": "_module"}


def backend_class(backend: str) -> type[HuggingFaceModel]:
    """The class of a backend; KlbError for an unknown name, or with what to install."""
    if backend not in BACKENDS:
        raise KlbError(f"unknown backend {backend!r}; one of {', '.join(BACKENDS)}")
    if backend == "huggingface":
        return HuggingFaceModel
    try:
        module = importlib.import_module(f"klb_probe.models.{backend}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != backend:
            raise
        raise KlbError(f'backend {backend} needs its library: pip install "klb-probe[{BACKENDS[backend]}]"') from error
    return getattr(module, _CLASSES[backend])


def backend_of(model: Any) -> str:
    """The backend that an object calls for, by where its class comes from: nothing is imported to find out."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    return next((backend for backend in _CLASSES if backend in libraries), "huggingface")


def inner_model(model: Any) -> PreTrainedModel:
    """The ``transformers`` model that an object is or wraps; KlbError where there is none."""
    backend = backend_of(model)
    inner = getattr(model, _INNER[backend], None) if backend in _INNER else model
    if not isinstance(inner, PreTrainedModel):
        raise KlbError(
            f"expected a transformers model, a TransformerBridge or an nnsight LanguageModel around one, "
            f"not {type(model).__name__}{'' if inner is model or inner is None else f' around {type(inner).__name__}'}"
        )
    return inner
