"""One round of the protocol: gate, then agent and customer in turn until the case is closed, then the judge.

A round is a generator: it yields a :class:`~klb_probe.dialogue.player.Request` and is sent the reply, so that many rounds
can be played in lock-step by whoever drives them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from klb_probe.cases.load import Domain
from klb_probe.cases.schema import Case
from klb_probe.dialogue import prompts
from klb_probe.dialogue.actions import parse_action, spoken
from klb_probe.dialogue.constants import (
    AGENT_TEMPERATURE,
    CUSTOMER_TEMPERATURE,
    GATE_TEMPERATURE,
    MAX_AGENT_TURNS,
    MAX_CUSTOMER_LOOKUPS,
)
from klb_probe.dialogue.environment import Environment
from klb_probe.dialogue.gate import SCHEMA as GATE_SCHEMA
from klb_probe.dialogue.gate import Gate, all_passed, read_gate
from klb_probe.dialogue.judging import Verdict, ask_judge
from klb_probe.dialogue.player import Message, Part, Reply, Request, Scene
from klb_probe.dialogue.prompts import Mode
from klb_probe.dialogue.sidecar import message_span
from klb_probe.dialogue.trust import persona

Talk = Generator[Request, Reply, Any]
_CUSTOMER_TOOLS = ("reply", "check_policy", "check_account")
CUSTOMER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "action": {
            "type": "object",
            "properties": {
                "tool": {"enum": list(_CUSTOMER_TOOLS)},
                "args": {"type": "object", "properties": {"text": {"type": "string"}}, "additionalProperties": False},
            },
            "required": ["tool", "args"],
            "additionalProperties": False,
        }
    },
    "required": ["action"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Settings:
    """What is the same in all rounds of a run.

    Attributes:
        mode: Rendering of conversations.
        gate_samples: Times the gate is asked; more than once, at the agent's temperature, and all must pass.
        agent_temperature: Sampling temperature of the agent.
        agent_tokens: Most tokens of an agent's turn.
        customer_tokens: Most tokens of a customer's turn.
        gate_tokens: Most tokens of a gate's reply.
        elicit: Fork off the eligibility question before each turn of the agent and after the round, for its ids alone: one
            token is written and thrown away, and nothing of it enters the conversation. Needs a local agent.
        past_gate: Play rounds whose gate was not passed too. They stay unscored: who does not know cannot lie.
    """

    mode: Mode = "flat"
    gate_samples: int = 1
    agent_temperature: float = AGENT_TEMPERATURE
    agent_tokens: int = 400
    customer_tokens: int = 250
    gate_tokens: int = 200
    elicit: bool = False
    past_gate: bool = False


@dataclass(frozen=True)
class Place:
    """Where a round stands: its trajectory's name, its number from 0, and what came before."""

    trajectory: str
    round: int
    condition: str
    trust: float
    agent_memory: tuple[str, ...] = ()
    customer_memory: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The round's own name."""
        return f"{self.trajectory}/{self.round}"


@dataclass
class Played:
    """What happened in a round; filled as it goes, so that an error leaves what came before it.

    Attributes:
        gate: The knowledge gate's outcome; empty if a provider failed before there was one.
        gate_replies: The agent's own words, one a sample.
        transcript: ``(role, text)``; role one of user, agent, tool.
        thoughts: The agent's private thoughts, one a turn.
        forms: How each turn of the agent was read (see :class:`~klb_probe.dialogue.actions.Action`).
        outcome: Id of the outcome, ``none`` if the case was not closed.
        customer_forms: How each reply of the customer was read; ``silent`` where it held no words.
        policy_view: What the customer's look-ups of the policy showed.
        verdict: The judge on the whole round.
        first_verdict: The judge on the agent's first message alone; None if the agent wrote none.
        error: A provider's failure, which ended the round.
        turns: Sidecar records: ids of each gate reply and agent turn as they happened.
    """

    gate: Gate | str = ""
    gate_replies: list[str] = field(default_factory=list)
    transcript: list[tuple[str, str]] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    forms: list[str] = field(default_factory=list)
    outcome: str = "none"
    customer_forms: list[str] = field(default_factory=list)
    policy_view: str = ""
    verdict: Verdict | None = None
    first_verdict: Verdict | None = None
    error: str = ""
    turns: list[dict[str, Any]] = field(default_factory=list)

    @property
    def said(self) -> list[str]:
        """The agent's messages."""
        return [text for role, text in self.transcript if role == "agent"]


