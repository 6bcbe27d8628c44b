"""Rows against TransformerLens's own Jacobian lens: one fit and one readout, on the same weights, ids and layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from scipy.stats import pearsonr
from timing import ratio, timed
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis.jacobian_lens import JacobianLens as PeerLens

from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.jacobian import JacobianLens
from klb_probe.models.huggingface import HuggingFaceModel
from klb_probe.models.residual_model import chunks
from klb_probe.signals.readout import Readouts, read_prompts

SKIP_FIRST = 16


@dataclass(frozen=True)
class Fitted:
    """One prompt fitted by us.

    Attributes:
        ids: The prompt.
        margin_seconds: For the rows of a margin lens.
        full_seconds: For all rows.
        jacobians: All rows ``[layer, d_model, d_model]``, of every layer below the last.
    """

    ids: Sequence[int]
    margin_seconds: float
    full_seconds: float
    jacobians: Tensor


def bridge_over(model: HuggingFaceModel) -> TransformerBridge:
    """TransformerLens over a copy of the model: it replaces modules of the one it is given."""
    inner = copy.deepcopy(model.model)
    return TransformerBridge.boot_transformers("SmolLM2", hf_model=inner, tokenizer=model.tokenizer)


def bench_against_transformer_lens(
    table: Table, model: HuggingFaceModel, contrast: TokenContrast, fitted: Fitted, prompts: Sequence[Sequence[int]]
) -> None:
    """The fit of one prompt, then the readout of that lens at the last token of ``prompts``, all layers."""
    bridge = bridge_over(model)
    lens = bench_fit(table, bridge, fitted)
    bench_readout(table, model, bridge, contrast, lens, prompts)


def bench_fit(table: Table, bridge: TransformerBridge, fitted: Fitted) -> PeerLens:
    """Their fit of the same prompt against our two kinds; returns their lens."""
    bridge.to_tokens = lambda _prompt: torch.tensor([fitted.ids])  # the same ids; its own tokenizer call would add a BOS
    layers = list(range(len(fitted.jacobians)))
    options = {"corpus": "bench", "source_layers": layers, "max_seq_len": len(fitted.ids), "show_progress": False}
    seconds, lens = timed(lambda: PeerLens.fit(bridge, ["any"], skip_first_positions=SKIP_FIRST, **options))
    pairs = [(fitted.jacobians[layer], lens.jacobians[layer]) for layer in layers]
    difference = max((ours - theirs).norm() / ours.norm() for ours, theirs in pairs)
    peer = f"TransformerLens JacobianLens.fit (largest difference {difference:.0e})"
    name = f"full Jacobian fit, a prompt of {len(fitted.ids)} tokens"
    times = f"{fitted.full_seconds:.1f} s", f"{seconds:.1f} s"
    table.add_row(name, peer, *times, f"{seconds / fitted.full_seconds:.2f}x faster", ">= 1x")
    times = f"{fitted.margin_seconds:.1f} s", f"{seconds:.1f} s"
    table.add_row("margin lens fit, k=32, same ids and layers", "the same", *times, ratio([seconds, fitted.margin_seconds]), "")
    return lens


def bench_readout(
    table: Table,
    model: HuggingFaceModel,
    bridge: TransformerBridge,
    contrast: TokenContrast,
    lens: PeerLens,
    prompts: Sequence[Sequence[int]],
) -> None:
    """Margins of the same lens: read by it, by our full lens and by the margin lens made of that."""
    full = JacobianLens(lens.jacobians, n_prompts=1, target_layer=model.n_layers - 1)
    margin_lens = full.to_margin_lens(model, contrast)
    layers, tokens = range(model.n_layers), list(contrast.token_ids)

    def theirs() -> Tensor:
        read = (lens.readout(bridge, torch.tensor([list(ids)]), positions=[-1], return_full_logits=True) for ids in prompts)
        logits = (torch.stack([one.lens_logits[layer][0, tokens] for layer in layers]) for one in read)
        return torch.stack([contrast.margin(one) for one in logits])

    def exact() -> Tensor:
        read = []
        for some in chunks(prompts, 8):
            residuals = model.residuals(some, layers, [-1])[:, :, 0]
            read.append(torch.stack([full.margin(model, contrast, residuals[layer], layer) for layer in layers], dim=1))
        return torch.cat(read)

    def sketched() -> Tensor:
        readouts = Readouts.empty(len(prompts), 1, model.n_layers, margin_lens.sketch.shape[1], "bench", 1)
        read_prompts(model, [margin_lens], prompts, readouts)
        return readouts.margins[:, 0]

    seconds, wanted = timed(theirs)
    name = f"readout of that lens, {len(prompts)} prompts, {model.n_layers} layers"
    for how, read in (("full lens, exact", exact), ("margin lens", sketched)):
        ours, found = timed(read)
        difference = (found - wanted).abs().max() / wanted.abs().max()
        r = pearsonr(found.flatten().numpy(), wanted.flatten().numpy()).statistic
        peer = f"TransformerLens JacobianLens.readout (largest difference {difference:.0e} of the largest margin, r = {r:.4f})"
        table.add_row(f"{name}: {how}", peer, f"{ours:.1f} s", f"{seconds:.1f} s", ratio([seconds, ours]), "")
