"""Replies written in lock-step: prompts are read from where they depart from what is kept, then one token a row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from klb_probe.dialogue.constraint import Constraint
from klb_probe.dialogue.prefixes import KeptPrefixes
from klb_probe.dialogue.sampling import choose
from klb_probe.dialogue.spoken import ObjectEnd, Pieces
from klb_probe.models.key_values import KeyValues, Stack
from klb_probe.models.residual_model import ResidualModel


@dataclass
class Row:
    """One reply while it is written.

    Attributes:
        conversation: The name under which what was read is kept.
        prompt: Its prompt.
        max_tokens: Most ids of the reply.
        temperature: 0 is greedy.
        generator: The reply's own random numbers.
        pieces: Turns ids into text as they come.
        object_end: Ends the reply with its first JSON object, if given.
        constraint: What the reply is held to, if anything.
        ids: What is written so far.
        done: Whether that is all.
    """

    conversation: str
    prompt: Sequence[int]
    max_tokens: int
    temperature: float
    generator: torch.Generator
    pieces: Pieces
    object_end: ObjectEnd | None = None
    constraint: Constraint | None = None
    ids: list[int] = field(default_factory=list)
    done: bool = False

    def write(self, logits: Tensor, stop_ids: frozenset[int]) -> None:
        """Choose the next id from its ``logits [vocab]``."""
        if self.constraint:
            logits = self.constraint.allowed(logits)
        chosen = choose(logits, self.temperature, self.generator)
        self.ids.append(chosen)
        self.done = (
            chosen in stop_ids
            or len(self.ids) == self.max_tokens
            or (self.constraint is not None and self.constraint.satisfied_by(chosen))
            or (self.object_end is not None and self.object_end.closes_in(self.pieces.add(chosen)))
        )


def write(model: ResidualModel, rows: Sequence[Row], prefixes: KeptPrefixes | None) -> None:
    """Write the replies of all rows.

    Args:
        model: The model.
        rows: Replies to write; a single one where nothing can be kept.
        prefixes: What is kept between calls; None for models whose cache can be neither cut nor padded.
    """
    stack, logits = _begin(model, rows, prefixes)
    writing = list(rows)
    while True:
        for row, row_logits in zip(writing, logits, strict=True):
            row.write(row_logits, model.stop_ids)
        if prefixes is not None:
            for index, row in enumerate(writing):
                if row.done:  # its last id was never read
                    prefixes.keep(row.conversation, [*row.prompt, *row.ids[:-1]], stack.row(index))
        going_on = [index for index, row in enumerate(writing) if not row.done]
        if not going_on:
            return
        if len(going_on) < len(writing):
            stack.select(going_on)
            writing = [writing[index] for index in going_on]
        mask, positions = stack.mask_and_positions()
        logits = model.next_logits(torch.tensor([[row.ids[-1]] for row in writing]), stack.cache, mask, positions)


def _begin(model: ResidualModel, rows: Sequence[Row], prefixes: KeptPrefixes | None) -> tuple[Stack, Tensor]:
    """Read all prompts: what was read, stacked, and the logits ``[row, vocab]`` after it."""
    if prefixes is not None:
        read, logits = zip(*(_read(model, row, prefixes) for row in rows), strict=True)
        return Stack.of(read), torch.cat(logits)
    (row,) = rows
    stack = Stack(model.new_cache(), torch.zeros(1, dtype=torch.long))
    return stack, model.next_logits(torch.tensor([row.prompt]), stack.cache)


def _read(model: ResidualModel, row: Row, prefixes: KeptPrefixes) -> tuple[KeyValues, Tensor]:
    """Keys and values of a prompt and the logits ``[1, vocab]`` after it; kept at once, for rows that start the same way."""
    cache, held = prefixes.start(row.prompt)
    logits = model.next_logits(torch.tensor([row.prompt[held:]]), cache)
    keys_and_values = KeyValues.of(cache)
    prefixes.keep(row.conversation, row.prompt, keys_and_values)
    return keys_and_values, logits
