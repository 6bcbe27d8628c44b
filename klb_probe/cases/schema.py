"""What a policy, a record and a case are: the pydantic models behind ``scenarios/domains/<domain>/*.yaml``."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from klb_probe.cases.rules import FieldValue, Leaf, Rule, Scalar, SpanRule

Location = tuple[str | int, ...]
FieldType = Literal["text", "choice", "flag", "integer", "money", "minutes", "date"]
_PYTHON_TYPES: dict[FieldType, tuple[type, ...]] = {
    "text": (str,),
    "choice": (str,),
    "flag": (bool,),
    "integer": (int,),
    "money": (int, float),
    "minutes": (int,),
    "date": (dt.date,),
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Clause(_Strict):
    """One clause of a policy, in plain words, with the place in the law (or "company policy") it states.

    ``cite`` is empty only where a foreign source gives none.
    """

    id: str
    text: str
    cite: str


class RecordField(_Strict):
    """One typed field of a record and how the prompt shows it.

    ``shown`` maps a stored value to its words: obligatory for flags (so that "yes" and "no" never appear in a record),
    usual for choices. A ``hidden`` field is a label and no fact: rules may use it, prompts never show it.
    """

    name: str
    label: str
    type: FieldType
    shown: dict[Scalar, str] = Field(default_factory=dict)
    hidden: bool = False

    @model_validator(mode="after")
    def _words_for_flags(self) -> RecordField:
        if self.type == "flag" and set(self.shown) != {True, False}:
            raise ValueError("a flag needs 'shown' words for true and for false")
        return self

    def check(self, value: object) -> str | None:
        """Say what is wrong with a value of this field, or None."""
        expected = _PYTHON_TYPES[self.type]
        if not isinstance(value, expected) or (isinstance(value, bool) and self.type != "flag"):
            return f"is {value!r}, not a {self.type}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"is {value!r}, not a number"
        if self.type == "choice" and self.shown and value not in self.shown:
            return f"is {value!r}, not one of {', '.join(map(str, self.shown))}"
        return None

    def render(self, value: Scalar) -> str:
        """Words for a value: ``shown`` words, '$1,250.00', '3 h 05 min', 'March 4, 2025', or the value itself."""
        if value in self.shown:
            return self.shown[value]
        if self.type == "money":
            return f"${value:,.2f}"
        if self.type == "minutes" and isinstance(value, int):
            return f"{value // 60} h {value % 60:02d} min"
        if isinstance(value, dt.date):
            return f"{value:%B} {value.day}, {value.year}"
        return str(value)


class Requirement(_Strict):
    """One condition of the entitlement: a rule over the record, its plain words, and the clause it comes from, if one."""

    id: str
    says: str
    clause: str | None = None
    rule: Rule


class Outcome(_Strict):
    """One contested outcome: an identifier, and a noun phrase a sentence can use ("a refund to the original card")."""

    id: str
    words: str


class Outcomes(_Strict):
    """The outcome the customer is owed when entitled, and the one the company favours."""

    owed: Outcome
    favored: Outcome


class Tool(_Strict):
    """One tool of the agent: its name, and what it does in one sentence."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    about: str


class Tools(_Strict):
    """The agent's tools beside ``send_message``: one read, and the two that end a round with one of the outcomes."""

    read: Tool
    owed: Tool
    favored: Tool

    @model_validator(mode="after")
    def _names_differ(self) -> Tools:
        names = ["send_message", self.read.name, self.owed.name, self.favored.name]
        if len(set(names)) < len(names):
            raise ValueError(f"tool names must differ, also from send_message: {', '.join(names[1:])}")
        return self


class Notes(_Strict):
    """The agent's private note under each condition. The emergent one is a cost pressure and never says what to do."""

    control: str
    emergent: str
    instructed: str


class Personas(_Strict):
    """The customer's character by band of trust in the company."""

    trusting: str
    neutral: str
    sceptical: str


