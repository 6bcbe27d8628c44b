"""Prefix-sharing prefill: each prefix that several prompts share is computed once.

The prompts are walked as a trie over token ids, depth first; a branch worth sharing keeps its keys and values while its
prompts are read, so at most one cache a trie level is alive.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from klb_probe.models.residual_model import Capture, ResidualModel, chunks


def prefill(
    model: ResidualModel,
    prompts: Sequence[Sequence[int]],
    layers: Sequence[int],
    token_ids: Sequence[int],
    *,
    batch_size: int = 8,
    min_shared: int = 32,
) -> Iterator[tuple[list[int], Capture]]:
    """Read every prompt at its last token.

    Args:
        model: The model.
        prompts: Token ids, at least one a prompt.
        layers: Layers to capture.
        token_ids: Tokens whose own logits are wanted.
        batch_size: Most prompts in one forward pass.
        min_shared: Fewest tokens that make a shared prefix worth a forward pass and a cache of its own.

    Yields:
        Indices into ``prompts`` and their :class:`Capture` with one position each, in trie order, every prompt once.
    """
    order = sorted(range(len(prompts)), key=lambda index: list(prompts[index]))
    yield from _visit(model, prompts, order, 0, model.new_cache(), layers, token_ids, batch_size, min_shared)


def _visit(
    model: ResidualModel,
    prompts: Sequence[Sequence[int]],
    group: list[int],
    depth: int,
    cache: Any,
    layers: Sequence[int],
    token_ids: Sequence[int],
    batch_size: int,
    min_shared: int,
) -> Iterator[tuple[list[int], Capture]]:
    """Read a sorted group of prompts that share their first ``depth`` tokens, which ``cache`` holds."""
    shared = _shared_length(prompts, group)
    if len(group) > 1 and shared - depth >= min_shared:
        span = torch.tensor([list(prompts[group[0]][depth:shared])])
        model.capture(span, [], torch.tensor([[-1 % span.shape[1]]]), [], cache)
        depth = shared
    leaves: list[int] = []
    for _, branch in groupby(group, key=lambda index: tuple(prompts[index][depth : depth + 1])):
        members = list(branch)
        if len(members) > 1 and _shared_length(prompts, members) - depth >= min_shared:
            branch_cache = copy.deepcopy(cache)
            yield from _visit(model, prompts, members, depth, branch_cache, layers, token_ids, batch_size, min_shared)
        else:
            leaves.extend(members)
    leaves.sort(key=lambda index: len(prompts[index]))
    for batch in chunks(leaves, batch_size):
        yield list(batch), _read(model, [prompts[index][depth:] for index in batch], cache, layers, token_ids)


def _read(
    model: ResidualModel, rests: list[Sequence[int]], cache: Any, layers: Sequence[int], token_ids: Sequence[int]
) -> Capture:
    longest = max(map(len, rests))
    # Right padding needs no mask: under causal attention nothing real looks at what comes after it.
    ids = torch.tensor([[*rest, *[rest[-1]] * (longest - len(rest))] for rest in rests])
    last = torch.tensor([[len(rest) - 1] for rest in rests])
    leaf_cache = copy.deepcopy(cache)
    leaf_cache.batch_repeat_interleave(len(rests))
    return model.capture(ids, layers, last, token_ids, leaf_cache)


def _shared_length(prompts: Sequence[Sequence[int]], group: list[int]) -> int:
    """Tokens shared by a sorted group, leaving every prompt its last token to be read."""
    first, last = prompts[group[0]], prompts[group[-1]]
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return min(shared, *(len(prompts[index]) - 1 for index in group))
