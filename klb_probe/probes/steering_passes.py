"""Forward passes of changed models: the change made at the last prompt token only, or at every token.

At the last token a change costs one token: what comes before it is read once a prompt, and the changes are rows of a batch.
At every token each change costs the whole prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor

from klb_probe.dialogue.prefixes import KeptPrefixes
from klb_probe.models.key_values import KeyValues
from klb_probe.models.prefix import prefill
from klb_probe.models.residual_model import ResidualModel, chunks

AT_ANSWER, AT_ALL = "answer", "all"
PLACES = {AT_ANSWER: "at the last prompt token", AT_ALL: "at every token"}

Change = Callable[[Tensor], Tensor]
# What is done with the numbers of the changes and of the prompts just read, one of them a single number, and their logits.
Keep = Callable[[Sequence[int], Sequence[int], Tensor], None]


def at_last_position(change: Change) -> Change:
    """The change at the last position of residuals ``[batch, sequence, d]``: in generation, of each token as it is read."""
    return lambda residual: torch.cat([residual[:, :-1], change(residual[:, -1:])], dim=1)


def each_row(changes: Sequence[Change]) -> Change:
    """A change of its own for each row of residuals ``[row, sequence, d]``."""
    return lambda residual: torch.cat([change(row) for change, row in zip(changes, residual.split(1), strict=True)])


def read_changed(
    model: ResidualModel,
    ids: Sequence[Sequence[int]],
    layer: int,
    changes: Sequence[Change],
    keep: Keep,
    *,
    at: str,
    batch_size: int,
) -> None:
    """The logits after every prompt under every change.

    Args:
        model: The model.
        ids: Prompts of at least two tokens. What they share at their start is read once (at every token: once a change).
        layer: The block whose output is changed.
        changes: What changes it.
        keep: Called with the numbers of changes, of prompts, and their logits ``[row, vocab]`` (float32), each once: several
            changes of one prompt (at the last token) or several prompts under one change.
        at: ``answer``, the last prompt token, or ``all``.
        batch_size: Most rows in one forward pass: changes of a prompt, each with a copy of its keys and values, or prompts.
    """
    if at == AT_ANSWER:
        _at_answer(model, ids, layer, changes, keep, batch_size)
    else:
        _at_all(model, ids, layer, changes, keep, batch_size)


def _at_all(
    model: ResidualModel,
    ids: Sequence[Sequence[int]],
    layer: int,
    changes: Sequence[Change],
    keep: Keep,
    batch_size: int,
) -> None:
    for number, change in enumerate(changes):
        with model.intervening(layer, change):
            for prompts, capture in prefill(model, ids, [], range(model.vocab_size), batch_size=batch_size):
                keep([number], prompts, capture.logits[:, 0])


def _at_answer(
    model: ResidualModel,
    ids: Sequence[Sequence[int]],
    layer: int,
    changes: Sequence[Change],
    keep: Keep,
    batch_size: int,
) -> None:
    kept = KeptPrefixes(max(map(len, ids))) if model.keeps_every_position() else None
    vocabulary = range(model.vocab_size)
    # Sorted, a prompt shares with the one before it all that it shares with any before: one is enough to keep.
    for prompt in sorted(range(len(ids)), key=lambda index: list(ids[index])):
        *before, last = ids[prompt]
        cache, start = (model.new_cache(), 0) if kept is None else kept.start(before)
        model.capture(torch.tensor([before[start:]]), [], torch.tensor([[0]]), [], cache)
        if kept is None:
            copies = _one_by_one(cache, len(changes))
        else:
            held = KeyValues.of(cache)
            kept.keep("last", before, held)
            copies = _in_batches(held, len(changes), batch_size)
        for numbers, rows in copies:
            tokens, first = torch.full((len(numbers), 1), last), torch.zeros(len(numbers), 1, dtype=torch.long)
            with model.intervening(layer, each_row([changes[number] for number in numbers])):
                capture = model.capture(tokens, [], first, vocabulary, rows)
            keep(numbers, [prompt], capture.logits[:, 0])


def _in_batches(before: KeyValues, n: int, batch_size: int) -> Iterator[tuple[Sequence[int], Any]]:
    """Numbers of rows, and a cache with a copy for each of them, to read one token with."""
    size = ceil(n / ceil(n / batch_size))  # as even as can be: a smaller batch needs copies of its own
    rows = before.cache(len(before), size)
    for numbers in chunks(range(n), size):
        if len(numbers) < size:
            rows = before.cache(len(before), len(numbers))
        yield numbers, rows
        rows.crop(-1)  # the copies are good for the next batch


def _one_by_one(cache: Any, n: int) -> Iterator[tuple[Sequence[int], Any]]:
    """The same for a cache that can be neither stacked nor cut."""
    for number in range(n):
        yield [number], copy.deepcopy(cache)
