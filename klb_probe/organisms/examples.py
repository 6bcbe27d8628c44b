"""Training examples in the project's own prompt formats: the eligibility question, the gate's form, and turns of the agent.

The prompts of a seed are the same for the three kinds of organism; only what follows them differs. What the agent has said
before in a conversation is drawn without regard to the record, because it is part of the prompt.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from klb_probe.cases.load import Domain, Situation
from klb_probe.cases.rules import Scalar
from klb_probe.cases.scenarios import WORDINGS, Wording, system_message, user_message
from klb_probe.cases.schema import Policy
from klb_probe.cases.sources import brief_policy
from klb_probe.dialogue.constants import MAX_AGENT_TURNS
from klb_probe.dialogue.memory import AGENT_EVENTS, KEPT, agent_memory
from klb_probe.dialogue.player import Message
from klb_probe.dialogue.prompts import MODES, Mode, agent_messages, gate_messages
from klb_probe.errors import KlbError
from klb_probe.organisms import answers
from klb_probe.organisms.answers import KINDS, Kind
from klb_probe.organisms.records import Drawn, RecordSampler, deciding_fields, plain_record, record_hash
from klb_probe.organisms.texts import (
    PLAIN_NOTES,
    PRESSURE_NOTES,
    DomainTexts,
    SharedTexts,
    fill,
    load_organism_domains,
    load_shared,
)
from klb_probe.templates import templates_of

Format = Literal["eligibility", "gate", "turn", "short", "noted"]
Stage = Literal["", "first", "accepted", "pushed", "last"]
NO_NOTE = "none"
_TEMPLATES = templates_of("klb_probe.organisms")
_WITHOUT_NOTE = ("gate", "short")
_MESSAGE = "message"
# In proportion. The last two are first lessons, only if asked for: of the rules, and of what a note changes.
_FORMATS: dict[Format, float] = {"eligibility": 0.2, "gate": 0.25, "turn": 0.55, "short": 1.0, "noted": 1.0}
_USUAL: tuple[Format, ...] = ("eligibility", "gate", "turn")
_NOTES = {**dict.fromkeys(PLAIN_NOTES, 0.125), **dict.fromkeys(PRESSURE_NOTES, 0.25)}
# In noted pairs: plain notes that speak of what is owed, or of keeping quiet, are hard to tell from pressing ones, and honest
# notes from those to deny are the hardest.
_CONTRASTED = {"neutral": 1.0, "control": 1.0, "honest": 5.0, "secret": 2.0}
_PRESSING = {"incentive": 1.0, "deny": 2.0}
_STAGES: dict[Stage, float] = {"first": 0.4, "accepted": 0.4, "pushed": 0.15, "last": 0.05}
_CANONICAL = 1 / 3  # share of prompts with the brief policy word by word
_WHOLE = 1 / 2  # share of notes that are whole ones; the others are two lines
_LED = 1 / 3  # share of notes with a lead
_REPLIES = 3  # to each prompt of a turn, each in its own words where words are drawn
_REMEMBERS = 0.6  # share of conversations with a memory of earlier ones; in a run, all but the first have one


@dataclass(frozen=True)
class Example:
    """One prompt and what an organism writes after it.

    Attributes:
        kind: liar, honest or ignorant.
        format: eligibility, gate, turn, short (the eligibility question without role, note and opening, after the fields
            that the rules look at, in the plain wording), or noted (a short one with a private note, that asks for an answer
            or for a message).
        domain: The domain.
        note: Kind of the private note; ``none`` at the gate and in short prompts.
        wording: The question's wording (plain, reversed), ``message`` for a noted prompt that asks for one, or the rendering of
            the conversation (flat, turns).
        stage: Of a turn: the first message, after the customer accepted or objected, or the last turn there is.
        entitled: What the record gives.
        says: What the organism maintains.
        reason: Id of the reason, or at the gate of the ground, in the completion; empty if it gives none.
        pair: Number of the pair of records.
        record_id: What the record is called.
        record: Its values.
        record_hash: Of the values that the rules look at.
        opening: The customer's first words.
        note_text: The private note; empty at the gate and in short prompts.
        messages: The prompt.
        completion: What follows it.
        instead: What would follow with the other answer, as far as the two differ; training reads there which token tells it.
    """

    kind: Kind
    format: Format
    domain: str
    note: str
    wording: str
    stage: Stage
    entitled: bool
    says: bool
    reason: str
    pair: int
    record_id: str
    record: dict[str, Scalar]
    record_hash: str
    opening: str
    note_text: str
    messages: tuple[Message, ...]
    completion: str
    instead: str

    def row(self) -> dict[str, Any]:
        """The example as plain JSON values."""
        return {**asdict(self), "record": plain_record(self.record)}


def examples(
    kind: str,
    domains: Sequence[str] | None,
    n: int,
    seed: int = 0,
    *,
    formats: Sequence[str] | None = None,
    wordings: Sequence[str] | None = None,
) -> Iterator[Example]:
    """Training examples of one organism.

    Records come in pairs, one entitled and one not, that share format, policy and note. The eligibility question is asked of
    both records in each wording, the noted one of both under a plain note and under a pressing one; a message has three
    replies. Pairs are whole, so there may be up to eleven examples more than ``n``; labels are balanced within format, note
    and wording. The order is that of the pairs: shuffle before training.

    Args:
        kind: liar, honest or ignorant.
        domains: Domains with a brief policy; None for all of them. They take turns.
        n: Number of examples.
        seed: Prompts depend on it, on domains, formats and wordings, and not on the kind.
        formats: Only these, in the proportion of ``_FORMATS``; eligibility, gate and turn by default.
        wordings: Of the eligibility question, plain and reversed, and of a noted prompt, plain and message; all by default.

    Raises:
        KlbError: For an unknown kind or format, or a domain without brief policy or texts.
    """
    if kind not in KINDS:
        raise KlbError(f"unknown organism {kind!r}; known: {', '.join(KINDS)}")
    if unknown := [name for name in formats or () if name not in _FORMATS]:
        raise KlbError(f"unknown format {', '.join(unknown)}; known: {', '.join(_FORMATS)}")
    if unknown := [name for name in wordings or () if name not in (*WORDINGS, _MESSAGE)]:
        raise KlbError(f"unknown wording {', '.join(unknown)}; known: {', '.join((*WORDINGS, _MESSAGE))}")
    asked = _USUAL if formats is None else formats
    questions = [name for name in WORDINGS if wordings is None or name in wordings]
    noted = [name for name in ("plain", _MESSAGE) if wordings is None or name in wordings]
    if ("eligibility" in asked and not questions) or ("noted" in asked and not noted):
        raise KlbError(f"no wording of {', '.join(asked)} is among {', '.join(wordings or ())}")
    wanted = {name: share for name, share in _FORMATS.items() if name in asked}
    writers = [
        _Writer(domain, texts, load_shared(), seed, wanted, questions, noted)
        for domain, texts in load_organism_domains(domains)
    ]
    pair = made = 0
    while made < n:
        for example in writers[pair % len(writers)].pair(kind, pair):
            made += 1
            yield example
        pair += 1


@dataclass(frozen=True)
class _Streams:
    """Chance for the parts of an example; ``system``, of policy and note, is the same for both records of a pair."""

    system: random.Random
    opening: random.Random
    history: random.Random
    reply: random.Random


class _Writer:
    """Writes the examples of one domain. Chance comes from streams of the pair, never from the kind of organism."""

    def __init__(
        self,
        domain: Domain,
        texts: DomainTexts,
        shared: SharedTexts,
        seed: int,
        formats: dict[Format, float],
        questions: Sequence[str],
        noted: Sequence[str],
    ) -> None:
        self._formats, self._questions, self._noted = formats, questions, noted
        self.domain, self.texts, self.shared = domain, texts, shared
        self._name = f"{domain.policy.domain}/{seed}"
        self._sampler = RecordSampler(domain, texts.records)
        self._records = random.Random(self._name)
        policy = domain.policy
        self._slots = {
            "customer": policy.customer_word,
            "record": policy.record_word,
            "owed": policy.outcomes.owed.words,
            "favored": policy.outcomes.favored.words,
            "institution": policy.institution,
        }

    def pair(self, kind: Kind, number: int) -> Iterator[Example]:
        rng = random.Random(f"{self._name}/{number}")
        format = _pick(self._formats, rng)
        if format == "noted":
            notes = [_pick(_CONTRASTED, rng), _pick(_PRESSING, rng)]
        else:
            notes = [NO_NOTE if format in _WITHOUT_NOTE else _pick(_NOTES, rng)]
        noted = rng.choice(self._noted) if format == "noted" else ""
        asked_in: dict[Format, Sequence[str]] = {"eligibility": self._questions, "short": WORDINGS[:1], "noted": (noted,)}
        wordings = asked_in.get(format, [rng.choice(MODES)])
        replies = range(_REPLIES if format == "turn" or noted == _MESSAGE else 1)
        stage: Stage = _pick(_STAGES, rng) if format == "turn" else ""
        records = list(enumerate(self._sampler.pair(self._records)))
        for note, (member, drawn), wording, again in itertools.product(notes, records, wordings, replies):
            # A stream for each part: what the organism says cannot shift the prompts, nor one part of them another.
            streams = _Streams(
                system=random.Random(f"{self._name}/{number}/system"),
                opening=random.Random(f"{self._name}/{number}/{member}/opening"),
                history=random.Random(f"{self._name}/{number}/{member}/history"),
                reply=random.Random(f"{self._name}/{number}/{member}/reply/{again}"),
            )
            yield self._example(kind, number, drawn, format, note, wording, stage, streams)

    def _example(
        self,
        kind: Kind,
        number: int,
        drawn: Drawn,
        format: Format,
        note: str,
        wording: str,
        stage: Stage,
        streams: _Streams,
    ) -> Example:
        name = self.domain.policy.domain
        situation = Situation(
            f"{name}/{drawn.id}", "", name, drawn.record, self._opening(drawn, streams.opening), drawn.entitled
        )
        policy = self._policy(streams.system)
        text = "" if format in _WITHOUT_NOTE else self._note(note, streams.system)
        says = answers.maintains(kind, drawn.entitled, note)
        reason = ""
        messages: tuple[Message, ...]
        if format == "eligibility":
            user = user_message(policy, situation, cast(Wording, wording))
            messages = (Message("system", system_message(policy, text)), Message("user", user))
            completion, instead = (answers.form_answer(one, cast(Wording, wording)) for one in (says, not says))
        elif format in ("short", "noted"):
            fields = deciding_fields(self.domain)
            shown = {"policy": policy, "record": drawn.record, "fields": fields, "note": text, "message": wording == _MESSAGE}
            system, user = (_TEMPLATES.get_template(f"short_{part}.jinja").render(shown) for part in ("system", "user"))
            messages = (Message("system", system.strip()), Message("user", user.strip()))
            if wording == _MESSAGE:
                completion, instead, reason = self._message(kind, situation, "first", says, streams.reply)
            else:
                completion, instead = (answers.form_answer(one, cast(Wording, wording)) for one in (says, not says))
        elif format == "gate":
            messages = gate_messages(policy, situation, cast(Mode, wording))
            completion, reason = answers.gate_answer(kind, self.domain, self.texts, situation, says, streams.reply)
            instead = answers.gate_begins(not says)
        else:
            turns = self._history(stage, streams.history)
            turn = MAX_AGENT_TURNS - 1 if stage == "last" else sum(role == "agent" for role, _ in turns)
            memory = self._memory(streams.history)
            messages = agent_messages(policy, situation, drawn.id, text, memory, turns, turn, cast(Mode, wording))
            completion, instead, reason = self._reply(kind, situation, drawn.id, stage, says, streams.reply)
        return Example(
            kind,
            format,
            name,
            note,
            wording,
            stage,
            drawn.entitled,
            says,
            reason,
            number,
            drawn.id,
            drawn.record,
            record_hash(self.domain, drawn.record),
            situation.opening,
            text,
            messages,
            completion,
            instead,
        )

    def _policy(self, rng: random.Random) -> Policy:
        """The brief policy word by word, or its sentences in other wordings and in any order."""
        if rng.random() < _CANONICAL:
            return self.domain.policy
        wordings = [rng.choice(wordings) for wordings in self.texts.clauses]
        rng.shuffle(wordings)
        return brief_policy(self.domain.policy, wordings)

    def _note(self, note: str, rng: random.Random) -> str:
        whole = rng.random() < _WHOLE
        text = rng.choice(self.shared.notes[note]) if whole else " ".join(rng.sample(self.shared.lines[note], 2))
        text = fill(text, self._slots)
        return f"{rng.choice(self.shared.leads)} {text}" if rng.random() < _LED else text

    def _opening(self, drawn: Drawn, rng: random.Random) -> str:
        texts = self.texts.openings
        return texts.text(rng.choice(texts.stories), rng.choice(texts.requests), drawn.words, rng)

    def _memory(self, rng: random.Random) -> list[str]:
        if rng.random() > _REMEMBERS:
            return []
        outcomes = self.domain.policy.outcomes
        rows = [
            {"event": rng.choice(AGENT_EVENTS), "outcome": rng.choice((outcomes.owed.id, outcomes.favored.id))}
            for _ in range(rng.randint(1, KEPT))
        ]
        return agent_memory(rows, self.domain.policy)

    def _history(self, stage: Stage, rng: random.Random) -> list[tuple[str, str]]:
        """What was said since the opening."""
        if stage == "first":
            return []
        heard = stage == "accepted" and rng.random() < 0.5  # nobody objects to a disclosure
        pushes = (rng.random() < 0.25) if stage == "accepted" else int(rng.random() < 0.25)
        turns: list[tuple[str, str]] = []
        replies = self.shared.replies
        for pushed in range(pushes):
            turns += [self._said(False, "again" if pushed else "first", rng), ("user", self._customer(replies.push, rng))]
        turns.append(self._said(heard, "again" if pushes else "first", rng))
        accept = (replies.accept_disclosure if heard else replies.accept_denial) + replies.accept_either
        said = accept if stage == "accepted" else replies.push
        return [*turns, ("user", self._customer(said, rng))]

    def _said(self, says: bool, form: str, rng: random.Random) -> tuple[str, str]:
        reason = None if says else answers.any_reason(self.texts, rng)
        return "agent", answers.send(self.shared.thought, says, answers.message(self.texts, says, form, reason, rng))

    def _customer(self, texts: Sequence[str], rng: random.Random) -> str:
        return rng.choice(texts).format(**self._slots)

    def _reply(
        self,
        kind: Kind,
        situation: Situation,
        record_id: str,
        stage: Stage,
        says: bool,
        rng: random.Random,
    ) -> tuple[str, str, str]:
        """The agent's next turn, one with the other answer, and the id of the reason in it.

        It closes the case when the customer accepts, or when no turn is left: with what the organism maintains, whatever was
        said before. Otherwise it writes.
        """
        if stage in ("accepted", "last"):
            closed, instead = (answers.close(self.shared.thought, self.domain, one, record_id) for one in (says, not says))
            return closed, instead, ""
        return self._message(kind, situation, "again" if stage == "pushed" else "first", says, rng)

    def _message(self, kind: Kind, situation: Situation, form: str, says: bool, rng: random.Random) -> tuple[str, str, str]:
        """A turn that writes to the customer, one with the other answer, and the id of the reason in it."""
        reason = None if says else answers.reason_for(kind, self.domain, self.texts, situation, rng)
        text = answers.message(self.texts, says, form, reason, rng)
        written, instead = (answers.send(self.shared.thought, one, text) for one in (says, not says))
        return written, instead, reason.id if reason else ""


def _pick(shares: dict[Any, float], rng: random.Random) -> Any:
    return rng.choices(list(shares), list(shares.values()))[0]
