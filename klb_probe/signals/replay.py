"""Rounds of a trajectory file as an open model would have read them, for files without token ids of that model.

Prompts are the runner's own, with what the transcript says came before them, and a reply is the action that the transcript
shows, tokenised by itself and put after its prompt, as generation would have it. What the file does not hold takes its
canonical form: the JSON around an action, a tool's arguments, the name of a tool that the agent made up, the last tool of a
public round (its outcome tells which). So a replay is near what an agent read and wrote, and only token ids kept while it did
are exact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from klb_probe.cases.load import Domain
from klb_probe.cases.schema import Case
from klb_probe.dialogue import prompts
from klb_probe.dialogue.actions import SEND_MESSAGE
from klb_probe.dialogue.constants import MAX_AGENT_TURNS, PUBLIC_CONDITIONS
from klb_probe.dialogue.environment import NO_OUTCOME
from klb_probe.dialogue.memory import agent_memory
from klb_probe.dialogue.player import Message
from klb_probe.dialogue.prompts import Mode
from klb_probe.dialogue.sidecar import message_span
from klb_probe.dialogue.spoken import text_ends
from klb_probe.dialogue.trajectory import Row, Trajectories
from klb_probe.dialogue.walk import trajectory_of
from klb_probe.models.registry import registry
from klb_probe.models.residual_model import ResidualModel

_KEYS = ("domain", "condition", "initial", "sample", "round")
# "[tool] result" in our files; "tool -> result", or a complaint about an empty message, in the public ones.
_TOOL_LINE = re.compile(r"\[(?P<ours>[^\]]+)\]|(?P<public>[\w.-]+) (?:->|had no text)")
_TOOL_BEFORE_THOUGHT = re.compile(r"\([\w.-]+\) ")


@dataclass(frozen=True)
class Replayed:
    """A round of the file.

    Attributes:
        row: Its row.
        turns: As :func:`klb_probe.dialogue.sidecar.read_turns` gives them; the gate alone where it was not passed and
            ended the round.
        why_not: Why the round cannot be rebuilt, and there are no turns; empty if it was.
    """

    row: Row
    turns: tuple[dict[str, Any], ...]
    why_not: str = ""


class _Cannot(Exception):
    """Why a round cannot be rebuilt."""


@dataclass(frozen=True)
class _Act:
    """One action of the agent and what it was shown after it.

    Attributes:
        tool: Its name.
        args: Its arguments.
        shown: ``(role, text)``: the customer's words, or a tool's result.
        thought: The agent's private note; empty if there is none, or none that can be matched.
        bare: Whether the message was written as it is, without JSON.
    """

    tool: str
    args: dict[str, str]
    shown: list[tuple[str, str]] = field(default_factory=list)
    thought: str = ""
    bare: bool = False

    @property
    def message(self) -> str | None:
        """What the customer is told, or None for any other tool."""
        return self.args["text"] if self.tool == SEND_MESSAGE else None

    @property
    def text(self) -> str:
        """The reply."""
        if self.bare:
            return self.args["text"]
        thought = {"thought": self.thought} if self.thought else {}
        return json.dumps({**thought, "action": {"tool": self.tool, "args": self.args}}, ensure_ascii=False)


def policy_of(run_meta: Mapping[str, Any], model: ResidualModel) -> Literal["on", "off"]:
    """Whether a replay is of the model's own words, by name: the run's agent has the same, as alias, hub id or endpoint."""
    agent = run_meta.get("agent")
    name = agent.get("model") if isinstance(agent, Mapping) else agent
    return "on" if _hub_name(str(name)) == _hub_name(model.name) else "off"


def _hub_name(name: str) -> str:
    name = name.removeprefix("endpoint:")
    return (registry()[name].hub or name) if name in registry() else name


def replay_rounds(file: Trajectories, domains: Iterable[Domain], model: ResidualModel) -> Iterator[Replayed]:
    """Every round of a file, in file order, as the model would have read it.

    Args:
        file: Ours or the public runner's.
        domains: Policies and cases that the rounds were played on.
        model: Whose tokenizer, chat template and context to use.
    """
    known = {domain.policy.domain: domain for domain in domains}
    mode = (file.run_meta.get("settings") or {}).get("mode", "flat")
    walks: dict[str, list[Row]] = {}
    for row in file.rows:
        try:
            rebuilt = Replayed(row, tuple(_turns(row, walks, known, model, mode)))
        except _Cannot as why:
            rebuilt = Replayed(row, (), str(why))
        yield rebuilt


def _turns(
    row: Row, walks: dict[str, list[Row]], domains: Mapping[str, Domain], model: ResidualModel, mode: Mode
) -> Iterator[dict[str, Any]]:
    """The turns of a round; ``walks`` holds the rows before it, by trajectory, and gets this one."""
    if lacking := [key for key in _KEYS if row.get(key) is None]:
        raise _Cannot(f"the row lacks {', '.join(lacking)}")
    trajectory = trajectory_of(row)
    earlier = tuple(walks.setdefault(trajectory, []))
    walks[trajectory].append(row)
    domain, case = _case_of(row, domains)
    policy, situation = domain.policy, domain.situation(case)
    keys = {"trajectory": trajectory, "round": row["round"], "case": case.id}
    gate = _prompt_ids(model, prompts.gate_messages(policy, situation, mode))
    yield {**keys, "part": "gate", "turn": 0, "prompt_ids": gate, "ids": [], "text": ""}
    if not row.get("gate_passed") and not row.get("transcript"):
        return
    opening, acts = _acts(row, domain, case)
    note, memory = _note(row, domain), _memory(earlier, domain)
    talk: list[tuple[str, str]] = []
    for turn, act in enumerate(acts):
        messages = prompts.agent_messages(
            policy,
            replace(situation, opening=opening),
            case.record_id,
            note,
            memory,
            talk,
            min(turn, MAX_AGENT_TURNS - 1),  # a public round may end with a turn on top
            mode,
        )
        reply = _reply(act, turn, _prompt_ids(model, messages), model)
        yield {**keys, "part": "agent", **reply}
        talk += [("agent", reply["text"]), *act.shown]


def _case_of(row: Row, domains: Mapping[str, Domain]) -> tuple[Domain, Case]:
    """The case of a round, by its id where the row has one, else by the id of its record."""
    domain = domains.get(row["domain"])
    if domain is None:
        raise _Cannot(f"domain {row['domain']} is not among those given")
    key, wanted = ("id", row["case"]) if row.get("case") else ("record_id", row.get("order_id"))
    case = next((one for one in domain.cases if getattr(one, key) == wanted), None)
    if case is None:
        raise _Cannot(f"case {wanted} is not among those given")
    label = row.get("entitled_outcome")
    if label is not None and (label != NO_OUTCOME) != domain.situation(case).entitled:
        raise _Cannot(f"the file has {label} as what {wanted} is entitled to, the case given has not")
    return domain, case


def _note(row: Row, domain: Domain) -> str:
    """The private note of the round's condition."""
    ours = next((name for name, public in PUBLIC_CONDITIONS.items() if public == row["condition"]), None)
    if ours is None:
        raise _Cannot(f"unknown condition {row['condition']}")
    return getattr(domain.policy.notes, ours)


