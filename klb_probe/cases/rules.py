"""Eligibility rules as data: predicates over a case's record, evaluated by pure functions.

A rule is written in YAML as one mapping with one meaning::

    {field: delay_minutes, at_least: 180}
    {field: cause, one_of: [weather, crew]}
    {field: demanded, more_than: {field: authorised}}
    {days_from: moved_out_on, days_to: statement_sent_on, at_most: 21}
    {years_from: first_sold_on, years_to: notice_on, at_most: 15}
    {all: [...]}   {any: [...]}   {not: {...}}

Dates are ISO dates; a day count is ``days_to - days_from`` in calendar days. Months and years are calendar ones: at most
15 years means on or before the same day 15 years on. Comparing a field the record lacks is an error, never ``False``: a
missing fact must not look like a denied claim.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Union, cast

from dateutil.relativedelta import relativedelta
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


class FieldValue(_Strict):
    """The value of another record field, as a bound: ``{field: name}``."""

    field: str


Bound = Union[Scalar, FieldValue]


class _Comparison(_Strict):
    """Exactly one of the six comparisons."""

    equals: Bound | None = None
    at_least: Bound | None = None
    at_most: Bound | None = None
    more_than: Bound | None = None
    less_than: Bound | None = None
    one_of: tuple[Scalar, ...] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_comparison(self) -> _Comparison:
        given = [name for name in _COMPARISONS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(_COMPARISONS)}, not {given or 'none'}")
        return self

    def compare(self, value: Any, record: Record) -> bool:
        bound = getattr(self, self.comparison)
        if isinstance(bound, FieldValue):
            bound = _value(record, bound.field)
        return bool(_COMPARISONS[self.comparison](value, bound))

    @cached_property
    def comparison(self) -> str:
        """The name of the one comparison given."""
        return next(name for name in _COMPARISONS if getattr(self, name) is not None)

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """What is compared with."""
        bound = getattr(self, self.comparison)
        return bound if isinstance(bound, tuple) else (bound,)

    def bound_fields(self) -> Iterator[str]:
        """Record fields among the bounds."""
        yield from (bound.field for bound in self.bounds if isinstance(bound, FieldValue))


class FieldRule(_Comparison):
    """A comparison of one record field with a constant, or with another field."""

    field: str

    def holds(self, record: Record) -> bool:
        return self.compare(_value(record, self.field), record)

    def leaves(self) -> Iterator[FieldRule]:
        yield self

    def fields(self) -> Iterator[str]:
        yield self.field
        yield from self.bound_fields()


class _SpanRule(_Comparison):
    """A comparison of the time between two date fields with a whole number of ``unit``."""

    unit: ClassVar[str]

    @property
    def ends(self) -> tuple[str, str]:
        """The two date fields: from, to."""
        return getattr(self, f"{self.unit}_from"), getattr(self, f"{self.unit}_to")

    def elapsed(self, record: Record) -> float:
        """The time between the two dates of a record, in ``unit``; calendar months and years count a rest as a half."""
        start, end = (_value(record, name) for name in self.ends)
        if self.unit == "days":
            return (end - start).days
        gap = relativedelta(end, start)
        whole, rest = (gap.years, gap.months or gap.days) if self.unit == "years" else (12 * gap.years + gap.months, gap.days)
        return whole + 0.5 * ((rest > 0) - (rest < 0))

    def holds(self, record: Record) -> bool:
        return self.compare(self.elapsed(record), record)

    def leaves(self) -> Iterator[Leaf]:
        yield cast("Leaf", self)  # every span is of one of the three units

    def fields(self) -> Iterator[str]:
        yield from (*self.ends, *self.bound_fields())


class DaysRule(_SpanRule):
    unit: ClassVar[str] = "days"
    days_from: str
    days_to: str


class MonthsRule(_SpanRule):
    unit: ClassVar[str] = "months"
    months_from: str
    months_to: str


class YearsRule(_SpanRule):
    unit: ClassVar[str] = "years"
    years_from: str
    years_to: str


Leaf = Union[FieldRule, DaysRule, MonthsRule, YearsRule]
SpanRule = (DaysRule, MonthsRule, YearsRule)


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


_KINDS: dict[str, type[_Strict]] = {
    "field": FieldRule,
    "days_from": DaysRule,
    "months_from": MonthsRule,
    "years_from": YearsRule,
    "all": AllRule,
    "any": AnyRule,
    "not": NotRule,
}


def _kind(rule: Any) -> str | None:
    if isinstance(rule, BaseModel):
        return next(tag for tag, kind in _KINDS.items() if kind is type(rule))
    keys = [key for key in _KINDS if isinstance(rule, Mapping) and key in rule]
    return keys[0] if len(keys) == 1 else None


Rule = Annotated[
    Union[
        Annotated[FieldRule, Tag("field")],
        Annotated[DaysRule, Tag("days_from")],
        Annotated[MonthsRule, Tag("months_from")],
        Annotated[YearsRule, Tag("years_from")],
        Annotated[AllRule, Tag("all")],
        Annotated[AnyRule, Tag("any")],
        Annotated[NotRule, Tag("not")],
    ],
    Discriminator(
        _kind,
        custom_error_type="unknown_rule",
        custom_error_message=f"a rule is a mapping with one of: {', '.join(_KINDS)}",
    ),
]

for _model in (AllRule, AnyRule, NotRule):
    _model.model_rebuild()


def _value(record: Record, field: str) -> Any:
    if field not in record:
        raise KeyError(field)
    return record[field]
