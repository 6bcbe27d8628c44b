"""Is this lens right for this model? One verdict a question, each with a reason a reader can act on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from einops import einsum
from safetensors import SafetensorError, safe_open
from scipy.stats import spearmanr
from torch import Tensor

from klb_probe.errors import KlbError
from klb_probe.lens.contrast import TokenContrast, gaussian_rows
from klb_probe.lens.jacobian import JacobianLens
from klb_probe.lens.margin import MarginLens
from klb_probe.lens.metadata import LensMetadata
from klb_probe.lens.store import read_metadata
from klb_probe.models.chat import automatic_prefix, encode_text
from klb_probe.models.huggingface import SELF_CHECK_TOLERANCE
from klb_probe.models.residual_model import ResidualModel

Verdict = Literal["pass", "fail", "unknown"]

# A Jacobian tends to the identity as the target nears; a rank correlation with depth below this says it does not.
RISING = 0.5
_PARITY_TEXT = "The clerk read the rule twice, looked at the receipt and gave the answer."


@dataclass(frozen=True)
class Check:
    """One question about a lens, its verdict and why."""

    name: str
    verdict: Verdict
    why: str


@dataclass(frozen=True)
class IdentityShare:
    """tr(J_l) / d by source layer.

    Attributes:
        layers: Source layers, ascending.
        share: ``[layer]``, 1 for the identity.
        error: Standard error of each share ``[layer]``; 0 where the whole matrix is known.
    """

    layers: tuple[int, ...]
    share: np.ndarray
    error: np.ndarray

    @property
    def rise(self) -> float:
        """Spearman correlation of share and depth; NaN with fewer than three layers."""
        return float(spearmanr(self.layers, self.share).statistic) if len(self.layers) > 2 else float("nan")


def sketch_identity_share(sketch: Tensor, rows: Tensor, layers: Sequence[int]) -> IdentityShare:
    """Identity share from random rows: E[s . (s J)] = tr(J) for Gaussian s.

    Args:
        sketch: ``[layer, k, d_model]``, ``S J_l``.
        rows: ``[k, d_model]``, S, entries of variance 1/k.
        layers: The layer of each.
    """
    k, d_model = rows.shape
    samples = einsum(sketch.double(), rows.double(), "layer k d, k d -> layer k").numpy() * k / d_model
    return IdentityShare(tuple(layers), samples.mean(1), samples.std(1, ddof=1) / k**0.5)


def exact_identity_share(lens: JacobianLens) -> IdentityShare:
    """Identity share of a full lens; one layer at a time, so that a large lens never sits in memory whole."""
    share = [float(lens.matrix(layer).diagonal().double().mean()) for layer in lens.source_layers]
    return IdentityShare(lens.source_layers, np.array(share), np.zeros(len(share)))


def check_lens(path: Path, model: ResidualModel) -> list[Check]:
    """All checks of a lens file against a model.

    A file that cannot be read is a failed check.
    """
    try:
        checks = _check_margin_file if _is_safetensors(path) else _check_full_file
        return list(checks(path, model))
    except KlbError as error:
        return [Check("readable", "fail", str(error))]


def _is_safetensors(path: Path) -> bool:
    """By content: torch archives are zip files (``PK``), safetensors begin with the length of a JSON header."""
    if path.is_dir():
        return False
    with path.open("rb") as file:
        head = file.read(9)
    return head[8:9] == b"{" or path.suffix == ".safetensors"


def _check_margin_file(path: Path, model: ResidualModel) -> Iterator[Check]:
    metadata = read_metadata(path)
    try:
        with safe_open(path, "pt") as file:
            rows, sketch = file.get_tensor("rows"), file.get_tensor("sketch")
    except SafetensorError as error:
        raise KlbError(f"{path} is not a readable safetensors file ({error})") from None
    n, d_model = len(metadata.source_layers), metadata.d_model
    shapes = (n, 2 * len(metadata.contrast), d_model), (n, metadata.k, d_model)
    if (tuple(rows.shape), tuple(sketch.shape)) != shapes:
        raise KlbError(f"{path}: tensors of shape {tuple(rows.shape)}, {tuple(sketch.shape)} do not fit its metadata")
    yield Check("readable", "pass", f"margin lens of {metadata.model.get('name') or 'an unnamed model'}, k = {metadata.k}")
    fits = metadata.d_model == model.d_model
    yield _width(d_model, model)
    yield _layers(metadata.source_layers, metadata.n_layers, metadata.target_layer, model)
    yield from _belongs(metadata.model_dump(), model)
    yield _contrast_tokens(metadata, model)
    yield _values({layer: torch.cat([rows[i], sketch[i]]) for i, layer in enumerate(metadata.source_layers)})
    drawn = gaussian_rows(metadata.k, d_model, metadata.seed)
    if fits:
        drawn = model.token_readout([token for pair in metadata.contrast for _, token in pair][:1]).centre(drawn)
    yield _identity(sketch_identity_share(sketch, drawn, metadata.source_layers))
    yield _margin_parity(metadata, rows, sketch, model) if fits else _needs_width("decode parity")


def _check_full_file(path: Path, model: ResidualModel) -> Iterator[Check]:
    lens = JacobianLens.open(path)
    layers = lens.source_layers
    unfinished = f", {lens.facts['unfinished']}" if "unfinished" in lens.facts else ""
    yield Check("readable", "pass", f"full Jacobian lens of {lens.n_prompts} prompts{unfinished}")
    yield _width(lens.d_model, model)
    yield _layers(layers, None if lens.metadata is None else lens.metadata.n_layers, lens.target_layer, model)
    yield from _belongs(_said_by(lens), model)
    yield Check("values", "pass", f"finite and not zero in {len(layers)} layers")  # or it would not have opened
    yield _identity(exact_identity_share(lens))
    if lens.d_model != model.d_model:
        yield _needs_width("decode parity")
    elif problem := lens.mismatch(model):
        yield Check("decode parity", "unknown", f"not read with this model: {problem}")
    else:
        yield _full_parity(lens, model)


def _said_by(lens: JacobianLens) -> dict[str, Any]:
    """What a full lens says about itself: our metadata, or the facts of files that others wrote."""
    if lens.metadata is not None:
        return lens.metadata.model_dump()
    provenance = lens.facts.get("provenance")
    provenance = provenance if isinstance(provenance, dict) else {}
    places = lens.facts.get("hook_convention"), lens.facts.get("site"), provenance.get("capture_point")
    return {
        "model": {"hub": lens.facts.get("model_name")},
        # Files that name another site do not open.
        "site": "block_output" if any(places) else None,
        "target_layer": lens.target_layer,
    }


def _width(d_model: int, model: ResidualModel) -> Check:
    same = d_model == model.d_model
    return Check("width", "pass" if same else "fail", f"lens {d_model}, {model.name} {model.d_model}")


def _layers(layers: Sequence[int], n_layers: int | None, target: int | None, model: ResidualModel) -> Check:
    span, last = _spans(layers), model.n_layers - 1
    if n_layers is not None and n_layers != model.n_layers:
        return Check("layers", "fail", f"lens of a model of {n_layers} layers; {model.name} has {model.n_layers}")
    if max(layers) > last:
        return Check("layers", "fail", f"lens has layers {span}; {model.name} has 0-{last}")
    if max(layers) == last:
        return Check("layers", "fail", f"layers {span}: block {last} is the last, where nothing is fitted; another site?")
    reached = (last if target is None else target) - 1
    whole = list(layers) == list(range(reached + 1))
    if n_layers is None and max(layers) < last - 1:
        return Check("layers", "unknown", f"layers {span} of 0-{last - 1}: a smaller model's lens, or a part of one")
    return Check("layers", "pass", f"{span} of {model.n_layers} blocks" + ("" if whole else "; other layers cannot be read"))


def _spans(layers: Sequence[int]) -> str:
    """``0-28``, or the layers one by one where some are missing between."""
    whole = list(layers) == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]}-{layers[-1]}" if whole and len(layers) > 1 else ", ".join(map(str, layers))


def _belongs(said: Mapping[str, Any], model: ResidualModel) -> Iterator[Check]:
    """What only metadata can say: model, BOS policy, site, target layer."""
    yield _model(said.get("model") or {}, said.get("fingerprint"), model)
    yield _bos(said.get("bos"), model)
    site = said.get("site")
    if site is None:
        yield Check("site", "unknown", "the file does not say where residuals were taken; block outputs are assumed")
    else:
        yield Check("site", "pass" if site == "block_output" else "fail", f"fitted on {site}, read on block_output")
    yield _target(said.get("target_layer"), said.get("n_layers"), model)


def _model(whose: dict[str, str | None], fingerprint: str | None, model: ResidualModel) -> Check:
    name = whose.get("name") or whose.get("hub")
    if fingerprint is not None:
        if fingerprint == model.fingerprint:
            return Check("model", "pass", f"fitted on these weights ({fingerprint[:12]})")
        return Check("model", "fail", f"fitted on {name or 'an unnamed model'}, whose weights are not those of {model.name}")
    known = {value for value in (model.name, *model.identity.values()) if value}
    if name is None:
        return Check("model", "unknown", "the file does not say which model it was fitted on")
    if known & {value for value in whose.values() if value}:
        return Check("model", "unknown", f"named {name} like this model, but holds no hash of its weights")
    return Check("model", "unknown", f"fitted on {name}, not a name of {model.name}, and holds no hash of its weights")


def _bos(policy: str | None, model: ResidualModel) -> Check:
    prefix = automatic_prefix(model.tokenizer)
    own = f"the tokenizer puts {model.tokenizer.decode(prefix)} first" if prefix else "the tokenizer adds none"
    if policy is None:
        return Check("BOS", "unknown", f"the file does not say whether texts began with BOS; {own}")
    agrees = policy == "auto" or (policy == "always") == bool(prefix)
    return Check("BOS", "pass" if agrees else "fail", f"fitted with BOS {policy}; {own}")


def _target(target: int | None, n_layers: int | None, model: ResidualModel) -> Check:
    if target is None:
        return Check("target layer", "unknown", "the file does not say which block's output it transports to")
    last = (n_layers or model.n_layers) - 1
    if target == last:
        return Check("target layer", "pass", f"{target}, the last block")
    if target == last - 1:
        return Check("target layer", "pass", f"{target}, the penultimate block: not comparable with lenses of the last")
    return Check("target layer", "fail", f"{target} of 0-{last}: the readout belongs to the last block's output")


def _contrast_tokens(metadata: LensMetadata, model: ResidualModel) -> Check:
    words = [side for pair in metadata.contrast for side in pair]
    for text, token in words:
        here = model.tokenizer.decode([token]) if token < len(model.tokenizer) else "no token"
        if here != text:
            return Check("contrast tokens", "fail", f"token {token} is {text!r} in the lens and {here!r} in {model.name}")
    return Check("contrast tokens", "pass", ", ".join(f"{text!r} ({token})" for text, token in words))


def _values(by_layer: dict[int, Tensor]) -> Check:
    for layer, values in by_layer.items():
        if not torch.isfinite(values).all():
            return Check("values", "fail", f"layer {layer} holds values that are not finite")
        if not values.any(dim=-1).all():
            return Check("values", "fail", f"layer {layer} has a row that is all zero")
    return Check("values", "pass", f"finite and not zero in {len(by_layer)} layers")


def _identity(shares: IdentityShare) -> Check:
    share = shares.share
    if not np.isfinite(share).all():
        return Check("identity share", "fail", "tr(J)/d is not finite")
    some = sorted({0, len(share) // 2, len(share) - 1})
    at = ", ".join(
        f"{share[i]:.2f}{f' +/- {shares.error[i]:.2f}' if shares.error[i] else ''} at {shares.layers[i]}" for i in some
    )
    if np.isnan(shares.rise):
        return Check("identity share", "unknown", f"tr(J)/d {at}: too few layers to say whether it rises with depth")
    rising = shares.rise > RISING
    return Check(
        "identity share", "pass" if rising else "fail", f"tr(J)/d {at}; Spearman with depth {shares.rise:+.2f} (> {RISING})"
    )


def _needs_width(name: str) -> Check:
    return Check(name, "unknown", "needs a lens of the model's width")


def _last_block(model: ResidualModel, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Last block's output ``[position, d_model]`` on a short text, and the model's own logits there ``[position, token]``."""
    ids = encode_text(model.tokenizer, _PARITY_TEXT, "auto")
    positions = torch.arange(len(ids))[None]
    capture = model.capture(torch.tensor([ids]), [model.n_layers - 1], positions, token_ids)
    return capture.residuals[0, 0], capture.logits[0].cpu()


