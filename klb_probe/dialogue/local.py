"""An open-weight model in this process as a player: conversations answered in lock-step, nothing read twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from klb_probe.dialogue.constraint import Constraints
from klb_probe.dialogue.player import Reply, Request
from klb_probe.dialogue.prefixes import KeptPrefixes
from klb_probe.dialogue.sampling import Streams
from klb_probe.dialogue.spoken import ObjectEnd, Pieces, text_ends, without_thought
from klb_probe.dialogue.writing import Row, write
from klb_probe.models.batch_size import is_out_of_memory
from klb_probe.models.residual_model import ResidualModel

# Parts whose reply is one JSON object and nothing after it.
JSON_PARTS = ("gate", "agent", "judge")
# Parts that can be held to a schema; the agent is under test and always writes freely.
CONSTRAINED_PARTS = ("gate", "customer", "judge")


@dataclass(frozen=True)
class _Turn:
    """A request as the model gets it.

    Attributes:
        request: The request.
        prompt: Its ids.
        seed: Of the reply's random numbers.
    """

    request: Request
    prompt: list[int]
    seed: int


class LocalPlayer:
    """A :class:`~klb_probe.dialogue.player.Player` over a model in this process.

    Each prompt is rendered once. The keys and values of what was read stay in memory, and a prompt is read from where it
    departs from all of them: a conversation's next turn, or a new conversation under the same policy. Replies are written
    in lock-step, each with random numbers of its own, so that a transcript depends on the batch by float noise at most.
    A model with recurrent layers can be neither cut nor padded: it reads every prompt whole, one at a time.

    Args:
        model: The model.
        batch_size: Most replies written at once; halved when the device runs out of memory.
        seed: With a request's stream, decides all that is random.
        constrain: Hold gate, customer and judge to their schemas.
        max_kept_tokens: Most tokens whose keys and values are kept between turns.

    Raises:
        KlbError: ``constrain`` without the library it needs.
    """

    def __init__(
        self,
        model: ResidualModel,
        *,
        batch_size: int = 8,
        seed: int = 0,
        constrain: bool = False,
        max_kept_tokens: int = 32_768,
    ) -> None:
        self.model = model
        self.name = model.name
        self.batch_size = batch_size
        self._size = batch_size if model.keeps_every_position() else 1
        self._prefixes = KeptPrefixes(max_kept_tokens) if model.keeps_every_position() else None
        self._streams = Streams(seed)
        self._constraints = Constraints(model) if constrain else None

    def record(self) -> dict[str, Any]:
        """Model and settings; not the batch size, which may change when a run is continued."""
        thinking = self.model.chat.thinking.how
        return {
            "kind": "local",
            "model": self.model.identity,
            "fingerprint": self.model.fingerprint,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.model.device),
            **({} if self.model.backend == "huggingface" else {"backend": self.model.backend}),
            "chat": self.model.chat.style,
            **({} if thinking == "none" else {"thinking": thinking}),
            "seed": self._streams.seed,
            "constrain": self._constraints is not None,
            "cache": "prefixes kept, rows stacked" if self._prefixes else "none: recurrent layers, read whole, row by row",
        }

    def reply(self, requests: Sequence[Request]) -> list[Reply]:
        """One reply a request, in order; a prompt that fills the model's context is that reply's error."""
        turns = [self._turn(request) for request in requests]
        replies = {index: error for index, turn in enumerate(turns) if (error := self._overflow(turn))}
        waiting = [index for index in range(len(turns)) if index not in replies]
        while waiting:
            batch = waiting[: self._size]
            crowded = self._prefixes is not None and self._prefixes.tokens > 0
            rows = self._write([turns[index] for index in batch])
            if rows:
                replies |= {index: self._reply(turns[index], row) for index, row in zip(batch, rows, strict=True)}
                waiting = waiting[len(batch) :]
                continue
            if self._prefixes:
                self._prefixes.clear()
            if self._size == 1 and not crowded:
                index, prompt = waiting.pop(0), turns[batch[0]].prompt
                replies[index] = Reply("", f"out of memory on {self.model.device} with a prompt of {len(prompt)} tokens alone")
            self._size = max(1, self._size // 2)
        return [replies[index] for index in range(len(turns))]

    def forget(self, conversation: str) -> None:
        """Free the keys and values of a conversation."""
        if self._prefixes:
            self._prefixes.forget(conversation)

    def _turn(self, request: Request) -> _Turn:
        prompt = self.model.chat.encode_chat([(message.role, message.content) for message in request.messages])
        return _Turn(request, prompt, self._streams.next_seed(request.stream))

    def _overflow(self, turn: _Turn) -> Reply | None:
        context = self.model.context_length
        if context is None or len(turn.prompt) < context:
            return None
        return Reply("", f"a prompt of {len(turn.prompt)} tokens, but the context of {self.model.name} is {context}")

    def _write(self, turns: list[_Turn]) -> list[Row]:
        """Write the replies; no row at all if memory ran out, and everything the attempt held is free again."""
        rows = [self._row(turn) for turn in turns]
        try:
            write(self.model, rows, self._prefixes)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return []
        return rows

    def _row(self, turn: _Turn) -> Row:
        request, room = turn.request, turn.request.max_tokens
        if self.model.context_length is not None:
            room = min(room, self.model.context_length - len(turn.prompt))
        constraint = None
        if self._constraints and request.schema and request.part in CONSTRAINED_PARTS:
            constraint = self._constraints.of(request.schema)
        return Row(
            request.conversation,
            turn.prompt,
            room,
            request.temperature,
            torch.Generator().manual_seed(turn.seed),
            Pieces(self.model.tokenizer),
            ObjectEnd() if request.part in JSON_PARTS else None,
            constraint,
        )

    def _reply(self, turn: _Turn, row: Row) -> Reply:
        text = self.model.tokenizer.decode(row.ids, skip_special_tokens=True)
        said = without_thought(text)
        return Reply(
            said,
            prompt_ids=tuple(turn.prompt),
            ids=tuple(row.ids),
            ends=text_ends(self.model.tokenizer, row.ids, said),
            prompt_tokens=len(turn.prompt),
            completion_tokens=len(row.ids),
        )
