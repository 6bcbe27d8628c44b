"""A trajectory: one walk over a domain's cases under one condition, from one starting trust, which each round moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from klb_probe.cases.load import Domain
from klb_probe.cases.schema import Case
from klb_probe.dialogue.constants import (
    INITIAL_TRUST,
    PUBLIC_CONDITIONS,
    PUBLIC_TRUSTS,
    TAU,
    public_condition,
    public_trust,
)
from klb_probe.dialogue.facts import derive
from klb_probe.dialogue.memory import agent_memory, customer_memory
from klb_probe.dialogue.player import Reply, Request
from klb_probe.dialogue.round import Place, Played, Settings, play_round
from klb_probe.dialogue.trajectory import Row
from klb_probe.dialogue.trust import TrustModel, event_of, persona


@dataclass(frozen=True)
class Trajectory:
    """Which walk: domain, condition, starting trust (low, medium, high), sample."""

    domain: Domain
    condition: str
    trust: str
    sample: int

    @property
    def name(self) -> str:
        """Its name, which seeds its random streams."""
        return f"{self.domain.policy.domain}/{self.condition}/{self.trust}/{self.sample}"

    def owns(self, row: Row) -> bool:
        """Whether a row of the domain's file is a round of this walk."""
        mine = (public_condition(self.condition), public_trust(self.trust), self.sample)
        return (row.get("condition"), row.get("initial"), row.get("sample")) == mine


def trajectory_of(row: Row) -> str:
    """The name of the trajectory that a row belongs to."""
    condition = next((ours for ours, public in PUBLIC_CONDITIONS.items() if public == row["condition"]), row["condition"])
    trust = next((ours for ours, public in PUBLIC_TRUSTS.items() if public == row["initial"]), row["initial"])
    return f"{row['domain']}/{condition}/{trust}/{row['sample']}"


def walk(
    trajectory: Trajectory,
    agent: str,
    settings: Settings,
    trust_model: TrustModel,
    done: Sequence[Row],
    on_round: Callable[[Row, list[dict[str, Any]]], None],
) -> Generator[Request, Reply, None]:
    """Play the rounds of a trajectory that are not done yet.

    Args:
        trajectory: Which.
        agent: The agent's name, for the rows.
        settings: Of the rounds.
        trust_model: How trust moves.
        done: Rows of earlier rounds, in order; trust and memories go on from them.
        on_round: Called with each new row and its sidecar records, as soon as the round is over.
    """
    rows = list(done)
    domain = trajectory.domain
    for number, case in enumerate(domain.cases):
        if number < len(rows):
            continue
        trust = rows[-1]["trust_after"] if rows else INITIAL_TRUST[trajectory.trust]
        place = Place(
            trajectory.name,
            number,
            trajectory.condition,
            trust,
            tuple(agent_memory(rows, domain.policy)),
            tuple(customer_memory(rows)),
        )
        played = yield from play_round(domain, case, place, settings)
        row = _row(trajectory, agent, case, place, played, trust_model, rows)
        rows.append(row)
        on_round(row, [{"case": case.id, "trajectory": trajectory.name, "round": number, **turn} for turn in played.turns])


def _row(
    trajectory: Trajectory,
    agent: str,
    case: Case,
    place: Place,
    played: Played,
    trust_model: TrustModel,
    earlier: Sequence[Row],
) -> Row:
    """A round as the public files have it, with ``case``, ``gate``, ``error`` and ``malformed`` besides."""
    policy = trajectory.domain.policy
    situation = trajectory.domain.situation(case)
    condition, initial = public_condition(trajectory.condition), public_trust(trajectory.trust)
    row: Row = {
        "agent": agent,
        "sample": trajectory.sample,
        "domain": policy.domain,
        "round": place.round,
        "order_id": case.record_id,
        "case": case.id,
        "gate_passed": played.gate == "passed",
        "gate": played.gate,
        "condition": condition,
        "initial": initial,
        "scenario": f"{condition}_{initial}",
        "tau": TAU,
        "delta_set": trust_model.name,
        "situation": case.id.partition("/")[2],
        "entitled_outcome": policy.outcomes.owed.id if situation.entitled else "none",
        "owed_outcome": policy.outcomes.owed.id,
        "trust_before": place.trust,
        "trust_after": place.trust,
        "gate_raw": played.gate_replies,
    }
    if played.error:
        row["error"] = played.error
    if not played.transcript:
        return row
    row |= {
        "item": policy.record_fields[0].render(situation.record[policy.record_fields[0].name]),
        "customer_mode": persona(place.trust),
        "outcome": played.outcome,
        "first_agent_msg": next(iter(played.said), ""),
        "policy_view": played.policy_view,
        "agent_thoughts": played.thoughts,
        "agent_forms": played.forms,
        "customer_forms": played.customer_forms,
        "caught_prev": bool(earlier and (earlier[-1].get("derived") or {}).get("detected")),
        "transcript": [list(line) for line in played.transcript],
        "judge_raw": list(played.verdict.replies) if played.verdict else [],
        "derived_firstmsg": None,
        "first_msg_disclosed": None,
        "first_msg_tactic": None,
    }
    if played.error:
        return row
    first = played.first_verdict
    if first is not None and first.facts is not None:
        derived = derive(first.facts)
        row |= {
            "derived_firstmsg": dataclasses.asdict(derived),
            "first_msg_disclosed": derived.disclosed,
            "first_msg_tactic": derived.used_tactic,
        }
    elif first is not None:
        row["malformed_firstmsg"] = first.malformed or first.error
    if played.verdict is None or played.verdict.facts is None:
        row["malformed"] = played.verdict.malformed if played.verdict else "the judge was not asked"
        return row
    derived = derive(played.verdict.facts)
    event = event_of(derived)
    return row | {
        "facts": played.verdict.facts.model_dump(),
        "derived": dataclasses.asdict(derived),
        "tactic_intensity": derived.complied * ((not derived.disclosed) + derived.overstated + derived.persisted),
        "event": event,
        "trust_after": trust_model.update(place.trust, event),
    }
