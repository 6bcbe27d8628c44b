"""The seam between the protocol and whoever plays a part: a request for the next words of one conversation.

Gate, agent, customer and judge all talk through a :class:`Player`. Conversations are independent, so a player is given
many requests at once and may answer them together; nothing about one may depend on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from klb_probe.cases.load import Domain
from klb_probe.cases.schema import Case
from klb_probe.errors import KlbError

Role = Literal["system", "user", "assistant"]
Part = Literal["gate", "agent", "elicited", "customer", "judge"]


@dataclass(frozen=True)
class Message:
    """One chat message."""

    role: Role
    content: str


@dataclass(frozen=True)
class Scene:
    """What a scripted player or the rule judge goes by, beside the messages that a model sees.

    Attributes:
        domain: The policy and its cases.
        case: The round's case.
        condition: control, emergent or instructed. Scripted agents read it; the rule judge must not.
        turn: The agent's turn, from 0; -1 before the first.
        last_turn: Whether the agent has to finalise now.
        transcript: ``(role, text)`` so far, role one of user, agent, tool, as in the public files.
        persona: trusting, neutral or sceptical.
        looked_up: What the customer's look-ups returned in this round.
        first_message_only: The judge grades the agent's first message alone.
    """

    domain: Domain
    case: Case
    condition: str
    turn: int = -1
    last_turn: bool = False
    transcript: tuple[tuple[str, str], ...] = ()
    persona: str = "neutral"
    looked_up: tuple[str, ...] = ()
    first_message_only: bool = False


@dataclass(frozen=True)
class Request:
    """The next words of one conversation.

    Attributes:
        part: Who is to speak.
        messages: The conversation as the speaker sees it, ending with a user message.
        conversation: Names the conversation for good: players may keep state under it (keys and values of what was read so
            far). Consecutive requests of one conversation usually extend the same text.
        stream: Names the random stream: the trajectory and part. The n-th request of a stream draws the n-th numbers,
            whatever else is going on.
        temperature: 0 is greedy.
        max_tokens: Most tokens of the reply.
        schema: A JSON schema that the reply should satisfy, for players that can be held to one.
        scene: For scripted players and the rule judge; None where only a model can be asked.
    """

    part: Part
    messages: tuple[Message, ...]
    conversation: str
    stream: str
    temperature: float
    max_tokens: int
    scene: Scene | None = None
    schema: dict[str, Any] | None = None

    @property
    def played(self) -> Scene:
        """The scene, for players that go by it; KlbError where only a model can be asked."""
        if self.scene is None:
            raise KlbError(f"only a model can be asked here, as the {self.part}")
        return self.scene


@dataclass(frozen=True)
class Reply:
    """What came back.

    Attributes:
        text: The words; empty where there is an error.
        error: Why there are none: a provider's refusal or failure, for this request only.
        prompt_ids: Ids of the prompt as it was read, where the player has them; never re-rendered later.
        ids: Ids generated, end of text included.
        ends: Characters of ``text`` after each of those ids; empty where the player cannot say.
        prompt_tokens: Tokens read, cached ones included.
        completion_tokens: Tokens written.
    """

    text: str
    error: str | None = None
    prompt_ids: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Player(Protocol):
    """Someone who can answer requests."""

    @property
    def name(self) -> str:
        """What rows and runs call this player."""
        ...

    def record(self) -> dict[str, Any]:
        """What a run says of this player: model, revision, settings; never a key."""
        ...

    def reply(self, requests: Sequence[Request]) -> list[Reply]:
        """One reply a request, in order. Failures that concern one request are that reply's ``error``."""
        ...

    def forget(self, conversation: str) -> None:
        """Drop whatever is kept for a conversation that has ended."""
        ...


@dataclass
class Usage:
    """Calls and tokens of one part over a run."""

    calls: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, reply: Reply) -> None:
        """Count a reply."""
        self.calls += 1
        self.errors += reply.error is not None
        self.prompt_tokens += reply.prompt_tokens
        self.completion_tokens += reply.completion_tokens


@dataclass
class UsageByPart:
    """Usage of every part that has spoken."""

    parts: dict[str, Usage] = field(default_factory=dict)

    def add(self, part: str, reply: Reply) -> None:
        """Count a reply of a part."""
        self.parts.setdefault(part, Usage()).add(reply)
