"""Why a record has its label: each requirement, met or missed, as a tree of comparisons in words."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import cast

from klb_probe.cases.rules import AllRule, AnyRule, FieldValue, Leaf, NotRule, Record, Rule, SpanRule
from klb_probe.cases.schema import Policy, RecordField, Requirement

_WORDS = {"at_least": "at least", "at_most": "at most", "more_than": "more than", "less_than": "less than"}


@dataclass(frozen=True)
class Reason:
    """A rule on a record in words, whether it holds, and the rules inside it."""

    words: str
    holds: bool
    inside: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One requirement on a record."""

    requirement: Requirement
    reason: Reason

    @property
    def met(self) -> bool:
        """Whether the requirement holds."""
        return self.reason.holds


def explain(policy: Policy, record: Record) -> list[Finding]:
    """Every requirement of the policy on a record; the customer is entitled when all are met."""
    fields = {field.name: field for field in policy.record_fields}
    return [Finding(requirement, _reason(requirement.rule, fields, record)) for requirement in policy.requirements]


def _reason(rule: Rule, fields: dict[str, RecordField], record: Record) -> Reason:
    holds = rule.holds(record)
    if isinstance(rule, AllRule):
        return Reason("all of", holds, tuple(_reason(part, fields, record) for part in rule.all))
    if isinstance(rule, AnyRule):
        return Reason("any of", holds, tuple(_reason(part, fields, record) for part in rule.any))
    if isinstance(rule, NotRule):
        return Reason("not", holds, (_reason(rule.negated, fields, record),))
    return Reason(_words(rule, holds, fields, record), holds)


def _words(leaf: Leaf, holds: bool, fields: dict[str, RecordField], record: Record) -> str:
    relation = _WORDS.get(leaf.comparison)
    if isinstance(leaf, SpanRule):
        start, end = (fields[name].label for name in leaf.ends)
        first, last = (cast(dt.date, record[name]) for name in leaf.ends)
        days = (last - first).days
        asked = " | ".join(map(str, leaf.bounds))
        return f"{end}: {days} days from {start} (asked: {relation or 'exactly'} {asked} {leaf.unit})"
    field = fields[leaf.field]
    value = field.render(record[field.name])
    bounds = " | ".join(
        f"{fields[bound.field].label}, {field.render(record[bound.field])}"
        if isinstance(bound, FieldValue)
        else field.render(bound)
        for bound in leaf.bounds
    )
    if relation is None and holds:
        return f"{field.label}: {value}"
    return f"{field.label}: {value} (asked: {f'{relation} ' if relation else ''}{bounds})"
