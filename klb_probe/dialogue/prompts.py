"""What each part is shown, from one Jinja template a role, in two renderings.

``flat`` is the public local runner's: policy, notes and the whole conversation in one user message a turn. ``turns`` uses the
roles of a chat: the speaker's own words are assistant turns. Both grow at their end, so that a conversation's keys and
values can be kept from turn to turn. What agent and customer wrote is neutralised: it cannot hold a model's control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

from klb_probe.cases.load import Situation
from klb_probe.cases.schema import Policy
from klb_probe.dialogue.constants import MAX_AGENT_TURNS, MAX_CUSTOMER_LOOKUPS
from klb_probe.dialogue.json_text import whole
from klb_probe.dialogue.player import Message, Role
from klb_probe.dialogue.trust import insists_at_first, persona, verify_urge
from klb_probe.templates import templates_of

Mode = Literal["flat", "turns"]
MODES: tuple[str, ...] = get_args(Mode)
NOTHING_SENT = "nothing was sent: the message was empty"

_TEMPLATES = templates_of("klb_probe.dialogue")
# <|im_end|>, <end_of_turn>, </s>, <｜User｜>, <<SYS>>, [INST]
_CONTROL = re.compile(r"<(?=[|/｜]?[A-Za-z_▁][\w▁ ]*[|｜]?>)|<<(?=/?SYS>>)|\[(?=/?INST\])")


def render(template: str, **words: Any) -> str:
    """A template of this package, with white space at both ends taken off."""
    return _TEMPLATES.get_template(f"{template}.jinja").render(**words).strip()


def plain(text: str) -> str:
    """Words of a party with nothing that a tokenizer could take for a control token, or could not take at all."""
    return _CONTROL.sub("‹", whole(text))


def gate_messages(policy: Policy, situation: Situation, mode: Mode) -> tuple[Message, ...]:
    """The neutral knowledge check: policy, record, the customer's words; no incentive and no one to please."""
    user = render("gate_user", policy=policy, record=situation.record, opening=plain(situation.opening))
    return _messages(render("gate_system", policy=policy), [("user", user)], mode)


def agent_messages(
    policy: Policy,
    situation: Situation,
    record_id: str,
    note: str,
    memory: Sequence[str],
    turns: Sequence[tuple[str, str]],
    turn: int,
    mode: Mode,
    *,
    elicit: bool = False,
) -> tuple[Message, ...]:
    """The agent's view.

    Args:
        policy: The policy.
        situation: The record and the customer's first words.
        record_id: What the screen calls the record.
        note: The private note of the condition.
        memory: Lines about earlier rounds.
        turns: What followed the opening: ``("agent", raw reply)``, ``("user", customer's words)``, ``("tool", result)``.
        turn: The turn to come, from 0.
        mode: flat or turns.
        elicit: Ask for the entitlement instead of the next action: the same conversation with another last line.
    """
    system = render("agent_system", policy=policy, note=note, max_turns=MAX_AGENT_TURNS)
    opening = render(
        "agent_opening",
        policy=policy,
        record=situation.record,
        case={"record_id": record_id},
        opening=plain(situation.opening),
        memory=memory,
    )
    speakers = {"agent": "You", "user": policy.customer_word.capitalize(), "tool": "System"}
    last = turn == MAX_AGENT_TURNS - 1
    ask = render("agent_next", policy=policy, turn=turn, max_turns=MAX_AGENT_TURNS, last_turn=last)
    if elicit:
        ask = render("elicit", policy=policy)
    return _messages(system, _talk(opening, turns, ask, speakers, "agent", mode), mode)


def customer_messages(
    policy: Policy,
    situation: Situation,
    trust: float,
    memory: Sequence[str],
    turns: Sequence[tuple[str, str]],
    may_look_up: bool,
    mode: Mode,
) -> tuple[Message, ...]:
    """The customer's view: never the trust number, the private note, or the agent's thoughts.

    ``turns``: ``("agent", message)``, ``("user", the customer's raw reply)``, ``("tool", what a look-up showed)``.
    """
    system = render(
        "customer_system",
        policy=policy,
        persona=getattr(policy.personas, persona(trust)),
        insists=insists_at_first(trust),
        urge=verify_urge(trust),
        memory=memory,
        max_lookups=MAX_CUSTOMER_LOOKUPS,
    )
    opening = render("customer_opening", opening=plain(situation.opening))
    ask = render("customer_next", may_look_up=may_look_up)
    speakers = {"agent": "Agent", "user": "You", "tool": "Look-up"}
    return _messages(system, _talk(opening, turns, ask, speakers, "user", mode), mode)


def judge_messages(
    policy: Policy,
    situation: Situation,
    transcript: Sequence[tuple[str, str]],
    *,
    policy_view: bool,
    first_message_only: bool,
    mode: Mode,
    again: tuple[str, str] | None = None,
) -> tuple[Message, ...]:
    """The judge's view: policy, record, what is owed, and the chat as JSON strings; never the condition or the note.

    ``again``: a reply that could not be used, and why.
    """
    system = render(
        "judge_system",
        policy=policy,
        record=situation.record,
        owed=situation.entitled,
        extracts=policy.outcomes.favored.id == "coercive_collection",
    )
    user = render(
        "judge_user",
        policy=policy,
        lines=[_data_line(role, text, policy) for role, text in transcript],
        policy_view=policy_view,
        first_message_only=first_message_only,
    )
    turns = [("user", user)]
    if again is not None:
        turns += [("assistant", plain(again[0])), ("user", render("judge_again", why=again[1]))]
    return _messages(system, turns, mode)


def policy_text(policy: Policy) -> str:
    """What a look-up of the policy shows."""
    return render("_policy", policy=policy)


def record_text(policy: Policy, record: dict[str, Any]) -> str:
    """What a look-up of the record shows."""
    return render("_record", policy=policy, record=record)


def tool_result(tool: str, result: str) -> str:
    """A tool's answer as the conversation shows it."""
    return render("tool_result", tool=tool, result=result)


def _data_line(role: str, text: str, policy: Policy) -> str:
    """One line of a chat as data: what it says stays inside a JSON string, where no bracket or quote of it ends anything."""
    speaker = {"user": policy.customer_word}.get(role, role)
    line = json.dumps({"speaker": speaker, "text": text})
    return line.replace("<", "\\u003c").replace(">", "\\u003e")


def _talk(
    opening: str, turns: Sequence[tuple[str, str]], ask: str, speakers: dict[str, str], speaker: str, mode: Mode
) -> list[tuple[str, str]]:
    """A conversation after the system text: one user message in flat mode, the speaker's own words apart in turns mode."""
    if mode == "flat":
        lines = [opening, *(f"{speakers[role]}: {plain(text)}" for role, text in turns), ask]
        return [("user", "\n\n".join(lines))]
    talk = [("user", opening)]
    for role, text in turns:
        if role == speaker:
            talk.append(("assistant", plain(text)))
        elif talk[-1][0] == "user":
            talk[-1] = ("user", f"{talk[-1][1]}\n\n{speakers[role]}: {plain(text)}")
        else:
            talk.append(("user", f"{speakers[role]}: {plain(text)}"))
    if talk[-1][0] == "user":
        talk[-1] = ("user", f"{talk[-1][1]}\n\n{ask}")
    else:
        talk.append(("user", ask))
    return talk


def _messages(system: str, talk: Sequence[tuple[str, str]], mode: Mode) -> tuple[Message, ...]:
    if mode == "turns":
        return (Message("system", system), *(Message(cast(Role, role), text) for role, text in talk))
    return (Message("user", "\n\n".join([system, *(text for _, text in talk)])),)
