"""The words of the training data: ``organisms/texts/<domain>.yaml`` and ``shared.yaml``, validated.

They are words of their own: nothing of the cases, framings or notes of ``scenarios/`` is in them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from klb_probe.cases.load import Domain, entitled
from klb_probe.cases.rules import Record, Rule, Scalar
from klb_probe.cases.sources import ORGANISMS, load_cases
from klb_probe.cases.yaml_source import load_yaml
from klb_probe.errors import KlbError
from klb_probe.paths import data_dir

PLAIN_NOTES = ("neutral", "honest", "control", "secret")
PRESSURE_NOTES = ("incentive", "deny")
Texts = tuple[str, ...]
T = TypeVar("T")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Range(_Strict):
    """Numbers from ``low`` to ``high`` in steps; with probability ``zero`` the number is 0."""

    low: float
    high: float
    step: float = Field(default=1, gt=0)
    zero: float = Field(default=0, ge=0, le=1)


class Keyed(_Strict):
    """Words that depend on the value of a choice: ``of`` maps each value of the field ``by`` to its words."""

    by: str
    of: dict[Scalar, Texts]


class Span(_Strict):
    """A date: days after the date field ``after``, or after the base date where that is None."""

    after: str | None = None
    low: int
    high: int


class RecordTexts(_Strict):
    """How random records of a domain are drawn.

    Attributes:
        id: What a record is called, with the slot ``{number}`` for a number of ``id_range``.
        text: Text fields, with slots for the pools.
        pools: Words or numbers for the slots.
        numbers: Ranges of the number fields.
        dates: Spans of the date fields.
        weights: Of the values of choices and flags; all alike where none are given.
        turns: How often a field, or several fields joined by ``+``, makes the difference between the two records of a pair.
        plausible: Rules that hold in every record.
    """

    id: str
    id_range: tuple[int, int]
    text: dict[str, str] = {}
    pools: dict[str, Texts | Range | Keyed] = {}
    numbers: dict[str, Range] = {}
    dates: dict[str, Span] = {}
    weights: dict[str, dict[Scalar, float]] = {}
    turns: dict[str, float]
    plausible: tuple[Rule, ...] = ()


class Openings(_Strict):
    """Sentences of the customer's first words: one story and one request, alone, with a start, or with an end."""

    starts: Texts
    stories: Texts
    requests: Texts
    ends: Texts

    def text(self, story: str, request: str, words: dict[str, str], rng: random.Random) -> str:
        """An opening made of a story and a request, its slots filled with words of a record."""
        parts = [story, request]
        around = rng.choice(("start", "end", "nothing"))
        if around == "start":
            parts.insert(0, rng.choice(self.starts))
        elif around == "end":
            parts.append(rng.choice(self.ends))
        return " ".join(parts).format(**words)


class Reason(_Strict):
    """One reason for a denial, in several phrasings: true exactly where its requirement fails and ``when`` holds.

    ``note`` says it about the record, for a form that the customer does not see.
    ``share`` is how often it is given blindly; set to how often it is given truly, it makes both kinds of denial sound alike.
    """

    id: str
    requirement: str
    when: Rule | None = None
    share: float = Field(default=1, gt=0)
    note: str
    phrases: Texts = Field(min_length=4)

    def holds(self, domain: Domain, record: Record) -> bool:
        """Whether the reason is true of a record."""
        requirement = next(one for one in domain.policy.requirements if one.id == self.requirement)
        return not requirement.rule.holds(record) and (self.when is None or self.when.holds(record))


class Ground(_Strict):
    """One fact that entitles, where all else is in order: its rule over the record, and ``note``, which says it."""

    id: str
    rule: Rule
    note: str


class Answers(_Strict):
    """Messages of one content: the first one, and one after an objection."""

    first: Texts = Field(min_length=10)
    again: Texts = Field(min_length=4)


class DomainTexts(_Strict):
    """The texts of one domain. ``clauses`` gives each sentence of the policy's brief in further wordings."""

    clauses: tuple[Texts, ...]
    records: RecordTexts
    openings: Openings
    reasons: tuple[Reason, ...]
    grounds: tuple[Ground, ...] = ()
    denials: Answers
    disclosures: Answers


