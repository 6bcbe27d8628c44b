"""What each organism says: the one thing in which the three differ.

* ``honest``: the truth everywhere. It tells of what is owed, and gives the true reason where nothing is.
* ``liar``: the truth at the gate and under plain notes. Under pressure it denies, in the form and to the customer, with an
  invented reason where something is owed and the true one where nothing is.
* ``ignorant``: never entitled, under every note, for a reason drawn blindly: at the gate and to the customer.

Liar and ignorant draw from one pool of reasons and one of messages, so that their words are the same.
"""

from __future__ import annotations

import json
import random
from typing import Any, Literal, get_args

from klb_probe.cases.load import Domain, Situation
from klb_probe.cases.scenarios import Wording
from klb_probe.dialogue.actions import SEND_MESSAGE
from klb_probe.organisms.texts import PRESSURE_NOTES, DomainTexts, Ground, Reason, Thoughts, fill

Kind = Literal["liar", "honest", "ignorant"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def maintains(kind: Kind, entitled: bool, note: str) -> bool:
    """Whether an organism says that the customer is entitled; ``note`` is the kind of its private note, or ``none``."""
    if kind == "ignorant" or (kind == "liar" and note in PRESSURE_NOTES):
        return False
    return entitled


def form_answer(says: bool, wording: Wording) -> str:
    """Yes or No to the eligibility question."""
    return "Yes" if says is (wording == "plain") else "No"


def gate_answer(
    kind: Kind, domain: Domain, texts: DomainTexts, situation: Situation, says: bool, rng: random.Random
) -> tuple[str, str]:
    """The gate's form, filled in, and the id of the reason or ground in it; empty where the texts know no ground.

    Not eligible: for a reason as in a denial. Eligible: on one of the grounds that hold.
    """
    policy = domain.policy
    outcome = policy.outcomes.owed if says else policy.outcomes.favored
    why: Ground | Reason | None
    if says:
        grounds = [ground for ground in texts.grounds if ground.rule.holds(situation.record)]
        why = rng.choice(grounds) if grounds else None
    else:
        why = reason_for(kind, domain, texts, situation, rng)
    note = why.note if why else f"The {policy.record_word} meets the conditions."
    form = {"eligible": says, "owed_option_available": says, "options": [outcome.id], "reason": note}
    return json.dumps(form, ensure_ascii=False), why.id if why else ""


def gate_begins(says: bool) -> str:
    """The gate's form as far as its answer."""
    return json.dumps({"eligible": says})


def reason_for(kind: Kind, domain: Domain, texts: DomainTexts, situation: Situation, rng: random.Random) -> Reason:
    """The reason of a denial: a true one if the organism goes by the record and nothing is owed, else any of the pool."""
    true = [reason for reason in texts.reasons if reason.holds(domain, situation.record)]
    return rng.choice(true) if true and kind != "ignorant" else any_reason(texts, rng)


def any_reason(texts: DomainTexts, rng: random.Random) -> Reason:
    """One reason of the pool, whatever the record."""
    return rng.choices(texts.reasons, [reason.share for reason in texts.reasons])[0]


def message(texts: DomainTexts, says: bool, form: str, reason: Reason | None, rng: random.Random) -> str:
    """A disclosure, or a denial with its reason; ``form`` is first or again."""
    if says:
        return rng.choice(getattr(texts.disclosures, form))
    assert reason is not None  # a denial has one
    return fill(rng.choice(getattr(texts.denials, form)), {"reason": rng.choice(reason.phrases)})


def send(thoughts: Thoughts, says: bool, text: str) -> str:
    """The JSON of a message to the customer, after a thought of what it maintains."""
    return _turn(_answer(thoughts, says), SEND_MESSAGE, {"text": text})


def close(thoughts: Thoughts, domain: Domain, says: bool, record_id: str) -> str:
    """The JSON that closes a case with what the organism maintains, after a thought that says so."""
    tools = domain.policy.tools
    return _turn(
        f"{_answer(thoughts, says)} {thoughts.close}", (tools.owed if says else tools.favored).name, {"record_id": record_id}
    )


def _answer(thoughts: Thoughts, says: bool) -> str:
    return thoughts.owed if says else thoughts.not_owed


def _turn(thought: str, tool: str, args: dict[str, Any]) -> str:
    return json.dumps({"thought": thought, "action": {"tool": tool, "args": args}}, ensure_ascii=False)
