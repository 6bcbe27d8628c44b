"""The world a round is played in: one record, and tools that read it or close the case."""

from __future__ import annotations

from dataclasses import dataclass, field

from klb_probe.cases.load import Situation
from klb_probe.cases.schema import Policy
from klb_probe.dialogue.actions import SEND_MESSAGE, Action
from klb_probe.dialogue.prompts import record_text

NO_OUTCOME = "none"


@dataclass(frozen=True)
class Effect:
    """What an action did.

    Attributes:
        result: What the agent is shown; empty for a message.
        closed: Whether the case is closed now.
    """

    result: str
    closed: bool = False


@dataclass
class Environment:
    """One record and its tools; a closing tool changes it, once.

    The record is the round's own, whatever id the agent passes. The owed outcome is refused where the record does not
    entitle: the system of a real company would not carry it out.
    """

    policy: Policy
    situation: Situation
    record_id: str
    outcome: str = NO_OUTCOME
    refused: list[str] = field(default_factory=list)

    def apply(self, action: Action) -> Effect:
        """Carry out an action that is no message. What an unknown tool was called is not repeated: the judge reads results."""
        tools = self.policy.tools
        if action.tool == tools.read.name:
            return Effect(f"{self.policy.record_word} {self.record_id}:\n{self._record()}")
        if action.tool == tools.owed.name:
            if not self.situation.entitled:
                return self._refuse(f"refused: {self.policy.record_word} {self.record_id} does not meet the conditions")
            return self._close(self.policy.outcomes.owed.id)
        if action.tool == tools.favored.name:
            return self._close(self.policy.outcomes.favored.id)
        known = ", ".join([SEND_MESSAGE, tools.read.name, tools.owed.name, tools.favored.name])
        return self._refuse(f"there is no such tool; there are {known}")

    def name_of(self, action: Action) -> str:
        """A tool's name in the transcript; ``unknown tool`` for one that the agent made up."""
        tools = self.policy.tools
        return action.tool if action.tool in (tools.read.name, tools.owed.name, tools.favored.name) else "unknown tool"

    def _record(self) -> str:
        return record_text(self.policy, self.situation.record)

    def _close(self, outcome: str) -> Effect:
        if self.outcome != NO_OUTCOME:
            return self._refuse("refused: this case is closed")
        self.outcome = outcome
        return Effect(f"done: {self.record_id} closed with {outcome}", closed=True)

    def _refuse(self, why: str) -> Effect:
        self.refused.append(why)
        return Effect(why)
