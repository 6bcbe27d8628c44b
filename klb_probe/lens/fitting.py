"""Fitting a margin lens: a handful of vector-Jacobian products a prompt instead of d_model of them.

Estimator of the reference code (anthropics/jacobian-lens): a cotangent is put on EVERY valid target position at once;
the gradient at source position p is then the sum over p' >= p of its effect on p'; gradients are averaged over the valid
source positions of a prompt, then over prompts. Valid are all positions but the first ``skip_first`` and the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange, reduce
from torch import Tensor

from klb_probe.errors import KlbError
from klb_probe.lens.contrast import TokenContrast, gaussian_rows
from klb_probe.lens.corpus import Corpus
from klb_probe.lens.margin import MarginLens
from klb_probe.lens.metadata import CorpusRecord, LensMetadata
from klb_probe.models.readout import TokenReadout
from klb_probe.models.residual_model import ResidualModel, chunks
from klb_probe.versions import versions


@dataclass(frozen=True)
class FitOptions:
    """How a lens is fitted; recorded in its metadata.

    Attributes:
        target: ``last`` (reference code) or ``penultimate`` (the paper's default on one model) block.
        k: Rows of the norm sketch.
        seed: Seed of the sketch.
        skip_first: Positions left out at the start of a prompt (attention sinks).
        batch: Cotangents in one backward pass; bounds memory.
    """

    target: str = "last"
    k: int = 32
    seed: int = 0
    skip_first: int = 16
    batch: int = 17

    def target_layer(self, n_layers: int) -> int:
        """Index of the target block."""
        offsets = {"last": 1, "penultimate": 2}
        if self.target not in offsets:
            raise KlbError(f"unknown target layer {self.target!r}; one of {', '.join(offsets)}")
        return n_layers - offsets[self.target]


def cotangent_rows(readout: TokenReadout, options: FitOptions) -> Tensor:
    """The cotangents of a margin lens ``[token + k, d_model]``: token directions, then (centred) sketch rows."""
    sketch = readout.centre(gaussian_rows(options.k, readout.directions.shape[1], options.seed))
    return torch.cat([readout.directions, sketch])


def prompt_rows(
    model: ResidualModel,
    ids: Sequence[int],
    rows: Tensor,
    layers: Sequence[int],
    *,
    target_layer: int,
    skip_first: int,
    batch: int,
) -> Tensor:
    """``rows @ J_l`` of one prompt for every source layer: ``[layer, row, d_model]``, float32 (float64 stays).

    Args:
        model: The model.
        ids: Token ids, more than ``skip_first + 1`` of them.
        rows: Cotangents ``[row, d_model]``.
        layers: Source layers, all below ``target_layer``.
        target_layer: Block whose output the cotangents are put on.
        skip_first: Leading positions that are not valid.
        batch: Cotangents in one backward pass.

    Raises:
        KlbError: When a gradient is zero everywhere or not finite.
    """
    valid = slice(skip_first, len(ids) - 1)
    if valid.stop <= valid.start:
        raise KlbError(f"a prompt of {len(ids)} tokens has no valid position after skipping {skip_first} and the last")
    done: list[Tensor] = []
    with model.gradient_graph(torch.tensor([list(ids)]), layers, target_layer) as (sources, target):
        for some in chunks(rows, batch):
            # One graph, many cotangents: same numbers as a replicated batch, a fraction of its memory.
            cotangents = torch.zeros(len(some), *target.shape, dtype=target.dtype, device=target.device)
            cotangents[:, :, valid] = rearrange(some, "row d -> row 1 1 d").to(target)
            grads = torch.autograd.grad(
                target, sources, cotangents, retain_graph=True, is_grads_batched=True, materialize_grads=True
            )
            done.append(torch.stack([_mean_over(grad, valid) for grad in grads]))
    result = torch.cat(done, dim=1)
    if not torch.isfinite(result).all() or (result == 0).all(dim=(1, 2)).any():
        raise KlbError(f"{model.name}: a Jacobian row is all zero or not finite on {model.device} in {model.dtype}")
    return result


def _mean_over(grad: Tensor, valid: slice) -> Tensor:
    """Mean over valid source positions of ``[row, 1, position, d_model]``, accumulated in float32, on the CPU."""
    grad = grad[:, 0, valid]
    return reduce(grad if grad.dtype == torch.float64 else grad.float(), "row p d -> row d", "mean").cpu()


def fit_margin_lens(
    model: ResidualModel,
    corpus: Corpus,
    contrast: TokenContrast,
    options: FitOptions = FitOptions(),
    *,
    command: str = "",
    on_prompt: Callable[[], None] = lambda: None,
) -> MarginLens:
    """Fit a margin lens on a corpus, all layers at once.

    Args:
        model: The model; its parameters are not differentiated.
        corpus: Prompts as ids.
        contrast: The tokens whose rows are wanted.
        options: See :class:`FitOptions`.
        command: What to record as the way to make this lens again.
        on_prompt: Called after each prompt.
    """
    target_layer = options.target_layer(model.n_layers)
    layers = list(range(target_layer))
    if not layers:
        raise KlbError(f"{model.name} has too few blocks for target layer {options.target}")
    readout = model.token_readout(contrast.token_ids)
    rows = cotangent_rows(readout, options)
    total = torch.zeros(len(layers), len(rows), model.d_model)
    used = 0
    for ids in corpus.prompts:
        if len(ids) <= options.skip_first + 1:
            on_prompt()
            continue
        total += prompt_rows(
            model, ids, rows, layers, target_layer=target_layer, skip_first=options.skip_first, batch=options.batch
        )
        used += 1
        on_prompt()
    if not used:
        raise KlbError(f"every prompt has {options.skip_first + 1} tokens or fewer: nothing to fit on")
    mean = total / used
    n_tokens = len(contrast.token_ids)
    metadata = LensMetadata(
        model=model.identity,
        fingerprint=model.fingerprint,
        n_layers=model.n_layers,
        d_model=model.d_model,
        dtype=str(model.dtype).removeprefix("torch."),
        source_layers=tuple(layers),
        target_layer=target_layer,
        contrast=contrast.pairs,
        k=options.k,
        seed=options.seed,
        skip_first=options.skip_first,
        bos=corpus.bos,
        corpus=CorpusRecord(
            source=corpus.source,
            sha256=corpus.sha256,
            n_prompts=used,
            n_skipped=len(corpus.prompts) - used,
            max_tokens=corpus.max_tokens,
        ),
        command=command,
        versions=versions(),
    )
    return MarginLens(
        contrast,
        readout.to(model.device),
        mean[:, :n_tokens].to(model.device),
        mean[:, n_tokens:].to(model.device),
        metadata,
    )
