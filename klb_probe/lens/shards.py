"""A fit split over machines: every n-th prompt each, put together again afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor

from klb_probe.errors import KlbError
from klb_probe.files import write_safetensors
from klb_probe.lens.metadata import CorpusRecord, LensMetadata
from klb_probe.lens.store import FORMAT, read_metadata
from klb_probe.lens.sums import split_half_agreement
from klb_probe.sharding import Shard, check_all_there

if TYPE_CHECKING:
    from klb_probe.lens.jacobian import JacobianLens

# What may differ between the shards of one fit; everything else must not.
_OF_ONE_SHARD = ("corpus", "command", "norms", "shard", "split_half", "stopped_early", "until", "versions")


@dataclass(frozen=True)
class _Part:
    """One shard's lens.

    Attributes:
        path: Its file.
        metadata: What it says about itself.
        shard: Which of how many.
        corpus: Its share of the text.
        names: Its tensors: ``rows`` and ``sketch``, or ``J``.
        read: The float32 tensor ``[row, d_model]`` of a name and an index into its source layers.
    """

    path: Path
    metadata: LensMetadata
    shard: Shard
    corpus: CorpusRecord
    names: tuple[str, ...]
    read: Callable[[str, int], Tensor]


def save_full_shard(lens: JacobianLens, path: Path) -> None:
    """Write a full lens in the public format but in float32: shards rounded to float16 would not merge to the single fit."""
    from klb_probe.lens.jacobian_files import write_jacobian_file

    matrices = {layer: lens.matrix(layer, "cpu") for layer in lens.source_layers}
    write_jacobian_file(path, matrices, lens.n_prompts, {"target_layer": lens.target_layer}, lens.metadata)


def merge_files(paths: Sequence[Path], out: Path, *, command: str = "") -> LensMetadata:
    """Merge the shards of one fit, each weighing as much as it has prompts; both kinds of lens.

    Raises:
        KlbError: When the files are not shards of one fit, one is given twice, or one is missing.
    """
    parts = sorted((_open(path) for path in paths), key=lambda part: part.shard.index)
    _check_together(parts)
    metadata = _merged_metadata(parts, command)
    layers = range(len(metadata.source_layers))
    merged = {name: torch.stack([_mean(parts, name, i) for i in layers]) for name in parts[0].names}
    if "J" not in merged:
        write_safetensors(out, merged, {"format": FORMAT, "metadata": metadata.model_dump_json()})
        return metadata
    from klb_probe.lens.jacobian import JacobianLens

    jacobians = dict(zip(metadata.source_layers, merged["J"], strict=True))
    n_prompts = sum(part.corpus.n_prompts for part in parts)
    JacobianLens(jacobians, n_prompts=n_prompts, metadata=metadata).save(out)
    return metadata


def _open(path: Path) -> _Part:
    metadata: LensMetadata | None
    names: tuple[str, ...]
    if path.suffix == ".pt":
        from klb_probe.lens.jacobian import JacobianLens

        lens = JacobianLens.open(path)
        metadata, names = lens.metadata, ("J",)

        def read(name: str, i: int) -> Tensor:
            return lens.matrix(lens.source_layers[i], "cpu")
    else:
        metadata = read_metadata(path)
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in ("rows", "sketch")}
        names = tuple(tensors)

        def read(name: str, i: int) -> Tensor:
            return tensors[name][i]

    if metadata is None or metadata.shard is None or metadata.corpus is None:
        raise KlbError(f"{path} is not a shard of a fit; make shards with `klb-probe fit --shard i/n`")
    return _Part(path, metadata, Shard.parse(metadata.shard), metadata.corpus, names, read)


def _check_together(parts: Sequence[_Part]) -> None:
    first = parts[0]
    for part in parts[1:]:
        if differences := _differences(first, part):
            raise KlbError(f"{part.path} is not of the same fit as {first.path}: {'; '.join(differences)}")
    check_all_there([(part.path, part.shard) for part in parts], "klb-probe fit")


def _differences(one: _Part, other: _Part) -> list[str]:
    """Settings in which two shards differ, in words."""
    a, b = (
        part.metadata.model_dump(exclude=set(_OF_ONE_SHARD))
        | {"shards": part.shard.count, "corpus": part.corpus.sha256, "normalised": part.metadata.normalised}
        for part in (one, other)
    )
    if a["fingerprint"] and a["fingerprint"] == b["fingerprint"]:  # the same weights under another name or in another place
        a["model"] = b["model"]
    return [f"{name} {str(b[name])[:60]}, not {str(a[name])[:60]}" for name in a if a[name] != b[name]]


def _weights(parts: Sequence[_Part]) -> list[float]:
    total = sum(part.corpus.n_prompts for part in parts)
    return [part.corpus.n_prompts / total for part in parts]


def _mean(parts: Sequence[_Part], name: str, i: int) -> Tensor:
    """n-weighted mean ``[row, d_model]`` of one layer; of normalised shards, of directions, the mean norm put back."""
    norms = _mean_norms(parts)
    total = torch.zeros(())
    for part, weight in zip(parts, _weights(parts), strict=True):
        own = part.metadata.norms
        scale = 1.0 if norms is None or own is None else norms[i] / own[i]
        total = total + part.read(name, i) * (weight * scale)
    return total


def _mean_norms(parts: Sequence[_Part]) -> tuple[float, ...] | None:
    """Mean Jacobian norm of each layer over all prompts, or None for shards that were not normalised."""
    if not parts[0].metadata.normalised:
        return None
    by_layer = zip(*(part.metadata.norms for part in parts), strict=True)
    return tuple(sum(w * norm for w, norm in zip(_weights(parts), norms, strict=True)) for norms in by_layer)


def _merged_metadata(parts: Sequence[_Part], command: str) -> LensMetadata:
    first, corpora = parts[0].metadata, [part.corpus for part in parts]
    counts = {
        "n_prompts": sum(corpus.n_prompts for corpus in corpora),
        "n_skipped": sum(corpus.n_skipped for corpus in corpora),
    }
    return first.model_copy(
        update={
            "corpus": corpora[0].model_copy(update=counts),
            "command": command or first.command,
            "norms": _mean_norms(parts),
            "shard": None,
            "split_half": _agreement(parts),
            "stopped_early": any(part.metadata.stopped_early for part in parts),
        }
    )


def _agreement(parts: Sequence[_Part]) -> float | None:
    """Agreement of every other shard's estimate with the rest's; a single shard's own."""
    if len(parts) == 1:
        return parts[0].metadata.split_half
    name = parts[0].names[0]

    def estimate(some: Sequence[_Part], i: int) -> Tensor:
        mean = _mean(some, name, i)
        return mean if name == "J" else mean[0::2].mean(0) - mean[1::2].mean(0)  # yes and no alternate

    layers = range(len(parts[0].metadata.source_layers))
    return split_half_agreement(*([estimate(parts[start::2], i) for i in layers] for start in (0, 1)))