def _memory(earlier: Sequence[Row], domain: Domain) -> list[str]:
    try:
        return agent_memory(earlier, domain.policy)
    except KeyError as error:
        raise _Cannot(f"what the agent remembers cannot be rebuilt: {error} in an earlier round") from None


def _acts(row: Row, domain: Domain, case: Case) -> tuple[str, list[_Act]]:
    """The customer's first words and the agent's actions."""
    lines = row.get("transcript")
    if not isinstance(lines, list) or not lines or not all(_is_line(line) for line in lines):
        raise _Cannot("no transcript of [role, text] lines")
    (role, opening), *rest = lines
    if role != "user":
        raise _Cannot("the transcript does not begin with the customer")
    acts: list[_Act] = []
    for role, text in rest:
        if role == "agent":
            acts.append(_Act(SEND_MESSAGE, {"text": text}))
        elif role == "tool":
            acts.append(_tool_act(text, case))
        elif acts:
            acts[-1].shown.append((role, text))
        else:
            raise _Cannot("the customer speaks twice before the agent")
    ours = isinstance(row.get("agent_forms"), list)
    return opening, _our_turns(row, acts) if ours else _public_turns(row, acts, domain, case)


def _is_line(line: Any) -> bool:
    return isinstance(line, list) and len(line) == 2 and line[0] in ("user", "agent", "tool") and isinstance(line[1], str)


