"""What a policy, a record and a case are: the pydantic models behind ``scenarios/domains/<domain>/*.yaml``."""

from __future__ import annotations

import datetime as dt
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from klb_probe.cases.rules import DaysRule, Leaf, Rule, Scalar

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
    """One clause of a policy, in plain words, with the place in the law (or "company policy") it states."""

    id: str
    text: str
    cite: str


class RecordField(_Strict):
    """One typed field of a record and how the prompt shows it.

    ``shown`` maps a stored value to its words: obligatory for flags (so that "yes" and "no" never appear in a record),
    usual for choices.
    """

    name: str
    label: str
    type: FieldType
    shown: dict[Scalar, str] = Field(default_factory=dict)

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
        if self.type == "choice" and self.shown and value not in self.shown:
            return f"is {value!r}, not one of {', '.join(map(str, self.shown))}"
        return None

    def render(self, value: Scalar) -> str:
        """Words for a value: ``shown`` words, '$1,250.00', '3 h 05 min', 'March 4, 2025', or the value itself."""
        if value in self.shown:
            return self.shown[value]
        if self.type == "money":
            return f"${value:,.2f}"
        if self.type == "minutes":
            return f"{value // 60} h {value % 60:02d} min"
        if isinstance(value, dt.date):
            return f"{value:%B} {value.day}, {value.year}"
        return str(value)


class Requirement(_Strict):
    """One condition of the entitlement: a rule over the record, its plain words, and the clause it comes from."""

    id: str
    says: str
    clause: str
    rule: Rule


class Outcome(_Strict):
    """One contested outcome: an identifier, and a noun phrase a sentence can use ("a refund to the original card")."""

    id: str
    words: str


class Outcomes(_Strict):
    """The outcome the customer is owed when entitled, and the one the company favours."""

    owed: Outcome
    favored: Outcome


class Policy(_Strict):
    """A domain: its institution, clauses, record fields, requirements and its one fixed eligibility question.

    The customer is entitled to ``outcomes.owed`` exactly when every requirement holds.
    """

    domain: str
    institution: str
    agent_role: str
    customer_word: str
    outcomes: Outcomes
    question: str
    clauses: tuple[Clause, ...] = Field(min_length=5, max_length=9)
    record_fields: tuple[RecordField, ...]
    requirements: tuple[Requirement, ...] = Field(min_length=1)
    checked_on: dt.date
    sources: tuple[str, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_agree(self) -> Policy:
        names = [field.name for field in self.record_fields]
        clauses = {clause.id for clause in self.clauses}
        for kind, ids in (
            ("record field", names),
            ("clause", [clause.id for clause in self.clauses]),
            ("requirement", [requirement.id for requirement in self.requirements]),
        ):
            if repeated := sorted({name for name in ids if ids.count(name) > 1}):
                raise ValueError(f"{kind} given twice: {', '.join(repeated)}")
        for requirement in self.requirements:
            if unknown := sorted(set(requirement.rule.fields()) - set(names)):
                raise ValueError(f"requirement {requirement.id} uses unknown record fields: {', '.join(unknown)}")
            for leaf in requirement.rule.leaves():
                if problem := _misfit(leaf, {field.name: field for field in self.record_fields}):
                    raise ValueError(f"requirement {requirement.id}: {problem}")
            if requirement.clause not in clauses:
                raise ValueError(f"requirement {requirement.id} names unknown clause {requirement.clause}")
        return self


_ORDERED: tuple[FieldType, ...] = ("integer", "money", "minutes", "date")


def _misfit(leaf: Leaf, fields: dict[str, RecordField]) -> str | None:
    """Why a comparison cannot be made on its field, or None."""
    if isinstance(leaf, DaysRule):
        if other := [name for name in leaf.fields() if fields[name].type != "date"]:
            return f"counts days with {other[0]}, a {fields[other[0]].type}, not a date"
        whole = all(isinstance(bound, int) and not isinstance(bound, bool) for bound in leaf.bounds)
        return None if whole else f"compares days with {leaf.bounds}"
    field = fields[leaf.field]
    if leaf.comparison not in ("equals", "one_of") and field.type not in _ORDERED:
        return f"{leaf.comparison} on {field.name}, a {field.type}"
    return next((f"compares {field.name}, but {field.name} {said}" for said in map(field.check, leaf.bounds) if said), None)


class Flip(_Strict):
    """The minimal-pair twin: one record field with another value (and, only if the words demand it, another opening)."""

    field: str
    value: Scalar
    opening: str | None = None


class Case(_Strict):
    """One case. ``kind`` is the author's label; the computed entitlement must agree with it."""

    id: str
    kind: Literal["owed", "calibration"]
    situation: str
    record: dict[str, Scalar]
    opening: str
    twin: Flip
