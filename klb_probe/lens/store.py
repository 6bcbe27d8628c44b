"""Fitted lenses on disk: one safetensors file, its metadata in the header; and where to look for one."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from klb_probe.errors import KlbError
from klb_probe.files import write_safetensors
from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.corpus import SHUFFLED
from klb_probe.lens.margin import MarginLens
from klb_probe.lens.metadata import LensMetadata
from klb_probe.models.residual_model import ResidualModel
from klb_probe.paths import cache_dir, data_dir

log = logging.getLogger(__name__)

FORMAT = "klb_probe.margin_lens/1"
SUFFIX = ".margin.safetensors"


def save_lens(lens: MarginLens, path: Path) -> None:
    """Write a lens in one rename."""
    header = {"format": FORMAT, "metadata": lens.metadata.model_dump_json()}
    write_safetensors(path, {"rows": lens.rows.cpu(), "sketch": lens.sketch.cpu()}, header)


def read_metadata(path: Path) -> LensMetadata:
    """The metadata of a lens file; KlbError when it is not one of ours."""
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
    except FileNotFoundError:
        raise KlbError(f"no such lens file: {path}") from None
    except (SafetensorError, OSError) as error:
        raise KlbError(f"{path} is not a readable safetensors file ({error})") from None
    if header.get("format") != FORMAT:
        raise KlbError(f"{path} is not a margin lens (format {header.get('format', 'unknown')}, expected {FORMAT})")
    try:
        return LensMetadata.model_validate(json.loads(header["metadata"]))
    except (ValidationError, json.JSONDecodeError, KeyError) as error:
        raise KlbError(f"{path}: lens metadata cannot be read ({str(error).splitlines()[0]})") from None


def open_lens(path: Path, model: ResidualModel, contrast: TokenContrast) -> MarginLens:
    """Read a lens for a model and contrast; refuse, by name, one that belongs to others."""
    metadata = read_metadata(path)
    if problem := mismatch(metadata, model, contrast):
        raise KlbError(f"lens {path}: {problem}")
    try:
        with safe_open(path, "pt") as file:
            rows, sketch = file.get_tensor("rows"), file.get_tensor("sketch")
    except SafetensorError as error:
        raise KlbError(f"lens {path}: {error}") from None
    n, tokens = len(metadata.source_layers), 2 * len(metadata.contrast)
    if rows.shape != (n, tokens, metadata.d_model) or sketch.shape != (n, metadata.k, metadata.d_model):
        raise KlbError(f"lens {path}: tensors of shape {tuple(rows.shape)}, {tuple(sketch.shape)} do not fit its metadata")
    if not (torch.isfinite(rows).all() and torch.isfinite(sketch).all()):
        raise KlbError(f"lens {path}: holds values that are not finite")
    fitted = [token for pair in metadata.contrast for _, token in pair]
    rows = rows[:, [fitted.index(token) for token in contrast.token_ids]]
    readout = model.token_readout(contrast.token_ids).to(model.device)
    return MarginLens(contrast, readout, rows.to(model.device), sketch.to(model.device), metadata, path)


def mismatch(metadata: LensMetadata, model: ResidualModel, contrast: TokenContrast) -> str | None:
    """Why a lens does not belong to a model and contrast, or None."""
    whose = metadata.model.get("name") or "an unnamed model"
    if metadata.d_model != model.d_model:
        return f"of width {metadata.d_model}, fitted on {whose}; {model.name} has width {model.d_model}"
    if metadata.n_layers != model.n_layers:
        return f"fitted on {whose} with {metadata.n_layers} layers; {model.name} has {model.n_layers}"
    if metadata.fingerprint not in (None, model.fingerprint):
        return f"fitted on {whose}, whose weights are not those of {model.name} loaded here; fit one with `klb-probe fit`"
    if not _token_pairs(contrast.pairs) <= _token_pairs(metadata.contrast):
        fitted = TokenContrast(metadata.contrast)
        return f"fitted for the contrast {fitted}, not {contrast}; fit one with `klb-probe fit --contrast ...`"
    return None


def _token_pairs(pairs: tuple[tuple[tuple[str, int], tuple[str, int]], ...]) -> set[tuple[int, int]]:
    """Pairs by id: a lens fitted for several contrasts serves each of them."""
    return {(yes[1], no[1]) for yes, no in pairs}


def find_lens(model: ResidualModel, contrast: TokenContrast) -> Path | None:
    """A shipped lens, else a cached one, that belongs to the model and contrast."""
    for path in _candidates():
        try:
            metadata = read_metadata(path)
        except KlbError as error:
            log.warning("passed over: %s", error)
            continue
        # A shard or a control is no lens to take unasked; without a fingerprint any model of the same shape would match.
        whole = metadata.shard is None and not (metadata.corpus and metadata.corpus.source.endswith(SHUFFLED))
        if whole and metadata.fingerprint and mismatch(metadata, model, contrast) is None:
            return path
    return None


def cached_lens_path(model: ResidualModel, contrast: TokenContrast) -> Path:
    """Where a lens fitted for a model and contrast is kept."""
    tokens = "-".join(map(str, contrast.token_ids))
    return cache_dir() / "lenses" / f"{model.fingerprint[:24]}-{tokens}{SUFFIX}"


def _candidates() -> Iterator[Path]:
    for folder in (data_dir("lenses"), cache_dir() / "lenses"):
        yield from sorted(folder.glob(f"*{SUFFIX}"))