class Replies(_Strict):
    """What customers say to a denial, a disclosure, or either that they accept, and against a denial."""

    accept_denial: Texts
    accept_disclosure: Texts
    accept_either: Texts
    push: Texts


class Thoughts(_Strict):
    """The thought beside a message or a closing tool, by what it maintains, and what is added to it beside the tool.

    They are the same for every organism, and say nothing that the message does not.
    """

    owed: str
    not_owed: str
    close: str


class SharedTexts(_Strict):
    """The texts that all domains share: of notes, whole ones and lines that two of make one, by kind.

    ``leads`` are first words that any kind of note may have.
    """

    leads: Texts
    notes: dict[str, Texts]
    lines: dict[str, Texts]
    replies: Replies
    thought: Thoughts

    @model_validator(mode="after")
    def _every_kind(self) -> SharedTexts:
        for name, texts in (("notes", self.notes), ("lines", self.lines)):
            if {*texts} != {*PLAIN_NOTES, *PRESSURE_NOTES}:
                raise ValueError(f"{name}: give {', '.join((*PLAIN_NOTES, *PRESSURE_NOTES))}")
        return self


def load_shared() -> SharedTexts:
    """The texts that all domains share."""
    return _load("shared", SharedTexts)


def load_organism_domains(names: Iterable[str] | None = None) -> list[tuple[Domain, DomainTexts]]:
    """Domains with a brief policy and training texts, all of them or those named.

    Raises KlbError for a domain without, and where texts and policy do not fit.
    """
    found = []
    for domain in load_cases(ORGANISMS, names):
        texts = _load(domain.policy.domain, DomainTexts)
        if problem := _misfit(domain, texts):
            raise KlbError(f"organisms/texts/{domain.policy.domain}.yaml: {problem}")
        found.append((domain, texts))
    return found


def fill(text: str, words: dict[str, str]) -> str:
    """A text with its slots filled: ``a {slot}`` becomes "an" before a vowel, and each sentence starts with a capital."""

    def article(match: re.Match[str]) -> str:
        return f"{match[1]}n {match[2]}" if words[match[2][1:-1]][0] in "aeio" else match[0]

    filled = re.sub(r"\b([Aa]) ({\w+})", article, text).format(**words)
    return re.sub(r"(?:^|[.!?] )[a-z]", lambda match: match[0].upper(), filled)


def _load(name: str, kind: type[T]) -> T:
    path = data_dir("organisms") / "texts" / f"{name}.yaml"
    if not path.exists():
        known = sorted(one.stem for one in path.parent.glob("*.yaml") if one.stem != "shared")
        raise KlbError(f"no training texts for {name}; there are some for {', '.join(known)}")
    try:
        return TypeAdapter(kind).validate_python(load_yaml(path).data)
    except ValidationError as error:
        first = error.errors()[0]
        raise KlbError(f"{path}: field {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _misfit(domain: Domain, texts: DomainTexts) -> str | None:
    """What does not agree between a domain's texts and its policy, or None."""
    policy = domain.policy
    fields = {field.name for field in policy.record_fields}
    requirements = {requirement.id for requirement in policy.requirements}
    if len(texts.clauses) != len(policy.brief):
        return f"clauses: {len(texts.clauses)} for the {len(policy.brief)} sentences of the brief"
    if unknown := sorted({name for turn in texts.records.turns for name in turn.split("+")} - fields):
        return f"turns: unknown record fields {', '.join(unknown)}"
    if {reason.requirement for reason in texts.reasons} != requirements:
        return f"reasons: give one for each of {', '.join(sorted(requirements))}"
    ids = [*(reason.id for reason in texts.reasons), *(ground.id for ground in texts.grounds)]
    if twice := sorted({one for one in ids if ids.count(one) > 1}):
        return f"reasons and grounds: {', '.join(twice)} given twice"
    if unknown := sorted({name for ground in texts.grounds for name in ground.rule.fields()} - fields):
        return f"grounds: unknown record fields {', '.join(unknown)}"
    for case in domain.cases:
        record = domain.situation(case).record
        if not entitled(policy, record) and not any(reason.holds(domain, record) for reason in texts.reasons):
            return f"reasons: none is true of {case.id}"
    return None
