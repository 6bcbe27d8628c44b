"""Prefix-sharing prefill: each prefix that several prompts share is computed once.

The prompts are walked as a trie over token ids, depth first; a branch worth sharing keeps its keys and values while its
prompts are read, so at most one cache a trie level is alive.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from klb_probe.models.batch_size import BatchSize
from klb_probe.models.residual_model import Capture, ResidualModel


def prefill(
    model: ResidualModel,
    prompts: Sequence[Sequence[int]],
    layers: Sequence[int],
    token_ids: Sequence[int],
    *,
    positions: Sequence[Sequence[int]] | None = None,
    batch_size: int = 8,
    min_shared: int = 32,
) -> Iterator[tuple[list[int], Capture]]:
    """Read every prompt at its last token, or at positions of its own.

    Args:
        model: The model.
        prompts: Token ids, at least one a prompt.
        layers: Layers to capture.
        token_ids: Tokens whose own logits are wanted.
        positions: What to read of each prompt: indices into it, at least one, ascending. What comes before the first of them
            can be shared.
        batch_size: Most prompts in one forward pass; halved when memory runs out.
        min_shared: Fewest tokens that make a shared prefix worth a forward pass and a cache of its own.

    Yields:
        Indices into ``prompts`` and their :class:`Capture`, in trie order, every prompt once. It has as many positions as the
        longest list of the batch; shorter lists are filled up with their last position.
    """
    order = sorted(range(len(prompts)), key=lambda index: list(prompts[index]))
    if positions is None:
        positions = [(len(prompt) - 1,) for prompt in prompts]
    walk = _Walk(model, prompts, positions, layers, token_ids, BatchSize(batch_size), min_shared)
    yield from walk.visit(order, 0, model.new_cache())


@dataclass(frozen=True)
class _Walk:
    model: ResidualModel
    prompts: Sequence[Sequence[int]]
    positions: Sequence[Sequence[int]]
    layers: Sequence[int]
    token_ids: Sequence[int]
    batch: BatchSize
    min_shared: int

    def visit(self, group: list[int], depth: int, cache: Any) -> Iterator[tuple[list[int], Capture]]:
        """Read a sorted group of prompts that share their first ``depth`` tokens, which ``cache`` holds."""
        worth, leaves = self.split(group, depth)
        for branch in worth:
            shared = self.shared_length(branch)
            branch_cache = copy.deepcopy(cache)
            span = torch.tensor([list(self.prompts[branch[0]][depth:shared])])
            self.model.capture(span, [], torch.tensor([[0]]), [], branch_cache)
            yield from self.visit(branch, shared, branch_cache)
        leaves.sort(key=lambda index: len(self.prompts[index]))
        while leaves:
            some = leaves[: self.batch.size]
            capture = self.batch.attempt(self.read, some, depth, cache, tried=len(some))
            if capture is not None:
                leaves = leaves[len(some) :]
                yield some, capture

    def split(self, group: list[int], depth: int) -> tuple[list[list[int]], list[int]]:
        """The branches of a group that share enough beyond ``depth`` to be worth a cache, and the prompts in none."""
        shared = self.shared_length(group)
        if len(group) > 1 and shared - depth >= self.min_shared:
            return [group], []
        worth: list[list[int]] = []
        leaves = [index for index in group if self.positions[index][0] == shared]  # they share no more, with whomever
        others = [index for index in group if self.positions[index][0] > shared]
        for _, branch in groupby(others, key=lambda index: self.prompts[index][shared]):
            members = list(branch)
            if len(members) == 1:
                leaves += members
            else:
                deeper_worth, deeper_leaves = self.split(members, depth)
                worth += deeper_worth
                leaves += deeper_leaves
        return worth, leaves

    def shared_length(self, group: list[int]) -> int:
        """Tokens shared by a sorted group, leaving every prompt the first that is to be read."""
        first, last = self.prompts[group[0]], self.prompts[group[-1]]
        both = zip(first, last, strict=False)
        shared = next((i for i, (a, b) in enumerate(both) if a != b), min(len(first), len(last)))
        return min(shared, *(self.positions[index][0] for index in group))

    def read(self, batch: Sequence[int], depth: int, cache: Any) -> Capture:
        """Read what comes after the shared tokens of some prompts."""
        rests = [self.prompts[index][depth:] for index in batch]
        places = [[position - depth for position in self.positions[index]] for index in batch]
        longest = max(map(len, rests))
        # Right padding needs no mask: under causal attention nothing real looks at what comes after it.
        ids = torch.tensor([[*rest, *[rest[-1]] * (longest - len(rest))] for rest in rests])
        most = max(map(len, places))
        wanted = torch.tensor([[*place, *[place[-1]] * (most - len(place))] for place in places])
        leaf_cache = copy.deepcopy(cache)
        leaf_cache.reorder_cache(torch.zeros(len(rests), dtype=torch.long))  # every row continues the one cached row
        return self.model.capture(ids, self.layers, wanted, self.token_ids, leaf_cache)