def _margin_parity(metadata: LensMetadata, rows: Tensor, sketch: Tensor, model: ResidualModel) -> Check:
    contrast = TokenContrast(metadata.contrast)
    if max(contrast.token_ids) >= model.vocab_size:
        return Check("decode parity", "unknown", "the lens's tokens are not in the model's vocabulary")
    if metadata.target_layer >= model.n_layers:
        return Check("decode parity", "unknown", f"the lens's target, block {metadata.target_layer}, is not in {model.name}")
    readout = model.token_readout(contrast.token_ids).to(model.device)
    lens = MarginLens(contrast, readout, rows.to(model.device), sketch.to(model.device), metadata)
    hidden, own = _last_block(model, contrast.token_ids)
    return _parity(lens.margin(hidden, model.n_layers - 1).cpu() - contrast.margin(own), own, model)


def _full_parity(lens: JacobianLens, model: ResidualModel) -> Check:
    some = torch.linspace(0, len(model.tokenizer) - 1, 64).long().tolist()
    hidden, own = _last_block(model, some)
    read = cast(Tensor, lens.logits(model, hidden, model.n_layers - 1))[..., some].cpu()
    return _parity(read - own, own, model)


def _parity(difference: Tensor, own: Tensor, model: ResidualModel) -> Check:
    error, allowed = float(difference.abs().max()), float(SELF_CHECK_TOLERANCE[model.dtype] * max(1.0, float(own.abs().max())))
    why = f"last block against the model's own logits: max difference {error:.1e} (allowed {allowed:.1e})"
    return Check("decode parity", "pass" if error <= allowed else "fail", why)