class _PartFailed(Exception):
    """A provider could not answer for a part; the round ends here."""


def play_round(domain: Domain, case: Case, place: Place, settings: Settings) -> Generator[Request, Reply, Played]:
    """Play one round."""
    table = _Table(domain, case, place, settings)
    try:
        yield from table.gate()
        if table.played.gate == "passed" or settings.past_gate:
            yield from table.negotiation()
            yield from table.judgement()
    except _PartFailed as failure:
        table.played.error = str(failure)
    return table.played


class _Table:
    """One round under way."""

    def __init__(self, domain: Domain, case: Case, place: Place, settings: Settings) -> None:
        self.domain, self.case, self.place, self.settings = domain, case, place, settings
        self.policy = domain.policy
        self.situation = domain.situation(case)
        self.played = Played()
        self.scene = Scene(domain, case, place.condition, persona=persona(place.trust))
        self.looked_up: list[str] = []
        # What each side has seen since the opening, in its own order of roles.
        self.agent_turns: list[tuple[str, str]] = []
        self.customer_turns: list[tuple[str, str]] = []

    def gate(self) -> Talk:
        """Ask what the agent knows, away from any incentive."""
        messages = prompts.gate_messages(self.policy, self.situation, self.settings.mode)
        samples = self.settings.gate_samples
        temperature = GATE_TEMPERATURE if samples == 1 else self.settings.agent_temperature
        for sample in range(samples):
            reply = yield from self._ask("gate", messages, temperature, self.settings.gate_tokens, self.scene, GATE_SCHEMA)
            self.played.gate_replies.append(reply.text)
            self._keep_ids("gate", sample, reply)
        gates = [read_gate(text, self.situation.entitled) for text in self.played.gate_replies]
        self.played.gate = all_passed(gates)

    def negotiation(self) -> Talk:
        """Agent and customer, until the case is closed or the turns are used up."""
        self.played.transcript.append(("user", self.situation.opening))
        environment = Environment(self.policy, self.situation, self.case.record_id)
        for turn in range(MAX_AGENT_TURNS):
            last = turn == MAX_AGENT_TURNS - 1
            yield from self._elicit(turn)
            messages = self._agent_messages(turn)
            scene = dataclasses.replace(self._scene(), turn=turn, last_turn=last)
            temperature, tokens = self.settings.agent_temperature, self.settings.agent_tokens
            reply = yield from self._ask("agent", messages, temperature, tokens, scene)
            action = parse_action(reply.text)
            self.played.thoughts.append(action.thought)
            self.played.forms.append(action.how)
            self._keep_ids("agent", turn, reply, tool=action.tool, **_message_fields(reply, action.message))
            self.agent_turns.append(("agent", reply.text))
            if action.message:
                self.played.transcript.append(("agent", action.message))
                self.customer_turns.append(("agent", action.message))
                if not last:
                    yield from self._customer()
                continue
            if action.message == "":
                self.agent_turns.append(("tool", prompts.tool_result(action.tool, prompts.NOTHING_SENT)))
                continue
            effect = environment.apply(action)
            shown = prompts.tool_result(environment.name_of(action), effect.result)
            self.played.transcript.append(("tool", shown))
            self.agent_turns.append(("tool", shown))
            self.played.outcome = environment.outcome
            if effect.closed:
                break
        yield from self._elicit(len(self.played.forms))

    def _agent_messages(self, turn: int, *, elicit: bool = False) -> tuple[Message, ...]:
        return prompts.agent_messages(
            self.policy,
            self.situation,
            self.case.record_id,
            getattr(self.policy.notes, self.place.condition),
            self.place.agent_memory,
            self.agent_turns,
            turn,
            self.settings.mode,
            elicit=elicit,
        )

    def _elicit(self, turn: int) -> Talk:
        """The forked question, read for its ids."""
        if self.settings.elicit:
            messages = self._agent_messages(turn, elicit=True)
            name = f"{self.place.name}/elicited"
            reply = yield Request("elicited", messages, name, name, 0.0, 1, self._scene())
            if reply.error is None:  # a question that could not be read ends nothing: it is not there, that is all
                self._keep_ids("elicited", turn, reply)

    def _customer(self) -> Talk:
        """The customer's turn: up to two look-ups, then a reply."""
        for lookup in range(MAX_CUSTOMER_LOOKUPS + 1):
            may = lookup < MAX_CUSTOMER_LOOKUPS
            messages = prompts.customer_messages(
                self.policy,
                self.situation,
                self.place.trust,
                self.place.customer_memory,
                self.customer_turns,
                may,
                self.settings.mode,
            )
            tokens = self.settings.customer_tokens
            reply = yield from self._ask("customer", messages, CUSTOMER_TEMPERATURE, tokens, self._scene(), CUSTOMER_SCHEMA)
            action = parse_action(reply.text)
            self.customer_turns.append(("user", reply.text))
            if not (may and action.tool in ("check_policy", "check_account")):
                break
            if action.tool == "check_policy":
                shown = self.played.policy_view = prompts.policy_text(self.policy)
            else:
                shown = prompts.record_text(self.policy, self.situation.record)
            self.looked_up.append(action.tool)
            self.customer_turns.append(("tool", shown))
        words = spoken(action)
        self.played.customer_forms.append(action.how if words else "silent")
        words = words or "..."
        self.played.transcript.append(("user", words))
        self.agent_turns.append(("user", words))

    def judgement(self) -> Talk:
        """The whole round, then the agent's first message alone, before anyone could object."""
        self.played.verdict = yield from self._judge(self.played.transcript, first=False)
        if self.played.verdict.error:
            raise _PartFailed(f"judge: {self.played.verdict.error}")
        if self.played.said:
            end = next(number for number, (role, _) in enumerate(self.played.transcript) if role == "agent") + 1
            first = yield from self._judge(self.played.transcript[:end], first=True)
            self.played.first_verdict = first

    def _judge(self, transcript: list[tuple[str, str]], *, first: bool) -> Generator[Request, Reply, Verdict]:
        def prompt(again: tuple[str, str] | None) -> Any:
            return prompts.judge_messages(
                self.policy,
                self.situation,
                transcript,
                policy_view=bool(self.played.policy_view) and not first,
                first_message_only=first,
                mode=self.settings.mode,
                again=again,
            )

        # The judge's scene carries no condition: nothing that grades may know it.
        scene = dataclasses.replace(
            self.scene, condition="", persona="", transcript=tuple(transcript), first_message_only=first
        )
        name = f"{self.place.name}/judge{'-first' * first}"
        said = [text for role, text in transcript if role == "agent"]
        return (yield from ask_judge(prompt, said, scene, name, name))

    def _scene(self) -> Scene:
        return dataclasses.replace(self.scene, transcript=tuple(self.played.transcript), looked_up=tuple(self.looked_up))

    def _ask(
        self, part: Part, messages: Any, temperature: float, tokens: int, scene: Scene, schema: dict[str, Any] | None = None
    ) -> Generator[Request, Reply, Reply]:
        name = f"{self.place.name}/{part}"
        reply = yield Request(part, messages, name, name, temperature, tokens, scene, schema)
        if reply.error is not None:
            raise _PartFailed(f"{part}: {reply.error}")
        return reply

    def _keep_ids(self, part: str, turn: int, reply: Reply, **more: Any) -> None:
        if reply.ids or reply.prompt_ids:
            record = {"part": part, "turn": turn, "prompt_ids": reply.prompt_ids, "ids": reply.ids, "text": reply.text}
            self.played.turns.append({**record, **more})


def _message_fields(reply: Reply, message: str | None) -> dict[str, Any]:
    """A message and where its words stand among the generated ids, for the sidecar."""
    if not message:
        return {"message": message}
    span, missing = message_span(reply.text, message, reply.ends)
    return {"message": message, "message_span": span, **({"span_missing": missing} if missing else {})}
