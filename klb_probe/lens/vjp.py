"""Vector-Jacobian products of one prompt, averaged over positions: the estimator that every fit sums up.

Estimator of the reference code (anthropics/jacobian-lens): a cotangent is put on EVERY valid target position at once;
the gradient at source position p is then the sum over p' >= p of its effect on p'; gradients are averaged over the valid
source positions of a prompt, then over prompts. Valid are all positions but the first ``skip_first`` and the last one.

A causal model lets two parts of the sequence out of the graph without changing a number. The last token is neither
source nor target. And whatever flows from a target p' back to a source p stays between the two, so that the
leading ``skip_first`` positions can be plain keys and values (FLOPs of a 128-token prompt: 13 % less).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from einops import rearrange, reduce
from torch import Tensor

from klb_probe.errors import KlbError
from klb_probe.models.batch_size import BatchSize, is_out_of_memory
from klb_probe.models.quantised import quantisation_method
from klb_probe.models.residual_model import ResidualModel

log = logging.getLogger(__name__)

# Quantisations whose layers pass a gradient on to their inputs; all others (AWQ, GPTQ, fp8, mxfp4 ...) run forward only.
_DIFFERENTIABLE = {"bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit", "hqq", "quanto"}
# Largest relative difference between gradients with and without the leading positions in the graph. Rounding alone
# gives 1e-6 in float32 and about 1e-2 in bfloat16; a cache that cuts the graph gives differences of order 1.
_SAME_GRADIENT = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def backward_batch(size: int) -> BatchSize:
    """How many cotangents go through one backward pass."""
    return BatchSize(
        size,
        "out of memory with one cotangent a pass: lower --max-len, name later --layers only, "
        "pass --dtype bfloat16, or take a smaller model",
    )


def refuse_forward_only(model: ResidualModel) -> None:
    """KlbError, naming the scheme, for weights quantised in a way that passes no gradient to activations."""
    config = getattr(getattr(model, "model", None), "config", None)
    method = None if config is None else quantisation_method(config)
    if method is not None and method not in _DIFFERENTIABLE:
        raise KlbError(
            f"{model.name} is quantised with {method}, which has no backward pass; fit on its unquantised weights, "
            "or on a bitsandbytes copy"
        )


def prompt_rows(
    model: ResidualModel,
    ids: Sequence[int],
    rows: Tensor,
    layers: Sequence[int],
    *,
    target_layer: int,
    skip_first: int,
    batch: int | BatchSize,
    start: int = 0,
) -> Tensor:
    """``rows @ J_l`` of one prompt for every source layer: ``[layer, row, d_model]``, float32 (float64 stays), on the CPU.

    Args:
        model: The model.
        ids: Token ids, more than ``skip_first + 1`` of them.
        rows: Cotangents ``[row, d_model]``.
        layers: Source layers, all below ``target_layer``.
        target_layer: Block whose output the cotangents are put on.
        skip_first: Leading positions that are not valid.
        batch: Cotangents in one backward pass; a :func:`backward_batch` remembers what memory allowed.
        start: First position of the graph, at most ``skip_first``; see :func:`graph_start`.

    Raises:
        KlbError: When a gradient is zero everywhere or not finite, or memory is too short for one cotangent.
    """
    if len(ids) - 1 <= skip_first:
        raise KlbError(f"a prompt of {len(ids)} tokens has no valid position after skipping {skip_first} and the last")
    valid = slice(skip_first - start, len(ids) - 1 - start)
    passes = batch if isinstance(batch, BatchSize) else backward_batch(batch)
    trimmed = {"first_position": start} if start else {}
    # A caller under inference_mode would get tensors that can never have a gradient.
    with (
        torch.inference_mode(False),
        model.gradient_graph(torch.tensor([list(ids[:-1])]), layers, target_layer, **trimmed) as (sources, target),
    ):
        if not target.requires_grad:
            raise KlbError(f"{model.name}: block {target_layer} passes no gradient back; the model runs forward only here")
        result = torch.empty(len(layers), len(rows), model.d_model, dtype=_sum_dtype(target))
        done = 0
        while done < len(rows):
            some = rows[done : done + passes.size]
            means = passes.attempt(_batch_means, sources, target, some, valid, tried=len(some))
            if means is None:
                continue
            for layer, mean in enumerate(means):
                result[layer, done : done + len(some)] = mean
            done += len(some)
    if not torch.isfinite(result).all() or (result == 0).all(dim=(1, 2)).any():
        raise KlbError(f"{model.name}: a Jacobian row is all zero or not finite on {model.device} in {model.dtype}")
    return result


def _batch_means(sources: list[Tensor], target: Tensor, rows: Tensor, valid: slice) -> list[Tensor]:
    """Mean over valid source positions ``[row, d_model]`` a layer."""
    # One graph, many cotangents: same numbers as a replicated batch, a fraction of its memory.
    cotangents = torch.zeros(len(rows), *target.shape, dtype=target.dtype, device=target.device)
    cotangents[:, :, valid] = rearrange(rows, "row d -> row 1 1 d").to(target)
    grads = torch.autograd.grad(target, sources, cotangents, retain_graph=True, is_grads_batched=True, materialize_grads=True)
    return [reduce(grad[:, 0, valid].to(_sum_dtype(grad)), "row p d -> row d", "mean").cpu() for grad in grads]


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def graph_start(model: ResidualModel, ids: Sequence[int], layers: Sequence[int], *, target_layer: int, skip_first: int) -> int:
    """Where the graph may start on this model: ``skip_first`` if that leaves a gradient as it is, else 0.

    Tried with one random cotangent on one prompt, because not every architecture's cache passes gradients along.
    """
    if not skip_first:
        return 0
    rows = torch.randn(1, model.d_model, generator=torch.Generator().manual_seed(0))
    options = {"target_layer": target_layer, "skip_first": skip_first, "batch": 1}
    whole = prompt_rows(model, ids, rows, layers, **options)
    try:
        trimmed = prompt_rows(model, ids, rows, layers, **options, start=skip_first)
    except (KlbError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        log.debug("the whole prompt goes into the graph: %s", error)
        return 0
    differences = (trimmed - whole).flatten(1).norm(dim=1) / whole.flatten(1).norm(dim=1)
    return skip_first if float(differences.max()) <= _SAME_GRADIENT[model.dtype] else 0
