"""Eligibility rules as data: predicates over a case's record, evaluated by pure functions.

A rule is written in YAML as one mapping with one meaning::

    {field: delay_minutes, at_least: 180}
    {field: cause, one_of: [weather, crew]}
    {days_from: moved_out_on, days_to: statement_sent_on, at_most: 21}
    {all: [...]}   {any: [...]}   {not: {...}}

Dates are ISO dates; a day count is ``days_to - days_from`` in calendar days. Comparing a field the record lacks is an
error, never ``False``: a missing fact must not look like a denied claim.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Union

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

Scalar = Union[bool, int, float, dt.date, str]
Record = Mapping[str, Scalar]

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "equals": lambda value, bound: value == bound,
    "at_least": lambda value, bound: value >= bound,
    "at_most": lambda value, bound: value <= bound,
    "more_than": lambda value, bound: value > bound,
    "less_than": lambda value, bound: value < bound,
    "one_of": lambda value, bound: value in bound,
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class _Comparison(_Strict):
    """Exactly one of the six comparisons."""

    equals: Scalar | None = None
    at_least: Scalar | None = None
    at_most: Scalar | None = None
    more_than: Scalar | None = None
    less_than: Scalar | None = None
    one_of: tuple[Scalar, ...] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_comparison(self) -> _Comparison:
        given = [name for name in _COMPARISONS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(_COMPARISONS)}, not {given or 'none'}")
        return self

    def compare(self, value: Any) -> bool:
        return bool(_COMPARISONS[self.comparison](value, getattr(self, self.comparison)))

    @property
    def comparison(self) -> str:
        """The name of the one comparison given."""
        return next(name for name in _COMPARISONS if getattr(self, name) is not None)

    @property
    def bounds(self) -> tuple[Scalar, ...]:
        """The constants compared with."""
        bound = getattr(self, self.comparison)
        return bound if isinstance(bound, tuple) else (bound,)


class FieldRule(_Comparison):
    """A comparison of one record field with a constant."""

    field: str

    def holds(self, record: Record) -> bool:
        return self.compare(_value(record, self.field))

    def leaves(self) -> Iterator[FieldRule]:
        yield self

    def fields(self) -> Iterator[str]:
        yield self.field


class DaysRule(_Comparison):
    """A comparison of the calendar days between two date fields with a constant."""

    days_from: str
    days_to: str

    def holds(self, record: Record) -> bool:
        return self.compare((_value(record, self.days_to) - _value(record, self.days_from)).days)

    def leaves(self) -> Iterator[DaysRule]:
        yield self

    def fields(self) -> Iterator[str]:
        yield from (self.days_from, self.days_to)


Leaf = Union[FieldRule, DaysRule]


class AllRule(_Strict):
    all: tuple[Rule, ...] = Field(min_length=1)

    def holds(self, record: Record) -> bool:
        return all(rule.holds(record) for rule in self.all)

    def leaves(self) -> Iterator[Leaf]:
        for rule in self.all:
            yield from rule.leaves()

    def fields(self) -> Iterator[str]:
        for leaf in self.leaves():
            yield from leaf.fields()


class AnyRule(_Strict):
    any: tuple[Rule, ...] = Field(min_length=1)

    def holds(self, record: Record) -> bool:
        return any(rule.holds(record) for rule in self.any)

    def leaves(self) -> Iterator[Leaf]:
        for rule in self.any:
            yield from rule.leaves()

    def fields(self) -> Iterator[str]:
        for leaf in self.leaves():
            yield from leaf.fields()


class NotRule(_Strict):
    model_config = ConfigDict(serialize_by_alias=True)

    negated: Rule = Field(alias="not")

    def holds(self, record: Record) -> bool:
        return not self.negated.holds(record)

    def leaves(self) -> Iterator[Leaf]:
        yield from self.negated.leaves()

    def fields(self) -> Iterator[str]:
        yield from self.negated.fields()


def _kind(rule: Any) -> str | None:
    if isinstance(rule, BaseModel):
        return {FieldRule: "field", DaysRule: "days_from", AllRule: "all", AnyRule: "any", NotRule: "not"}[type(rule)]
    keys = [key for key in ("field", "days_from", "all", "any", "not") if isinstance(rule, Mapping) and key in rule]
    return keys[0] if len(keys) == 1 else None


Rule = Annotated[
    Union[
        Annotated[FieldRule, Tag("field")],
        Annotated[DaysRule, Tag("days_from")],
        Annotated[AllRule, Tag("all")],
        Annotated[AnyRule, Tag("any")],
        Annotated[NotRule, Tag("not")],
    ],
    Discriminator(
        _kind,
        custom_error_type="unknown_rule",
        custom_error_message="a rule is a mapping with one of: field, days_from, all, any, not",
    ),
]

for _model in (AllRule, AnyRule, NotRule):
    _model.model_rebuild()


def _value(record: Record, field: str) -> Any:
    if field not in record:
        raise KeyError(field)
    return record[field]
