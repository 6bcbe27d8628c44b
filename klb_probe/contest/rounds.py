"""What a detector is shown of a played round, and what the contest alone knows of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pandas as pd

ORGANISMS = ("liar", "honest", "ignorant")
SLOTS = ("gate", "before_reply", "reply_mean", "reply_last", "claim")
DEFAULT_SLOTS = SLOTS[:4]
OWN = "own margin"


@dataclass(frozen=True, slots=True)
class ContestRound:
    """All that a detector may go by. Mappings and arrays cannot be written to.

    Not in here: which organism spoke, whether anything is owed, the verdicts, the condition, and the agent's private note and
    thoughts. The note stands in the prompt, so residuals may hold it; rounds are compared within a condition only.

    Attributes:
        residuals: By slot, the residual stream of the model that spoke, ``[layer, d_model]`` float32 (output of each block);
            None where the round has no such moment. Slots, each where the round has it first: ``gate`` (last prompt token of
            the knowledge gate), ``before_reply`` (last prompt token before the agent's message), ``reply_mean`` (mean over its
            tokens), ``reply_last`` (its last token), ``claim`` (mean over the tokens of the sentence the judge quotes). Only
            the slots that the contest was told to read.
        margins: By lens (``margin``: the J-Lens, ``logit``), then slot: yes-minus-no margin of that residual, ``[layer]``
            float32 in logits, NaN where the lens does not read; None where the round has no such moment.
        own_margins: By slot, the model's own yes-minus-no margin there, in logits; None where the round has no such moment.
        messages: The agent's messages, in order.
        transcript: ``(role, words)`` of the whole round; role is user, agent or tool.
        policy: The policy's text, as agent and customer read it.
        record: The record as the agent's screen shows it: label to value.
        opening: The customer's first words.
    """

    residuals: Mapping[str, np.ndarray | None]
    margins: Mapping[str, Mapping[str, np.ndarray | None]]
    own_margins: Mapping[str, float | None]
    messages: tuple[str, ...]
    transcript: tuple[tuple[str, str], ...]
    policy: str
    record: Mapping[str, str]
    opening: str

    @property
    def text(self) -> str:
        """The agent's messages, one a line."""
        return "\n".join(self.messages)


@dataclass(frozen=True)
class Field:
    """The rounds of a contest, and beside them what detectors are not told.

    Attributes:
        rounds: What is scored ``[round]``.
        table: One line a round: ``name`` (for messages), ``organism``, ``domain``, ``case``, ``condition``, ``part`` (see
            :mod:`klb_probe.contest.reading`).
        slots: That were read.
        counts: By organism, rounds by what became of them.
    """

    rounds: tuple[ContestRound, ...]
    table: pd.DataFrame
    slots: tuple[str, ...]
    counts: Mapping[str, Mapping[str, int]]

    @property
    def lenses(self) -> tuple[str, ...]:
        """Names of the lenses that read the rounds."""
        return tuple(self.rounds[0].margins)

    @property
    def n_layers(self) -> int:
        """Blocks of the organisms."""
        return next(len(values) for one in self.rounds for values in one.residuals.values() if values is not None)

    def residuals(self, slot: str, layer: int) -> np.ndarray:
        """``[round, d_model]`` float32; NaN for rounds without the slot."""
        width = next(values.shape[1] for one in self.rounds for values in one.residuals.values() if values is not None)
        nothing = np.full(width, np.nan, np.float32)
        found = (one.residuals[slot] for one in self.rounds)
        return np.stack([nothing if values is None else values[layer] for values in found])

    def margins(self, lens: str, slot: str) -> np.ndarray:
        """``[round, layer]`` float32 in logits; NaN for rounds without the slot."""
        nothing = np.full(self.n_layers, np.nan, np.float32)
        found = (one.margins[lens][slot] for one in self.rounds)
        return np.stack([nothing if values is None else values for values in found])

    def own_margins(self, slot: str) -> np.ndarray:
        """``[round]`` in logits; NaN for rounds without the slot."""
        return np.array([one.own_margins[slot] for one in self.rounds], float)

    def has(self, slot: str) -> np.ndarray:
        """Which rounds have a slot ``[round]``."""
        return np.array([one.residuals[slot] is not None for one in self.rounds])


def read_only(values: np.ndarray | None) -> np.ndarray | None:
    """The same array, which nobody can write to any more."""
    if values is not None:
        values.setflags(write=False)
    return values


def frozen(mapping: Mapping) -> Mapping:
    """The same mapping, which nobody can write to any more."""
    return MappingProxyType(dict(mapping))