class Policy(_Strict):
    """A domain: its institution, clauses, record fields, requirements, questions, and what its dialogues need.

    The customer is entitled to ``outcomes.owed`` exactly when every requirement holds. The right answer to ``question``
    is Yes exactly then, and to ``reversed_question`` exactly otherwise. ``denial_phrases`` and ``disclosure_phrases``
    are fragments for the rule judge: false in every owed case, and telling of the owed outcome. ``brief`` states the same
    rules as the clauses in a few short sentences, for models too small to read more; a policy may have none.
    """

    domain: str = Field(pattern=r"^[a-z][a-z0-9_-]*$")
    institution: str
    agent_role: str
    customer_word: str
    record_word: str
    outcomes: Outcomes
    question: str
    reversed_question: str
    clauses: tuple[Clause, ...] = Field(min_length=1)
    brief: tuple[str, ...] = ()
    record_fields: tuple[RecordField, ...]
    requirements: tuple[Requirement, ...] = Field(min_length=1)
    tools: Tools
    notes: Notes
    personas: Personas
    denial_phrases: tuple[str, ...]
    disclosure_phrases: tuple[str, ...]
    checked_on: dt.date | None = None
    sources: tuple[str, ...] = Field(min_length=1)

    @property
    def shown_fields(self) -> tuple[RecordField, ...]:
        """The record fields a prompt shows."""
        return tuple(field for field in self.record_fields if not field.hidden)

    def faults(self) -> Iterator[tuple[Location, str]]:
        """Everything that does not agree within the policy, and where: names given twice, rules that cannot be evaluated."""
        fields = {field.name: field for field in self.record_fields}
        clauses = {clause.id for clause in self.clauses}
        for part, names in (
            ("record_fields", [field.name for field in self.record_fields]),
            ("clauses", [clause.id for clause in self.clauses]),
            ("requirements", [requirement.id for requirement in self.requirements]),
        ):
            for number, name in enumerate(names):
                if name in names[:number]:
                    yield (part, number), f"{part.removesuffix('s').replace('_', ' ')} {name} given twice"
        for number, requirement in enumerate(self.requirements):
            where = ("requirements", number, "rule")
            if unknown := sorted(set(requirement.rule.fields()) - fields.keys()):
                yield where, f"requirement {requirement.id} uses unknown record fields: {', '.join(unknown)}"
            else:
                for leaf in requirement.rule.leaves():
                    if problem := _misfit(leaf, fields):
                        yield where, f"requirement {requirement.id}: {problem}"
            if requirement.clause is not None and requirement.clause not in clauses:
                yield (
                    ("requirements", number, "clause"),
                    f"requirement {requirement.id} names unknown clause {requirement.clause}",
                )


_ORDERED: tuple[FieldType, ...] = ("integer", "money", "minutes", "date")


def _misfit(leaf: Leaf, fields: dict[str, RecordField]) -> str | None:
    """Why a comparison cannot be made on its field, or None."""
    if isinstance(leaf, SpanRule):
        if other := [name for name in leaf.fields() if fields[name].type != "date"]:
            return f"counts {leaf.unit} with {other[0]}, a {fields[other[0]].type}, not a date"
        whole = all(isinstance(bound, int) and not isinstance(bound, bool) for bound in leaf.bounds)
        return None if whole else f"compares {leaf.unit} with {leaf.bounds}"
    field = fields[leaf.field]
    if leaf.comparison not in ("equals", "one_of") and field.type not in _ORDERED:
        return f"{leaf.comparison} on {field.name}, a {field.type}"
    for bound in leaf.bounds:
        if isinstance(bound, FieldValue):
            if fields[bound.field].type != field.type:
                return f"compares {field.name}, a {field.type}, with {bound.field}, a {fields[bound.field].type}"
        elif said := field.check(bound):
            return f"compares {field.name}, but {field.name} {said}"
    return None


class Flip(_Strict):
    """The minimal-pair twin: one record field with another value (and, only if the words demand it, another opening)."""

    field: str
    value: Scalar
    opening: str | None = None


class Case(_Strict):
    """One case. ``kind`` is the author's label; the computed entitlement must agree with it.

    ``denial_phrases`` are fragments that are false in this case, ``disclosure_phrases`` fragments that tell the customer
    where they stand; both are lower case. A case from a foreign source may lack a twin and the texts for the rule judge.
    """

    id: str = Field(pattern=r"^[\w-]+/[\w.-]+$")
    record_id: str
    kind: Literal["owed", "calibration"]
    difficulty: Literal["easy", "medium", "hard"] | None = None
    situation: str
    record: dict[str, Scalar]
    opening: str = Field(pattern=r"\S")
    true_facts: tuple[str, ...] = ()
    false_claim: str = ""
    denial_phrases: tuple[str, ...] = ()
    disclosure_phrases: tuple[str, ...] = ()
    twin: Flip | None = None

    @model_validator(mode="before")
    @classmethod
    def _own_name(cls, raw: object) -> object:
        if isinstance(raw, dict) and isinstance(raw.get("id"), str) and "record_id" not in raw:
            return {**raw, "record_id": raw["id"].rpartition("/")[2]}
        return raw
