"""Whether full lenses can be merged, and how much each weighs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from klb_probe.lens.metadata import CorpusRecord, LensMetadata

if TYPE_CHECKING:
    from klb_probe.lens.jacobian import JacobianLens

# What may differ between fits of one lens on different prompts.
_OF_ONE_FIT = {"corpus", "command", "versions", "shard", "norms", "split_half", "until", "stopped_early"}
_FACTS_OF_ONE_FIT = {"n_prompts", "corpus", "unfinished"}


def differences(one: JacobianLens, other: JacobianLens) -> Iterator[tuple[str, Any, Any]]:
    """``(what, of the one, of the other)`` for everything that keeps two lenses from being merged."""
    for what in ("d_model", "source_layers", "target_layer"):
        if getattr(one, what) != getattr(other, what):
            yield what, getattr(one, what), getattr(other, what)
    left, right = _settings(one), _settings(other)
    for key in sorted(left.keys() | right.keys()):
        if left.get(key) != right.get(key):
            yield key, left.get(key), right.get(key)


def _settings(lens: JacobianLens) -> dict[str, Any]:
    settings = {key: value for key, value in lens.facts.items() if key not in _FACTS_OF_ONE_FIT}
    if lens.metadata is not None:
        settings |= lens.metadata.model_dump(exclude=_OF_ONE_FIT) | {"normalised": lens.metadata.normalised}
        if lens.metadata.fingerprint:  # weights say whose it is, whatever name and place they had
            settings.pop("model")
    return settings


def merged_norms(lenses: Sequence[JacobianLens]) -> tuple[float, ...] | None:
    """Mean Jacobian norm ``[layer]`` over all prompts, for lenses whose prompts were each divided by their own norm."""
    norms = [lens.metadata.norms for lens in lenses if lens.metadata and lens.metadata.norms]
    if not norms:
        return None
    total = sum(lens.n_prompts for lens in lenses)
    return tuple(
        sum(lens.n_prompts * norm for lens, norm in zip(lenses, layer, strict=True)) / total
        for layer in zip(*norms, strict=True)
    )


def merged_metadata(lenses: Sequence[JacobianLens]) -> LensMetadata | None:
    """The first lens's metadata with the texts of all."""
    first = lenses[0].metadata
    if first is None:
        return None
    corpora = [lens.metadata.corpus for lens in lenses if lens.metadata and lens.metadata.corpus]
    whole = {"shard": None, "split_half": None, "norms": merged_norms(lenses)}
    return first.model_copy(update={**whole, "corpus": _joined(corpora) if len(corpora) == len(lenses) else None})


def _joined(corpora: Sequence[CorpusRecord]) -> CorpusRecord:
    return CorpusRecord(
        source="; ".join(dict.fromkeys(corpus.source for corpus in corpora)),
        sha256=hashlib.sha256("".join(corpus.sha256 for corpus in corpora).encode()).hexdigest(),
        n_prompts=sum(corpus.n_prompts for corpus in corpora),
        n_skipped=sum(corpus.n_skipped for corpus in corpora),
        max_tokens=max(corpus.max_tokens for corpus in corpora),
    )
