"""The full Jacobian lens: every layer's transport to the final basis, read with the model's own norm and head.

``lens_l(h) = unembed(J_l h)``, ``J_l = E[d h_final / d h_l]`` (Gurnee, Sofroniew, Lindsey et al. 2026; reference code
anthropics/jacobian-lens). Matrices stay as they are stored, float16 and memory-mapped; one layer at a time is moved to the
residual's device and made float32, so that a lens larger than the device's memory is no trouble.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from klb_probe.errors import KlbError
from klb_probe.lens.contrast import TokenContrast, gaussian_rows
from klb_probe.lens.jacobian_files import lens_file, read_jacobian_file, write_jacobian_file
from klb_probe.lens.jacobian_merge import differences, merged_metadata, merged_norms
from klb_probe.lens.margin import MarginLens
from klb_probe.lens.metadata import LensMetadata
from klb_probe.lens.published import HubFile, parse_lens_spec
from klb_probe.models.residual_model import ResidualModel
from klb_probe.versions import versions

log = logging.getLogger(__name__)

_ASSUMED = "target_layer_assumed"


@dataclasses.dataclass(frozen=True)
class TopTokens:
    """The tokens a lens reads most.

    Attributes:
        logits: ``[..., k]``, falling.
        ids: ``[..., k]``.
    """

    logits: Tensor
    ids: Tensor


class JacobianLens:
    """One matrix a source layer; layer l is the output of block l (0-based), at the target layer the lens is the identity.

    Attributes:
        d_model: Width.
        n_prompts: Prompts it was fitted on.
        target_layer: Block whose output the matrices map to; None when not recorded.
        metadata: What it was fitted on and how, where we fitted it.
        facts: What a file of others says about itself (plain values).
        file: The file it was read from, if any.
        origin: Where that came from, as a user would write it.

    Examples:
        >>> import torch
        >>> klb.JacobianLens({0: torch.eye(4), 1: torch.eye(4)}, n_prompts=10, target_layer=2)
        JacobianLens(2 layers 0-1, d_model 4, 10 prompts, target layer 2, from memory)
    """

    name = "jacobian"

    def __init__(
        self,
        jacobians: Mapping[int, Tensor],
        *,
        n_prompts: int,
        metadata: LensMetadata | None = None,
        target_layer: int | None = None,
        file: Path | None = None,
        sums: bool = False,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Wrap ``{layer: [d_model, d_model]}`` of any floating dtype; ``h @ J.T`` is the transported residual.

        With ``sums`` the matrices are sums over the ``n_prompts`` prompts instead of means.

        Raises:
            KlbError: Naming the layer, for matrices that cannot be a lens: not square or of different widths, not finite,
                zero everywhere, or at or above the target layer.
        """
        if metadata is not None and target_layer not in (None, metadata.target_layer):
            raise KlbError(f"target layer {target_layer}, but the metadata says {metadata.target_layer}")
        self.target_layer = target_layer if metadata is None else metadata.target_layer
        self.d_model = _checked_width(jacobians, self.target_layer)
        if n_prompts < 1:
            raise KlbError(f"a lens of {n_prompts} prompts")
        self.n_prompts, self.file, self.facts = n_prompts, file, dict(facts or {})
        self.origin = str(file) if file else "memory"
        self._matrices = {layer: matrix.detach() for layer, matrix in sorted(jacobians.items())}
        self._divisor = n_prompts if sums else 1
        self.metadata = metadata
        if metadata is not None and metadata.source_layers != self.source_layers:
            raise KlbError(f"matrices of layers {self.source_layers}, but the metadata says {metadata.source_layers}")
        if metadata is not None and metadata.d_model != self.d_model:
            raise KlbError(f"matrices of width {self.d_model}, but the metadata says {metadata.d_model}")

    @property
    def source_layers(self) -> tuple[int, ...]:
        """Layers it has a matrix for, rising."""
        return tuple(self._matrices)

    def __repr__(self) -> str:
        target = "unknown" if self.target_layer is None else self.target_layer
        return (
            f"JacobianLens({len(self._matrices)} layers {self.source_layers[0]}-{self.source_layers[-1]}, d_model "
            f"{self.d_model}, {self.n_prompts} prompts, target layer {target}, from {self.origin})"
        )

    # --- Files. ---

    @classmethod
    def open(cls, source: Path | HubFile | str) -> JacobianLens:
        """Read a lens from a file, a folder that holds one, or ``hub:OWNER/REPO::FILE[@REVISION]``.

        Raises:
            KlbError: In one line that names the source, for whatever is no lens; nothing in a file is executed.
        """
        source = source if isinstance(source, HubFile) else parse_lens_spec(str(source))
        path = lens_file(source.fetch() if isinstance(source, HubFile) else source)
        try:
            content = read_jacobian_file(path)
            lens = cls(
                content.matrices,
                n_prompts=content.n_prompts,
                metadata=content.metadata,
                target_layer=content.target_layer,
                file=path,
                sums=content.sums,
                facts=content.facts,
            )
            if content.d_model not in (None, lens.d_model):
                raise KlbError(f"says d_model {content.d_model}, its matrices are {lens.d_model} wide")
        except KlbError as error:
            raise KlbError(f"lens {path}: {error}") from error
        if content.sums:
            log.warning("lens %s: an unfinished fit, %d prompts so far", path, content.n_prompts)
            lens.facts["unfinished"] = f"the state of a fit after {content.n_prompts} prompts"
        lens.origin = str(source) if isinstance(source, HubFile) else str(path)
        return lens

    def save(self, path: Path) -> None:
        """Write the public format (float16), in one rename; KlbError where float16 cannot hold a layer."""
        halves = {layer: self._half(layer) for layer in self.source_layers}
        facts = dict(self.facts)
        if self.target_layer is not None and not facts.pop(_ASSUMED, False):
            facts["target_layer"] = self.target_layer  # where TransformerLens looks for it
        write_jacobian_file(path, halves, self.n_prompts, facts, self.metadata)

    def _half(self, layer: int) -> Tensor:
        stored = self._matrices[layer]
        if stored.dtype == torch.float16 and self._divisor == 1:
            half = stored.cpu()
        else:
            matrix = self.matrix(layer)
            half = matrix.to("cpu", torch.float16)
            if not all(map(math.isfinite, _extremes(half))):
                largest = max(map(abs, _extremes(matrix)))
                raise KlbError(f"layer {layer} does not fit into float16, the format's: its largest entry is {largest:.3g}")
            if not half.any():
                raise KlbError(f"layer {layer} is all zero in float16, the format's")
        # A view would take the whole tensor it looks into along.
        whole = half.is_contiguous() and half.untyped_storage().nbytes() == half.nbytes
        return half if whole else half.clone(memory_format=torch.contiguous_format)

    # --- Whose it is. ---

    def mismatch(self, model: ResidualModel) -> str | None:
        """Why the lens does not belong to a model, or None if nothing it records speaks against that."""
        meta, last = self.metadata, model.n_layers - 1
        whose = (meta and meta.model.get("name")) or self.facts.get("model_name") or "a model it does not name"
        if self.d_model != model.d_model:
            return f"of width {self.d_model}, fitted on {whose}; {model.name} has width {model.d_model}"
        if self.source_layers[-1] == last:
            return (
                f"has a matrix for layer {last}, the last block of {model.name}: a lens of block outputs has none there, "
                "this one was fitted at another place (attention heads?) or on a deeper model"
            )
        if self.source_layers[-1] > last or (self.target_layer or 0) > last:
            deepest = max(self.source_layers[-1], self.target_layer or 0)
            return f"reaches layer {deepest}, fitted on {whose}; {model.name} has layers 0-{last}"
        if meta and meta.n_layers != model.n_layers:
            return f"fitted on {whose} with {meta.n_layers} layers; {model.name} has {model.n_layers}"
        if meta and meta.fingerprint:
            same = meta.fingerprint == model.fingerprint
            return None if same else f"fitted on {whose}, whose weights are not those of {model.name} loaded here"
        said = (meta and meta.model.get("hub")) or self.facts.get("model_name")
        hub = model.identity.get("hub")
        if said and hub and _base_name(said) != _base_name(hub):
            return f"fitted on {said}, not on {hub}"
        return None

    def check(self, model: ResidualModel) -> None:
        """KlbError if the lens does not belong to a model."""
        if problem := self.mismatch(model):
            raise KlbError(f"lens {self.origin}: {problem}")

    def for_model(self, model: ResidualModel) -> JacobianLens:
        """The lens, checked, with a target layer: the recorded one, else the model's last block (and a line that says so)."""
        self.check(model)
        if self.target_layer is not None:
            return self
        last = model.n_layers - 1
        gap = "" if self.source_layers[-1] == last - 1 else f", though its layers end at {self.source_layers[-1]}"
        log.info("lens %s: target layer not recorded, taken to be the last block (%d)%s", self.origin, last, gap)
        return self._with(self._matrices, target_layer=last)

    # --- Reading. ---

    def matrix(self, layer: int, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """``J_l [d_model, d_model]`` of one layer in float32 (or as asked); widened anew on each call, not to be changed."""
        matrix = self._stored(layer).to(device=device).to(dtype)  # moved as stored, then widened: half the traffic
        return matrix if self._divisor == 1 else matrix / self._divisor

    def _stored(self, layer: int) -> Tensor:
        if layer not in self._matrices:
            raise KlbError(f"lens {self.origin} has no layer {layer}; it has {', '.join(map(str, self.source_layers))}")
        return self._matrices[layer]

    def transport(self, residual: Tensor, layer: int) -> Tensor:
        """Residuals ``[..., d_model]`` of block ``layer`` in the target's basis, float32; as they are from the target on.

        Raises:
            KlbError: For a layer without a matrix; and for one above all of them when the target layer is not recorded
                (see :meth:`for_model`).
        """
        residual = residual.to(torch.promote_types(residual.dtype, torch.float32))
        if self.target_layer is not None and layer >= self.target_layer:
            return residual
        return residual @ self.matrix(layer, residual.device, residual.dtype).T

    def logits(self, model: ResidualModel, residual: Tensor, layer: int, top_k: int | None = None) -> Tensor | TopTokens:
        """What the lens reads from residuals ``[..., d_model]``, through the model's own final norm and head.

        Returns:
            Logits ``[..., token]`` of every token of the tokenizer in float32; with ``top_k`` only the largest. Rows of the
            head beyond the tokenizer's last id are padding: never read.
        """
        transported = self._bound(model).transport(residual, layer)
        logits = model.unembed(model.final_norm(transported))[..., : len(model.tokenizer)].float()
        if not torch.isfinite(logits).all():
            raise KlbError(
                f"{model.name}: lens logits of layer {layer} are not finite in {model.dtype}; load it with --dtype bfloat16"
            )
        return logits if top_k is None else TopTokens(*logits.topk(min(top_k, logits.shape[-1])))

    def margin(self, model: ResidualModel, contrast: TokenContrast, residual: Tensor, layer: int) -> Tensor:
        """Exact yes-minus-no margin ``[...]`` of residuals ``[..., d_model]``, in logits (float32)."""
        readout = model.token_readout(contrast.token_ids).to(residual.device)
        return contrast.margin(readout.logits(self._bound(model).transport(residual, layer)))

    def _bound(self, model: ResidualModel) -> JacobianLens:
        self.check(model)
        return self if self.target_layer is not None else self._with(self._matrices, target_layer=model.n_layers - 1)

    # --- Other lenses from this one. ---

    def subset(self, layers: Iterable[int]) -> JacobianLens:
        """The same lens with some of its layers only."""
        chosen = sorted(set(layers))
        if not chosen:
            raise KlbError(f"lens {self.origin}: no layers chosen")
        return self._with({layer: self._stored(layer) for layer in chosen})

    @classmethod
    def merge(cls, lenses: Sequence[JacobianLens]) -> JacobianLens:
        """The mean of lenses fitted on different prompts, weighted by their numbers of prompts.

        Raises:
            KlbError: When they differ in layers, target, model, or in how they were fitted.
        """
        if not lenses:
            raise KlbError("no lenses to merge")
        first = lenses[0]
        for other in lenses[1:]:
            if found := next(differences(first, other), None):
                what, one, two = found
                raise KlbError(f"lenses {first.origin} and {other.origin} differ in {what} ({one}, {two}): not merged")
        shards = [
            (about.corpus and about.corpus.sha256, about.shard) for lens in lenses if (about := lens.metadata) and about.shard
        ]
        if len(set(shards)) < len(shards):
            raise KlbError("two of the lenses are the same shard of one fit: merged, its prompts would count twice")
        total, norms = sum(lens.n_prompts for lens in lenses), merged_norms(lenses)
        merged: dict[int, Tensor] = {}
        for i, layer in enumerate(first.source_layers):
            mean = torch.zeros(())
            for lens in lenses:
                weight = lens.n_prompts / total
                own = lens.metadata.norms if lens.metadata else None
                if norms is not None and own is not None:  # a mean of directions times the mean norm: each part is merged
                    weight *= norms[i] / own[i]
                mean = mean + lens.matrix(layer, "cpu") * weight
            # No wider than what went in: two float16 lenses of a 70B model must not become one of float32.
            merged[layer] = mean if first._divisor > 1 else mean.to(first._matrices[layer].dtype)
        facts = first.facts | ({"n_prompts": total} if "n_prompts" in first.facts else {})
        return cls(merged, n_prompts=total, metadata=merged_metadata(lenses), target_layer=first.target_layer, facts=facts)

    def to_margin_lens(self, model: ResidualModel, contrast: TokenContrast, *, k: int = 32, seed: int = 0) -> MarginLens:
        """The margin lens of a contrast: the rows a direct fit on the same prompts would have found.

        Args:
            model: The model whose norm and head are folded into the rows.
            contrast: The tokens of the margin.
            k: Rows of the norm sketch.
            seed: Seed of the sketch.
        """
        lens = self.for_model(model)
        readout = model.token_readout(contrast.token_ids)
        sketch = readout.centre(gaussian_rows(k, self.d_model, seed))
        left = torch.cat([readout.directions, sketch]).to(model.device)
        rows = torch.stack([left @ lens.matrix(layer, model.device) for layer in lens.source_layers])
        n_tokens = len(contrast.token_ids)
        metadata = lens._margin_metadata(model, contrast, k, seed)
        return MarginLens(contrast, readout.to(model.device), rows[:, :n_tokens], rows[:, n_tokens:], metadata, self.file)

    def _margin_metadata(self, model: ResidualModel, contrast: TokenContrast, k: int, seed: int) -> LensMetadata:
        command = f"rows of the full lens {self.origin} ({self.n_prompts} prompts)"
        if self.facts.get("unfinished"):
            command += f"; {self.facts['unfinished']}"
        if self.facts.get(_ASSUMED):
            command += "; target layer not recorded, taken to be the last block"
        update: dict[str, Any] = {
            "kind": "margin",
            "contrast": contrast.pairs,
            "k": k,
            "seed": seed,
            "command": command,
            "versions": versions(),
        }
        if self.metadata is not None:
            return self.metadata.model_copy(update=update)
        facts = self.facts
        assert self.target_layer is not None  # assumed, where it was not recorded
        return LensMetadata(
            model={"name": facts.get("model_name"), "revision": facts.get("model_revision")},
            fingerprint=None,
            n_layers=model.n_layers,
            d_model=self.d_model,
            dtype=facts.get("fit_dtype", "unknown"),
            source_layers=self.source_layers,
            target_layer=self.target_layer,
            skip_first=facts.get("skip_first_positions", facts.get("skip_first")),
            bos=None,
            corpus=None,
            **update,
        )

    def _with(self, matrices: Mapping[int, Tensor], *, target_layer: int | None = None) -> JacobianLens:
        """A lens of some of this one's matrices, or with a target layer assumed; what was checked is not read again."""
        lens = object.__new__(JacobianLens)
        lens.__dict__ = {**self.__dict__, "_matrices": dict(matrices), "facts": dict(self.facts)}
        if target_layer is not None:
            lens.target_layer, lens.facts[_ASSUMED] = target_layer, True
        if self.metadata is not None:
            norms = self.metadata.norms and dict(zip(self.source_layers, self.metadata.norms, strict=True))
            update = {"source_layers": lens.source_layers, "norms": norms and tuple(norms[layer] for layer in matrices)}
            lens.metadata = self.metadata.model_copy(update=update)
        return lens


def _checked_width(jacobians: Mapping[int, Tensor], target_layer: int | None) -> int:
    """The width of what can be a lens; reads every matrix once, one at a time."""
    if not jacobians:
        raise KlbError("a lens without layers")
    width = next(iter(jacobians.values())).shape[-1:]
    for layer, matrix in jacobians.items():
        shape = tuple(matrix.shape)
        if len(shape) != 2 or shape[0] != shape[1]:
            raise KlbError(f"layer {layer} has shape {shape}, not [d_model, d_model]")
        if shape[-1:] != tuple(width):
            raise KlbError(f"layer {layer} is {shape[0]} wide, others {width[0]}")
        if not matrix.is_floating_point() or matrix.layout != torch.strided or matrix.is_meta:
            raise KlbError(f"layer {layer} is a {matrix.dtype} tensor without plain floating-point values")
        if target_layer is not None and layer >= target_layer:
            raise KlbError(f"layer {layer} is not below the target layer {target_layer}")
        low, high = _extremes(matrix)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise KlbError(f"layer {layer} holds values that are not finite")
        if low == high == 0:
            raise KlbError(f"layer {layer} is zero everywhere")
    return width[0]


def _extremes(matrix: Tensor) -> tuple[float, float]:
    """Smallest and largest value; NaN if there is one (15 times faster than ``isfinite`` on half precision)."""
    low, high = matrix.detach().aminmax()
    return low.item(), high.item()


def _base_name(model_id: str) -> str:
    """``owner/Name`` without its owner: aliases of one model differ there."""
    return model_id.rstrip("/").rsplit("/", 1)[-1].lower()
