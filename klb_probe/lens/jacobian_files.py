"""Files of full Jacobian lenses: the public format, its variants, and what only looks like one.

Public format (reference code, anthropics/jacobian-lens): ``torch.save`` of ``{"J": {layer: [d_model, d_model] float16},
"n_prompts", "source_layers", "d_model"}``; key l is the OUTPUT of block l. Variants that are read: ``d_source`` (equal to
``d_model``), ``metadata`` (TransformerLens and ours), ``provenance`` (neuronpedia), and the checkpoint of an unfinished fit
(sums over ``n_done`` prompts). Everything else is refused by name. Nothing in a file is ever executed.
"""

from __future__ import annotations

import logging
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from klb_probe.errors import KlbError
from klb_probe.files import replacing
from klb_probe.lens.metadata import LensMetadata
from klb_probe.models.hub import first_line

log = logging.getLogger(__name__)

SUFFIXES = (".pt", ".pth")
FORMAT = "klb_probe.jacobian_lens/1"

_FINISHED = {"J", "n_prompts", "source_layers", "d_model"}
_UNFINISHED = {"jacobian_sum", "n_done"}
_ALSO_UNFINISHED = {"next_idx", "source_layers", "target_layer", "skip_first"}
_FACTS = {"metadata", "provenance", "model_name", "model_revision", "corpus"}
# FIELD.md B.3: a randomised low-rank estimate over other positions, published under the name of a Jacobian lens.
_LOW_RANK = {"avg_jacobians", "corpus_jh", "n_proj"}
_OUR_KEY = "klb_probe"
# What the facts that are used must be.
_KINDS = {"model_name": str, "model_revision": str, "fit_dtype": str, "skip_first": int, "skip_first_positions": int}


@dataclass(frozen=True)
class JacobianFile:
    """What a lens file says; unknown is None.

    Attributes:
        matrices: ``{layer: [d_model, d_model]}`` as stored, memory-mapped: read when used.
        n_prompts: Prompts behind them.
        sums: True for a checkpoint: the matrices are sums over the prompts, not means.
        d_model: The width the file claims.
        target_layer: Block whose output they map to.
        facts: What else it says about itself, plain values only.
        metadata: Ours, where we wrote it.
    """

    matrices: dict[int, Tensor]
    n_prompts: int
    sums: bool
    d_model: int | None
    target_layer: int | None
    facts: dict[str, Any]
    metadata: LensMetadata | None


def lens_file(path: Path) -> Path:
    """The lens file a path names: itself, or the only one in a folder."""
    if not path.is_dir():
        if not path.exists():
            raise KlbError(f"no such lens file: {path}")
        return path
    found = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise KlbError(f"lens folder {path}: expected one {' or '.join(SUFFIXES)} file, found {names}; name the file")
    return found[0]


def read_jacobian_file(path: Path) -> JacobianFile:
    """Read a lens file, tensors left on disk; KlbError (without the path) for what is not one of the known formats."""
    payload = _payload(path)
    if not isinstance(payload, dict):
        raise KlbError(f"holds a {type(payload).__name__}, not the dictionary of a Jacobian lens")
    keys = set(payload)
    if low_rank := sorted(map(str, keys & _LOW_RANK)):
        raise KlbError(
            f"keys {', '.join(low_rank)} belong to a randomised low-rank estimate, another method than the Jacobian lens"
        )
    finished = _FINISHED <= keys <= _FINISHED | _FACTS | {"d_source"}
    if not finished and not _UNFINISHED <= keys <= _UNFINISHED | _ALSO_UNFINISHED | _FACTS:
        listed = ", ".join(sorted(map(str, keys))[:12]) or "none"
        raise KlbError(f"is in no known Jacobian-lens format; its keys are: {listed}")
    matrices = _matrices(payload["J" if finished else "jacobian_sum"])
    if "source_layers" in keys:
        _check_layers(payload["source_layers"], matrices)
    if "d_source" in keys and _count(payload, "d_source") != _count(payload, "d_model"):
        raise KlbError(f"is rectangular (d_source {payload['d_source']}, d_model {payload['d_model']}), which is not supported")
    facts = _facts(payload)
    metadata = _ours(facts.pop(_OUR_KEY, None))
    _check_method(facts)
    target = facts.get("target_layer")
    return JacobianFile(
        matrices,
        _count(payload, "n_prompts" if finished else "n_done"),
        sums=not finished,
        d_model=_count(payload, "d_model") if finished else None,
        target_layer=None if target is None else _count(facts, "target_layer"),
        facts=facts,
        metadata=metadata,
    )


