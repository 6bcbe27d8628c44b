"""Where in a round the residual stream is read: named moments of its stored token ids.

=============  ==========================================================================================
gate           the last prompt token of the knowledge gate, from which its answer is predicted
before_reply   the last prompt token before each message of the agent
reply_mean     all tokens of the agent's message; the margin is their mean
reply_last     the last token of the agent's message
claim          the tokens of the judge's ``false_claim_quote``, in the message that holds it; the mean
action         the last prompt token before the tool that closed the case
elicited       the last prompt token of a question forked off before a message, and after the round
=============  ==========================================================================================

The first six are a *trace*: nothing was asked for them. They are never pooled with each other or with the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from klb_probe.dialogue.environment import NO_OUTCOME
from klb_probe.dialogue.sidecar import message_span
from klb_probe.dialogue.spoken import text_ends

Kind = Literal["gate", "before_reply", "reply_mean", "reply_last", "claim", "action", "elicited"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Spot:
    """One moment: of which turn, and which positions of the turn's ids (prompt, then reply)."""

    turn: int
    kind: Kind
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Unmapped:
    """A moment that should be there and could not be found, and why."""

    turn: int
    kind: Kind
    why: str


def spots_of_round(
    turns: Sequence[Mapping[str, Any]], row: Mapping[str, Any], closing_tools: Iterable[str], tokenizer: Any
) -> Iterator[tuple[Mapping[str, Any], list[Spot], list[Unmapped]]]:
    """Every turn of a round with its moments; arguments as of :func:`spots_of`."""
    last = max((turn["turn"] for turn in turns if turn["part"] == "agent"), default=None)
    closed = row.get("outcome") not in (None, NO_OUTCOME)
    for turn in turns:
        tools = closing_tools if closed and turn["turn"] == last else ()  # an attempt that was refused closes nothing
        yield turn, *spots_of(turn, row, tools, tokenizer)


def spots_of(
    turn: Mapping[str, Any], row: Mapping[str, Any], closing_tools: Iterable[str], tokenizer: Any
) -> tuple[list[Spot], list[Unmapped]]:
    """The moments of one sidecar turn.

    Args:
        turn: A turn as :func:`klb_probe.dialogue.sidecar.read_turns` gives it.
        row: The round's row, for the judge's quote.
        closing_tools: Names of the tools that close a case; none where this turn did not close it.
        tokenizer: Of the model whose ids they are.
    """
    number, prompt, ids = turn["turn"], turn["prompt_ids"], turn["ids"]
    last = len(prompt) - 1
    if turn["part"] == "gate":
        return [Spot(number, "gate", (last,))], []
    if turn["part"] == "elicited":
        return [Spot(number, "elicited", (last,))], []
    if not turn.get("message"):
        return ([Spot(number, "action", (last,))] if turn.get("tool") in set(closing_tools) else []), []
    spots, unmapped = [Spot(number, "before_reply", (last,))], []
    span = turn.get("message_span")
    if span is None:
        why = turn.get("span_missing", "the sidecar has no span")
        return spots, [Unmapped(number, kind, why) for kind in ("reply_mean", "reply_last")]
    reply = range(len(prompt) + span[0], len(prompt) + span[1])
    spots += [Spot(number, "reply_mean", tuple(reply)), Spot(number, "reply_last", (reply[-1],))]
    quote = str((row.get("facts") or {}).get("false_claim_quote") or "")
    if quote and quote in turn["message"]:
        ends = text_ends(tokenizer, ids, turn["text"])
        before = ends[span[0] - 1] if span[0] else 0  # the message alone: a thought may hold the same words
        message = turn["text"][before : ends[span[1] - 1]]
        claimed, why = message_span(message, quote, [end - before for end in ends])
        if claimed is None:
            unmapped.append(Unmapped(number, "claim", why))
        else:
            spots.append(Spot(number, "claim", tuple(range(len(prompt) + claimed[0], len(prompt) + claimed[1]))))
    return spots, unmapped


def unplaced_claim(row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> Unmapped | None:
    """A quote of the judge that stands word for word in no single message of the round (it may be joined or re-spaced)."""
    quote = str((row.get("facts") or {}).get("false_claim_quote") or "")
    if not quote or any(quote in (turn.get("message") or "") for turn in turns):
        return None
    return Unmapped(-1, "claim", "the quote is word for word in no single message")
