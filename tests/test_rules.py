"""Rules are pure predicates: every comparison means what Python means by it, and a missing fact is never ``False``."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import operator

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from klb_probe.cases.rules import Rule

RULES = TypeAdapter(Rule)
ORDERINGS = {"at_least": operator.ge, "at_most": operator.le, "more_than": operator.gt, "less_than": operator.lt}
EXAMPLES = [
    {"field": "delay", "at_least": 180},
    {"field": "cause", "one_of": ["weather", "crew"]},
    {"field": "sent", "less_than": dt.date(2026, 3, 1)},
    {"field": "flag", "equals": False},
    {"days_from": "left", "days_to": "sent", "at_most": 21},
    {"months_from": "left", "months_to": "sent", "less_than": 6},
    {"years_from": "sold", "years_to": "noticed", "at_most": 15},
    {"field": "demanded", "more_than": {"field": "authorised"}},
    {"all": [{"field": "a", "equals": 1}, {"any": [{"field": "b", "equals": "x"}, {"not": {"field": "c", "equals": True}}]}]},
]


def rule(raw):
    return RULES.validate_python(raw)


@pytest.mark.parametrize(("name", "python"), ORDERINGS.items())
@pytest.mark.parametrize(
    "values",
    [(-1, 0, 1), (0.5, 1.0, 1.5), (179, 180, 181), (dt.date(2025, 12, 31), dt.date(2026, 1, 1), dt.date(2026, 3, 1))],
    ids=["integers", "floats", "minutes", "dates"],
)
def test_orderings_are_pythons(name, python, values):
    for value, bound in itertools.product(values, repeat=2):
        assert rule({"field": "x", name: bound}).holds({"x": value}) is python(value, bound)


@pytest.mark.parametrize(
    "values", [(True, False), (0, 1, 2), ("a", "b", ""), (dt.date(2026, 1, 1), dt.date(2026, 1, 2)), (0.0, 1.5)]
)
def test_equals_holds_for_the_constant_and_nothing_else(values):
    for value, bound in itertools.product(values, repeat=2):
        assert rule({"field": "x", "equals": bound}).holds({"x": value}) is (value == bound)


def test_one_of_is_membership():
    chosen = rule({"field": "x", "one_of": ["a", "b", 3, dt.date(2026, 1, 1)]})
    assert all(chosen.holds({"x": value}) for value in ("a", "b", 3, dt.date(2026, 1, 1)))
    assert not any(chosen.holds({"x": value}) for value in ("c", "", "ab", 4, dt.date(2026, 1, 2)))


@pytest.mark.parametrize("name", [*ORDERINGS, "equals"])
@pytest.mark.parametrize(
    ("start", "end"),
    [("2024-02-28", "2024-03-01"), ("2025-02-28", "2025-03-01"), ("2025-12-20", "2026-01-10"), ("2026-03-07", "2026-03-09")],
    ids=["leap day", "no leap day", "new year", "clock change"],
)
def test_a_day_count_is_the_calendars(name, start, end):
    start, end = dt.date.fromisoformat(start), dt.date.fromisoformat(end)
    days = end.toordinal() - start.toordinal()
    python = ORDERINGS.get(name, operator.eq)
    for bound in (days - 1, days, days + 1, 0, -days):
        counted = rule({"days_from": "start", "days_to": "end", name: bound})
        assert counted.holds({"start": start, "end": end}) is python(days, bound)
        assert counted.holds({"start": end, "end": start}) is python(-days, bound)


@pytest.mark.parametrize(
    ("unit", "start", "count", "anniversary"),
    [
        ("years", "2011-03-04", 15, "2026-03-04"),
        ("years", "2024-02-29", 1, "2025-02-28"),
        ("years", "2010-12-31", 15, "2025-12-31"),
        ("months", "2026-01-31", 1, "2026-02-28"),
        ("months", "2025-11-15", 6, "2026-05-15"),
    ],
)
def test_calendar_months_and_years_end_on_the_same_day(unit, start, count, anniversary):
    start, end = dt.date.fromisoformat(start), dt.date.fromisoformat(anniversary)
    for days in (-1, 0, 1):
        record = {"a": start, "b": end + dt.timedelta(days)}
        for name, python in ORDERINGS.items():
            assert rule({f"{unit}_from": "a", f"{unit}_to": "b", name: count}).holds(record) is python(days, 0), (name, days)


def test_a_bound_may_be_another_field():
    for name, python in (*ORDERINGS.items(), ("equals", operator.eq)):
        for value, bound in itertools.product((1, 2.5, 3), repeat=2):
            assert rule({"field": "x", name: {"field": "y"}}).holds({"x": value, "y": bound}) is python(value, bound)
    with pytest.raises(KeyError, match="missing"):
        rule({"field": "x", "at_most": {"field": "missing"}}).holds({"x": 1})


@pytest.mark.parametrize("depth", [1, 2])
def test_all_any_not_are_the_connectives_at_any_depth(depth):
    leaves = [{"field": name, "equals": True} for name in "abcd"]
    left, right = (leaves[:2], leaves[2:])
    nested = {
        "all of any": ({"all": [{"any": left}, {"any": right}]}, lambda a, b, c, d: (a or b) and (c or d)),
        "any of all": ({"any": [{"all": left}, {"all": right}]}, lambda a, b, c, d: (a and b) or (c and d)),
        "not all": ({"not": {"all": leaves}}, lambda a, b, c, d: not (a and b and c and d)),
        "not any": ({"not": {"any": leaves}}, lambda a, b, c, d: not (a or b or c or d)),
    }
    for raw, python in nested.values():
        for _ in range(depth - 1):
            raw = {"not": {"not": raw}}
        for values in itertools.product([True, False], repeat=4):
            assert rule(raw).holds(dict(zip("abcd", values, strict=True))) is bool(python(*values))


@pytest.mark.parametrize(
    "raw",
    [
        {"field": "missing", "equals": True},
        {"field": "missing", "one_of": ["a"]},
        {"field": "missing", "less_than": 3},
        {"not": {"field": "missing", "equals": True}},
        {"days_from": "missing", "days_to": "day", "at_most": 3},
        {"days_from": "day", "days_to": "missing", "at_most": 3},
        {"all": [{"field": "present", "equals": 1}, {"field": "missing", "equals": 1}]},
        {"any": [{"field": "present", "equals": 2}, {"field": "missing", "equals": 1}]},
    ],
    ids=str,
)
def test_a_missing_field_is_an_error_that_names_it_and_never_false(raw):
    with pytest.raises(KeyError, match="missing"):
        rule(raw).holds({"present": 1, "day": dt.date(2026, 1, 1)})


@pytest.mark.parametrize(
    "raw",
    [
        {},
        None,
        "delay >= 180",
        [],
        {"field": "x"},
        {"field": "x", "equals": None},
        {"field": "x", "equals": 1, "at_least": 1},
        {"field": "x", "at_least": 1, "at_most": 1},
        {"field": "x", "eqals": 1},
        {"field": "x", "equals": 1, "note": "typo"},
        {"field": "x", "one_of": "weather"},
        {"equals": 1},
        {"days_from": "a", "at_most": 3},
        {"days_to": "a", "at_most": 3},
        {"days_from": "a", "days_to": "b"},
        {"years_from": "a", "months_to": "b", "at_most": 1},
        {"field": "x", "at_most": {"fields": "y"}},
        {"field": "x", "one_of": [{"field": "y"}]},
        {"field": "x", "days_from": "a", "days_to": "b", "at_most": 3},
        {"all": []},
        {"any": []},
        {"all": [{"field": "x", "equals": 1}], "any": [{"field": "x", "equals": 1}]},
        {"all": {"field": "x", "equals": 1}},
        {"not": [{"field": "x", "equals": 1}]},
        {"not": {"field": "x", "equals": 1}, "field": "x", "equals": 1},
        {"none": [{"field": "x", "equals": 1}]},
        {"all": [{"field": "x", "equals": 1}, {"field": "x", "equal": 1}]},
    ],
    ids=str,
)
def test_what_is_not_exactly_one_rule_is_rejected(raw):
    with pytest.raises(ValidationError):
        rule(raw)


def leaves(raw):
    """Field names of a raw rule, by walking the mapping itself."""
    if isinstance(raw, dict):
        for key, value in raw.items():
            if key == "field" or key.endswith(("_from", "_to")):
                yield value
            else:
                yield from leaves(value)
    elif isinstance(raw, list):
        for item in raw:
            yield from leaves(item)


@pytest.mark.parametrize("raw", EXAMPLES, ids=str)
def test_fields_lists_every_field_it_reads(raw):
    assert sorted(rule(raw).fields()) == sorted(leaves(raw))


@pytest.mark.parametrize("raw", EXAMPLES, ids=str)
def test_a_rule_survives_dump_json_and_yaml(raw):
    parsed = rule(raw)
    for dumped in (
        RULES.dump_python(parsed),
        RULES.dump_python(parsed, by_alias=True, exclude_none=True),
        yaml.safe_load(yaml.safe_dump(raw)),
    ):
        assert rule(dumped) == parsed
    text = RULES.dump_json(parsed, by_alias=True, exclude_none=True)
    assert RULES.validate_json(text) == parsed
    assert json.loads(text).keys() == raw.keys()