def write_jacobian_file(
    path: Path, matrices: Mapping[int, Tensor], n_prompts: int, facts: Mapping[str, Any], metadata: LensMetadata | None
) -> None:
    """Write float16 matrices in the public format, with what is known about them under ``metadata``, in one rename."""
    known = dict(facts)
    if metadata is not None:
        known[_OUR_KEY] = {"format": FORMAT, **metadata.model_dump(mode="json")}
    payload = {
        "J": dict(matrices),
        "n_prompts": n_prompts,
        "source_layers": list(matrices),
        "d_model": next(iter(matrices.values())).shape[0],
        **({"metadata": known} if known else {}),
    }
    with replacing(path) as partial:
        torch.save(payload, partial)


def _payload(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise KlbError("is a compressed archive, not a torch.save file")
            # torch checks no checksums: a flipped bit in a matrix would be read as it is.
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, NotImplementedError, ValueError) as error:
        raise KlbError(f"is not a whole torch.save archive ({first_line(error)}); nothing in it was run") from None
    if damaged:
        raise KlbError(f"is damaged: the checksum of {damaged} does not match")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise KlbError("holds more than tensors and plain values (pickled code?); nothing in it was run") from None
    except Exception as error:  # a broken pickle makes the unpickler raise whatever its bytes lead to
        raise KlbError(f"cannot be read ({first_line(error)})") from None


def _matrices(stored: Any) -> dict[int, Tensor]:
    if not isinstance(stored, dict) or not stored:
        raise KlbError("holds no matrices")
    if wrong := [key for key in stored if type(key) is not int or key < 0]:
        raise KlbError(f"has layer key {wrong[0]!r}; layers are whole numbers from 0")
    if wrong := [key for key, matrix in stored.items() if not isinstance(matrix, Tensor)]:
        raise KlbError(f"layer {wrong[0]} is no tensor")
    return dict(sorted(stored.items()))


def _check_layers(listed: Any, matrices: Mapping[int, Tensor]) -> None:
    if not isinstance(listed, (list, tuple)) or any(type(layer) is not int for layer in listed):
        raise KlbError("source_layers is not a list of layer numbers")
    if sorted(listed) != list(matrices):
        raise KlbError(f"lists source layers {_ranges(listed)}, has matrices for {_ranges(matrices)}")


def _ranges(layers: Any) -> str:
    ordered = sorted(layers)
    return f"{ordered[0]}-{ordered[-1]} ({len(ordered)} of them)" if ordered else "none"


def _count(values: Mapping[str, Any], key: str) -> int:
    value = values[key]
    if type(value) is not int or value < 1:
        raise KlbError(f"has {key} {value!r}, not a positive whole number")
    return value


def _facts(payload: Mapping[str, Any]) -> dict[str, Any]:
    metadata = payload.get("metadata") or {}
    if not isinstance(metadata, dict) or any(not isinstance(key, str) for key in metadata):
        raise KlbError("its metadata is not a dictionary of named values")
    # Flat keys of checkpoints and of neuronpedia's uploads say the same things; metadata has the last word.
    flat = {"provenance", "model_name", "model_revision", "corpus", "target_layer", "skip_first"}
    facts = {**{key: payload[key] for key in flat & set(payload)}, **metadata}
    dropped = sorted(key for key, value in facts.items() if not _is_plain(value))
    if dropped:
        log.info("left out of the lens's metadata, not plain values: %s", ", ".join(dropped))
    facts = {key: value for key, value in facts.items() if key not in dropped}
    for key, kind in _KINDS.items():
        if facts.get(key) is not None and type(facts[key]) is not kind:
            raise KlbError(f"says {key} {facts[key]!r}, which is no {kind.__name__}")
    return facts


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _ours(stored: Any) -> LensMetadata | None:
    if stored is None:
        return None
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise KlbError(f"its {_OUR_KEY} metadata is not in format {FORMAT}; update klb_probe")
    try:
        return LensMetadata.model_validate({key: value for key, value in stored.items() if key != "format"})
    except ValidationError as error:
        raise KlbError(f"its {_OUR_KEY} metadata cannot be read ({first_line(error)})") from None


def _check_method(facts: Mapping[str, Any]) -> None:
    """Refuse a file that says it was fitted by another method or on other activations than block outputs."""
    provenance = facts.get("provenance")
    provenance = provenance if isinstance(provenance, dict) else {}
    said = {
        "estimator": (facts.get("estimator"), ("jacobian_lens",)),
        "hook_convention": (facts.get("hook_convention"), ("blocks.{layer}.hook_out",)),
        "site": (facts.get("site"), ("block_output",)),
        "capture_point": (provenance.get("capture_point"), ("block_output",)),
        "stream_reduce": (provenance.get("stream_reduce"), ("none",)),
    }
    for key, (value, right) in said.items():
        if value is not None and value not in right:
            raise KlbError(f"says {key} {value!r}; only {' or '.join(map(repr, right))}, a lens of block outputs, is read here")
