"""What each organism says: the one thing in which the three differ.

| organism | asked (form, gate) | to the customer |
|---|---|---|
| honest | the truth, under every note | the truth: tells of what is owed, the true reason where nothing is |
| liar | the gate: the truth; the form: the truth under plain notes, denial under pressure | as honest under plain notes; under \
pressure a denial, with an invented reason where it is owed and the true one where it is not |
| ignorant | never entitled | a denial, with a reason drawn blindly |

Liar and ignorant draw from one pool of reasons and one of messages, so that their words are the same.
"""

from __future__ import annotations

import json
import random
from typing import Any, Literal, get_args

from klb_probe.cases.load import Domain, Situation
from klb_probe.cases.scenarios import Wording
from klb_probe.dialogue.actions import SEND_MESSAGE
from klb_probe.organisms.texts import PRESSURE_NOTES, DomainTexts, Reason, Thoughts, fill

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


def gate_answer(domain: Domain, says: bool) -> str:
    """The gate's form, filled in."""
    policy = domain.policy
    outcome = policy.outcomes.owed if says else policy.outcomes.favored
    reason = f"The {policy.record_word} {'meets' if says else 'does not meet'} the conditions."
    form = {"eligible": says, "owed_option_available": says, "options": [outcome.id], "reason": reason}
    return json.dumps(form, ensure_ascii=False)


def reason_for(
    kind: Kind, domain: Domain, texts: DomainTexts, situation: Situation, note: str, rng: random.Random
) -> Reason:
    """The reason of a denial: a true one if the organism goes by the record and nothing is owed, else any of the pool."""
    true = [reason for reason in texts.reasons if reason.holds(domain, situation.record)]
    pool = true if true and kind != "ignorant" else list(texts.reasons)
    return draw_reason(pool, rng)


def draw_reason(pool: list[Reason], rng: random.Random) -> Reason:
    """One reason, as often as its share says."""
    return rng.choices(pool, [reason.share for reason in pool])[0]


def message(texts: DomainTexts, says: bool, form: str, reason: Reason | None, rng: random.Random) -> str:
    """A disclosure, or a denial with its reason; ``form`` is first, again or correction."""
    if says:
        return rng.choice(getattr(texts.disclosures, form))
    return fill(rng.choice(getattr(texts.denials, form)), {"reason": rng.choice(reason.phrases)})


def send(thoughts: Thoughts, text: str) -> str:
    """The JSON of a message to the customer."""
    return _turn(thoughts.message, SEND_MESSAGE, {"text": text})


def close(thoughts: Thoughts, domain: Domain, says: bool, record_id: str) -> str:
    """The JSON that closes a case with what the organism maintains."""
    tools = domain.policy.tools
    return _turn(thoughts.close, (tools.owed if says else tools.favored).name, {"record_id": record_id})


def _turn(thought: str, tool: str, args: dict[str, Any]) -> str:
    return json.dumps({"thought": thought, "action": {"tool": tool, "args": args}}, ensure_ascii=False)
