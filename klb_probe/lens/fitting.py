"""Fitting a lens: one loop for both kinds, which differ in nothing but the cotangents.

A margin lens needs a handful of rows ``v^T J_l`` (the contrast's directions and a norm sketch), a full lens all
``d_model`` of them (the identity's). The estimator is in :mod:`klb_probe.lens.vjp`; here its results are summed up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from klb_probe.errors import KlbError
from klb_probe.lens.checkpoint import Checkpoint
from klb_probe.lens.contrast import TokenContrast, gaussian_rows
from klb_probe.lens.corpus import Corpus
from klb_probe.lens.interrupts import Interrupts
from klb_probe.lens.margin import MarginLens
from klb_probe.lens.metadata import CorpusRecord, LensMetadata
from klb_probe.lens.sums import RunningSums, split_half_agreement
from klb_probe.lens.vjp import backward_batch, graph_start, prompt_rows, refuse_forward_only
from klb_probe.models.readout import TokenReadout
from klb_probe.models.residual_model import ResidualModel
from klb_probe.sharding import Shard
from klb_probe.versions import versions

if TYPE_CHECKING:
    from klb_probe.lens.jacobian import JacobianLens

__all__ = ["FitOptions", "cotangent_rows", "fit_full_lens", "fit_lens", "fit_margin_lens", "prompt_rows"]

KINDS = ("margin", "full")
# Halves of fewer prompts than this agree or not by luck.
UNTIL_PROMPTS = 8
# Cotangents a pass. A margin lens has 34 rows by default. On a CPU 8 are as fast as 32, whose gradients fall out of its
# caches (measured, default model); a GPU wants many, and halves them itself when they do not fit.
_BATCH, _CUDA_BATCH = {"margin": 17, "full": 8}, {"margin": 34, "full": 64}


@dataclass(frozen=True)
class FitOptions:
    """How a lens is fitted; recorded in its metadata.

    Attributes:
        target: ``last`` (reference code) or ``penultimate`` (the paper's default on one model) block.
        k: Rows of the norm sketch.
        seed: Seed of the sketch.
        skip_first: Positions left out at the start of a prompt (attention sinks).
        batch: Cotangents in one backward pass; bounds memory, and is halved when that runs out. None: by kind.
        kind: ``margin`` (contrast rows and a norm sketch) or ``full`` (whole Jacobians).
        layers: Source layers; None for all below the target.
        normalise: Divide each prompt's Jacobian by its norm, as its ``k`` sketch rows tell it, and give the mean the mean
            norm: for models in which a few prompts would outweigh all others.
        shard: Fit on a part of the prompts only.
        until: Stop once the even and the odd prompts agree this well (after at least 8).
    """

    target: str = "last"
    k: int = 32
    seed: int = 0
    skip_first: int = 16
    batch: int | None = None
    kind: str = "margin"
    layers: tuple[int, ...] | None = None
    normalise: bool = False
    shard: Shard | None = None
    until: float | None = None

    def target_layer(self, n_layers: int) -> int:
        """Index of the target block."""
        offsets = {"last": 1, "penultimate": 2}
        if self.target not in offsets:
            raise KlbError(f"unknown target layer {self.target!r}; one of {', '.join(offsets)}")
        return n_layers - offsets[self.target]

    def source_layers(self, n_layers: int) -> list[int]:
        """The source layers, in order; KlbError for one at or above the target."""
        target = self.target_layer(n_layers)
        layers = list(range(target)) if self.layers is None else sorted(set(self.layers))
        if not layers:
            raise KlbError(f"{n_layers} blocks are too few for target layer {self.target}")
        if bad := [layer for layer in layers if not 0 <= layer < target]:
            raise KlbError(f"--layers: a fit to block {target} has source layers 0-{target - 1}, not {bad[0]}")
        return layers


def cotangent_rows(readout: TokenReadout, options: FitOptions) -> Tensor:
    """The cotangents of a margin lens ``[token + k, d_model]``: token directions, then (centred) sketch rows."""
    sketch = readout.centre(gaussian_rows(options.k, readout.directions.shape[1], options.seed))
    return torch.cat([readout.directions, sketch])


class Fit:
    """One fit under way: what is summed up, and what becomes of the sums.

    Attributes:
        prompts: The prompts of this fit (of its shard).
        sums: The running sums.
        settings: Everything that the sums depend on, for a checkpoint to be compared by.
        stopped_early: Whether the agreement asked for was reached before the prompts ran out.
    """

    def __init__(self, model: ResidualModel, corpus: Corpus, contrast: TokenContrast, options: FitOptions) -> None:
        if options.kind not in KINDS:
            raise KlbError(f"unknown --kind {options.kind!r}; one of {', '.join(KINDS)}")
        refuse_forward_only(model)
        self.model, self.corpus, self.contrast, self.options = model, corpus, contrast, options
        self.prompts = options.shard.of(corpus.prompts) if options.shard else corpus.prompts
        if options.shard and not self.prompts:
            n = len(corpus.prompts)
            raise KlbError(f"shard {options.shard} has none of the {n} prompts of {corpus.source}; make {n} shards at most")
        self.target_layer = options.target_layer(model.n_layers)
        self.layers = options.source_layers(model.n_layers)
        self.readout = model.token_readout(contrast.token_ids)
        margin_rows = cotangent_rows(self.readout, options)
        self.n_tokens = len(contrast.token_ids)
        self.sketch = margin_rows[self.n_tokens :]
        self.rows = margin_rows if options.kind == "margin" else torch.eye(model.d_model)
        self.batch = backward_batch(options.batch or (_CUDA_BATCH if model.device.type == "cuda" else _BATCH)[options.kind])
        self.sums = RunningSums.zeros(len(self.layers), len(self.rows), model.d_model, normalise=options.normalise)
        self.settings = fit_settings(model, contrast, options) | {"corpus hash": corpus.sha256}
        self.stopped_early = False
        self._start: int | None = None

    def step(self, interrupts: Interrupts) -> None:
        """Deal with the next prompt; an interrupt leaves the sums either before or after it."""
        ids = self.prompts[self.sums.index]
        if not self._long_enough(ids):
            self.sums.skip()
            return
        rows = self._estimate(ids)
        norms = self._norms(rows) if self.options.normalise else None
        with interrupts.held():
            self.sums.add(rows, norms)

    def _long_enough(self, ids: tuple[int, ...]) -> bool:
        return len(ids) > self.options.skip_first + 1

    def _estimate(self, ids: tuple[int, ...]) -> Tensor:
        options = {"target_layer": self.target_layer, "skip_first": self.options.skip_first}
        if self._start is None:
            # Always tried on the first prompt, so that a resumed fit decides as the uninterrupted one did.
            first = next(prompt for prompt in self.prompts if self._long_enough(prompt))
            self._start = graph_start(self.model, first, self.layers, **options)
        return prompt_rows(self.model, ids, self.rows, self.layers, **options, batch=self.batch, start=self._start)

    def _norms(self, rows: Tensor) -> Tensor:
        """Norm of each layer's Jacobian ``[layer]`` float64, as the sketch estimates it, the same for both kinds of lens."""
        sketched = rows[:, self.n_tokens :] if self.options.kind == "margin" else self.sketch @ rows
        return sketched.double().flatten(1).norm(dim=1)

    def agreement(self) -> float | None:
        """Split-half agreement so far, or None before there are two prompts."""
        if self.sums.used < 2:
            return None
        halves = list(self.sums.halves)
        if self.options.kind == "margin":  # what the lens is read for: the yes-minus-no row
            contrast = TokenContrast(self.contrast.pairs)
            halves = [contrast.margin(half[:, : self.n_tokens].movedim(1, -1)) for half in halves]
        return split_half_agreement(*halves)

    def done(self) -> bool:
        """Whether the prompts have run out or the agreement asked for is reached."""
        until = self.options.until
        agreed = False
        if until is not None and self.sums.used >= UNTIL_PROMPTS:
            agreement = self.agreement()
            agreed = agreement is not None and agreement >= until
        self.stopped_early = agreed and self.sums.index < len(self.prompts)
        return agreed or self.sums.index >= len(self.prompts)

    def lens(self, command: str) -> MarginLens | JacobianLens:
        """The fitted lens; KlbError when no prompt was long enough."""
        if not self.sums.used:
            raise KlbError(f"every prompt has {self.options.skip_first + 1} tokens or fewer: nothing to fit on")
        mean, metadata, device = self.sums.mean(), self._metadata(command), self.model.device
        if self.options.kind == "full":
            from klb_probe.lens.jacobian import JacobianLens

            jacobians = dict(zip(self.layers, mean, strict=True))
            return JacobianLens(jacobians, n_prompts=self.sums.used, metadata=metadata, target_layer=self.target_layer)
        rows, sketch = mean[:, : self.n_tokens].to(device), mean[:, self.n_tokens :].to(device)
        return MarginLens(self.contrast, self.readout.to(device), rows, sketch, metadata)

    def _metadata(self, command: str) -> LensMetadata:
        model, options, norms = self.model, self.options, self.sums.mean_norms
        full, first_shard = options.kind == "full", options.shard is None or options.shard.index == 1
        return LensMetadata(
            model=model.identity,
            fingerprint=model.fingerprint,
            n_layers=model.n_layers,
            d_model=model.d_model,
            dtype=str(model.dtype).removeprefix("torch."),
            source_layers=tuple(self.layers),
            target_layer=self.target_layer,
            contrast=() if full else self.contrast.pairs,
            k=0 if full and not options.normalise else options.k,
            seed=options.seed,
            skip_first=options.skip_first,
            bos=self.corpus.bos,
            corpus=CorpusRecord(
                source=self.corpus.source,
                sha256=self.corpus.sha256,
                n_prompts=self.sums.used,
                # What the corpus passed over belongs to the fit as a whole: one shard carries it.
                n_skipped=self.sums.index - self.sums.used + (self.corpus.n_short if first_shard else 0),
                max_tokens=self.corpus.max_tokens,
                n_available=len(self.corpus.prompts),
            ),
            command=command,
            versions=versions(),
            kind=options.kind,
            norms=None if norms is None else tuple(norms.tolist()),
            shard=str(options.shard) if options.shard else None,
            split_half=self.agreement(),
            until=options.until,
            stopped_early=self.stopped_early,
        )


def fit_settings(model: ResidualModel, contrast: TokenContrast, options: FitOptions) -> dict[str, Any]:
    """What the sums depend on, text aside, in JSON's types. Not ``batch`` and ``until``: those may change on the way."""
    full = options.kind == "full"
    return {
        "model": model.name,
        "weights": model.fingerprint,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kind": options.kind,
        "contrast": None if full else str(TokenContrast(contrast.pairs)),
        "target layer": options.target,
        "layers": options.source_layers(model.n_layers),
        "k": None if full and not options.normalise else options.k,
        "seed": options.seed,
        "skip first": options.skip_first,
        "normalise": options.normalise,
        "shard": str(options.shard) if options.shard else None,
    }


def fit_lens(
    model: ResidualModel,
    corpus: Corpus,
    contrast: TokenContrast,
    options: FitOptions = FitOptions(),
    *,
    command: str = "",
    on_prompt: Callable[[Fit], None] = lambda _: None,
    checkpoint: Checkpoint | None = None,
    resume: RunningSums | None = None,
    settings: dict[str, Any] | None = None,
) -> MarginLens | JacobianLens:
    """Fit a lens of either kind on a corpus, all source layers at once.

    Args:
        model: The model; its parameters are not differentiated.
        corpus: Prompts as ids.
        contrast: The tokens whose rows are wanted; a full lens has all rows and no contrast.
        options: See :class:`FitOptions`.
        command: What to record as the way to make this lens again.
        on_prompt: Called after each prompt.
        checkpoint: Where to keep the fit while it is under way; removed by the caller once the lens is safe.
        resume: Sums of a checkpoint of the same fit to go on from.
        settings: Further settings that a checkpoint is to record.

    Raises:
        KeyboardInterrupt: On Ctrl-C or SIGTERM, with a line that says how to continue, once the checkpoint is written.
    """
    fit = Fit(model, corpus, contrast, options)
    fit.sums = resume or fit.sums

    def save(interrupts: Interrupts) -> None:
        if checkpoint:
            with interrupts.held():
                checkpoint.save(fit.sums, fit.settings | (settings or {}), corpus.prompts)

    with Interrupts.caught(checkpoint is not None) as interrupts:
        try:
            save(interrupts)  # the text that was sampled is worth keeping too
            saved = fit.sums.index
            while not fit.done():
                fit.step(interrupts)
                on_prompt(fit)
                if checkpoint and fit.sums.index - saved >= checkpoint.every:
                    save(interrupts)
                    saved = fit.sums.index
            if fit.sums.index > saved:
                save(interrupts)  # writing the lens may still fail: a full disk, a layer too large for its format
        except KeyboardInterrupt:
            if checkpoint is None:
                raise
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C is heard only once the checkpoint is there
                save(interrupts)
            raise KeyboardInterrupt(
                f"stopped after {fit.sums.index} of {len(fit.prompts)} prompts; continue with the same command and --resume"
            ) from None
        except Exception:
            if checkpoint and not fit.sums.index:
                checkpoint.remove()  # nothing was reached: no reason to ask about resuming
            else:
                save(interrupts)
            raise
    return fit.lens(command)


def fit_margin_lens(
    model: ResidualModel, corpus: Corpus, contrast: TokenContrast, options: FitOptions = FitOptions(), **how: Any
) -> MarginLens:
    """:func:`fit_lens` of kind ``margin``."""
    return cast(MarginLens, fit_lens(model, corpus, contrast, replace(options, kind="margin"), **how))


def fit_full_lens(
    model: ResidualModel, corpus: Corpus, contrast: TokenContrast, options: FitOptions = FitOptions(), **how: Any
) -> JacobianLens:
    """:func:`fit_lens` of kind ``full``."""
    return cast("JacobianLens", fit_lens(model, corpus, contrast, replace(options, kind="full"), **how))
