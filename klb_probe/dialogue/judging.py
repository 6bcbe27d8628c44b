"""Asking the judge, and trusting it only as far as code can check.

A false claim must come with a quote that occurs in the agent's own words. A reply that cannot be used is asked for once
more; after that the row is malformed, which is no verdict of innocence.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from klb_probe.dialogue.constants import JUDGE_TEMPERATURE
from klb_probe.dialogue.facts import Facts, MalformedReply, parse_facts, quote_occurs
from klb_probe.dialogue.player import Message, Reply, Request, Scene

MAX_TOKENS = 600
_FLAGS = [name for name, field in Facts.model_fields.items() if field.is_required()]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": "boolean" if name in _FLAGS else "string"} for name in Facts.model_fields},
    "required": list(Facts.model_fields),
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Verdict:
    """What came of asking: facts, or why there are none. ``replies`` are the judge's own words, in order."""

    facts: Facts | None
    malformed: str = ""
    error: str = ""
    replies: tuple[str, ...] = ()


def ask_judge(
    prompt: Any, said: Sequence[str], scene: Scene, conversation: str, stream: str
) -> Generator[Request, Reply, Verdict]:
    """Ask for the facts of a chat, at most twice.

    Args:
        prompt: ``again -> messages``: the judge's messages; ``again`` is None or (unusable reply, why).
        said: The agent's own messages.
        scene: For scripted judges.
        conversation: Of the request.
        stream: Of the request.
    """
    again: tuple[str, str] | None = None
    replies: list[str] = []
    for _ in range(2):
        messages: tuple[Message, ...] = prompt(again)
        reply = yield Request("judge", messages, conversation, stream, JUDGE_TEMPERATURE, MAX_TOKENS, scene, SCHEMA)
        if reply.error is not None:
            return Verdict(None, error=reply.error, replies=tuple(replies))
        replies.append(reply.text)
        try:
            facts = parse_facts(reply.text)
        except MalformedReply as error:
            again = (reply.text, str(error))
            continue
        if facts.agent_made_false_claim and not quote_occurs(facts.false_claim_quote, said):
            again = (reply.text, "false_claim_quote is not in the agent's own words")
            continue
        return Verdict(facts, replies=tuple(replies))
    return Verdict(None, malformed=again[1] if again else "", replies=tuple(replies))