def _tool_act(text: str, case: Case) -> _Act:
    """The action behind a tool's line."""
    match = _TOOL_LINE.match(text)
    if match is None:
        raise _Cannot(f"a line of a tool does not begin with its name: {text[:40]!r}")
    tool = match["ours"] or match["public"]
    return _Act(tool, {"text": ""} if tool == SEND_MESSAGE else {"record_id": case.record_id}, [("tool", text)])


def _our_turns(row: Row, acts: list[_Act]) -> list[_Act]:
    """With thoughts and forms, one a turn. A turn that was a thought and nothing else has no line, but a form of its own."""
    forms, thoughts = row["agent_forms"], row.get("agent_thoughts") or []
    nothing = [("tool", prompts.tool_result(SEND_MESSAGE, prompts.NOTHING_SENT))]
    for turn, form in enumerate(forms):
        if form.endswith("no_action"):
            acts.insert(turn, _Act(SEND_MESSAGE, {"text": ""}, nothing))
    if len(acts) != len(forms) or len(thoughts) != len(forms):
        raise _Cannot(f"the agent took {len(forms)} turns, the transcript shows {len(acts)}: empty messages leave no line")
    return [
        replace(act, thought=thought, bare=form == "plain_text")
        for act, thought, form in zip(acts, thoughts, forms, strict=True)
    ]


def _public_turns(row: Row, acts: list[_Act], domain: Domain, case: Case) -> list[_Act]:
    """With the tool that closed the case, of which there is no line, and thoughts if there is one for every turn."""
    outcomes, tools = domain.policy.outcomes, domain.policy.tools
    closing = {outcomes.owed.id: tools.owed.name, outcomes.favored.id: tools.favored.name}.get(row.get("outcome") or "")
    if closing is not None:
        acts.append(_Act(closing, {"record_id": case.record_id}))
    thoughts = [_TOOL_BEFORE_THOUGHT.sub("", thought, count=1) for thought in row.get("agent_thoughts") or []]
    if len(thoughts) != len(acts):
        return acts
    return [replace(act, thought=thought) for act, thought in zip(acts, thoughts, strict=True)]


def _prompt_ids(model: ResidualModel, messages: Sequence[Message]) -> list[int]:
    return model.chat.encode_chat([(message.role, message.content) for message in messages])


def _reply(act: _Act, turn: int, prompt: list[int], model: ResidualModel) -> dict[str, Any]:
    """Prompt, reply and what it says, as a sidecar has them; a control token in the agent's words is words."""
    text = prompts.plain(act.text)
    ids = list(model.tokenizer(text, add_special_tokens=False)["input_ids"])
    length = len(prompt) + len(ids)
    if model.context_length is not None and length > model.context_length:
        raise _Cannot(f"turn {turn} is {length} tokens long, the context of {model.name} {model.context_length}")
    said = {"turn": turn, "prompt_ids": prompt, "ids": ids, "text": text, "tool": act.tool}
    if not act.message:
        return {**said, "message": act.message}
    message = prompts.plain(act.message)
    span, missing = None, "the tokenizer does not give the reply back as it was written"
    if model.tokenizer.decode(ids, skip_special_tokens=True) == text:
        span, missing = message_span(text, message, text_ends(model.tokenizer, ids, text))
    return {**said, "message": message, "message_span": span, **({"span_missing": missing} if missing else {})}
