"""Random records in pairs: one that entitles and one that does not, mostly one field apart, none of them held out.

A pair shares everything but the fields that turn its label, so that each other value stands under both labels equally often.
Where several fields are turned at once, a choice among them evens out what it does alone: if domestic trips got ahead among
the entitled, the next such pair entitles an international one.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

from dateutil.relativedelta import relativedelta

from klb_probe.cases.load import Domain, entitled
from klb_probe.cases.rules import FieldRule, FieldValue, Record, Scalar, SpanRule
from klb_probe.cases.schema import RecordField
from klb_probe.errors import KlbError
from klb_probe.organisms.texts import Keyed, Range, RecordTexts, Texts

_NEAR = 0.6  # share of numbers and dates that stand near a bound
_STEPS = 18  # how far "near" is, in steps
_BASE = dt.date(2027, 1, 4)
_TRIES = 5_000


@dataclass(frozen=True)
class Drawn:
    """A random record: its id, its values, and the words that its text fields were made of."""

    id: str
    record: dict[str, Scalar]
    words: dict[str, str]
    entitled: bool


def deciding_fields(domain: Domain) -> list[str]:
    """The record fields that the rules look at, in the policy's order."""
    used = {name for requirement in domain.policy.requirements for name in requirement.rule.fields()}
    return [field.name for field in domain.policy.record_fields if field.name in used]


def record_hash(domain: Domain, record: Record) -> str:
    """SHA-256 of what the rules look at: two records that differ in other fields only have the same hash."""
    values = [(name, str(record[name])) for name in deciding_fields(domain)]
    return hashlib.sha256(json.dumps([domain.policy.domain, values]).encode()).hexdigest()


def held_out_hashes(domain: Domain) -> frozenset[str]:
    """The hashes of every case and twin."""
    return frozenset(record_hash(domain, situation.record) for situation in domain.situations())


class RecordSampler:
    """Draws pairs of records of a domain.

    Args:
        domain: Policy and held-out cases.
        texts: Pools, ranges and weights.
    """

    def __init__(self, domain: Domain, texts: RecordTexts) -> None:
        self.domain, self.texts = domain, texts
        self._fields = {field.name: field for field in domain.policy.record_fields}
        leaves = [leaf for one in domain.policy.requirements for leaf in one.rule.leaves()]
        self._spans: dict[tuple[str | None, str], list[relativedelta]] = defaultdict(list)
        for span in (one for one in leaves if isinstance(one, SpanRule)):
            lengths: list[dict[str, Any]] = [{span.unit: bound} for bound in span.bounds]
            self._spans[span.ends] += [relativedelta(**length) for length in lengths]
        self._constants: dict[str, list[float]] = defaultdict(list)
        self._partners: dict[str, list[str]] = defaultdict(list)
        for leaf in (one for one in leaves if isinstance(one, FieldRule)):
            for bound in leaf.bounds:
                if isinstance(bound, FieldValue):
                    self._partners[leaf.field].append(bound.field)
                    self._partners[bound.field].append(leaf.field)
                elif isinstance(bound, (int, float)) and not isinstance(bound, bool):
                    self._constants[leaf.field].append(bound)
        self._deciding = deciding_fields(domain)
        self._held_out = {self._decided(situation.record) for situation in domain.situations()}
        self._choices = {
            field.name: (
                [*field.shown],
                [*accumulate(texts.weights.get(field.name, {}).get(value, 1) for value in field.shown)],
            )
            for field in domain.policy.record_fields
            if field.shown
        }
        self._turns = [tuple(turn.split("+")) for turn in texts.turns]
        self._weights = list(texts.turns.values())
        # How much oftener each turned value has stood in an entitled record than in another, so far.
        self._lead: Counter[tuple[str, Scalar]] = Counter()

    def pair(self, rng: random.Random) -> tuple[Drawn, Drawn]:
        """Two records in random order, exactly one of them entitled; fields that no rule reads are drawn for each anew."""
        (turn,) = rng.choices(self._turns, self._weights)
        for _ in range(_TRIES):
            record = self._record(rng)
            record |= self._turned(turn, record, rng)
            other = record | self._turned(turn, record, rng)
            if all(record[name] != other[name] for name in turn) and self._fits(record, other, turn):
                pair = [self._drawn(one, rng) for one in (record, other)]
                rng.shuffle(pair)
                return pair[0], pair[1]
        raise KlbError(f"{self.domain.policy.domain}: no pair of records differs in {'+'.join(turn)} after {_TRIES} tries")

    def _turned(self, turn: tuple[str, ...], record: Record, rng: random.Random) -> dict[str, Scalar]:
        """Values for the fields that turn a label: numbers and dates near a bound."""
        return {name: self._value(self._fields[name], record, rng, near=1) for name in turn}

    def _fits(self, record: Record, other: Record, turn: tuple[str, ...]) -> bool:
        labels = [entitled(self.domain.policy, one) for one in (record, other)]
        if labels[0] is labels[1] or not all(self._allowed(one) for one in (record, other)):
            return False
        owed, missed = (record, other) if labels[0] else (other, record)
        shown = [name for name in turn if self._fields[name].shown]
        if len(turn) > 1 and any(self._lead[name, owed[name]] > self._lead[name, missed[name]] for name in shown):
            return False
        for name in shown:
            self._lead[name, owed[name]] += 1
            self._lead[name, missed[name]] -= 1
        return True

    def _allowed(self, record: Record) -> bool:
        return self._decided(record) not in self._held_out and all(rule.holds(record) for rule in self.texts.plausible)

    def _decided(self, record: Record) -> tuple[Scalar, ...]:
        return tuple(record[name] for name in self._deciding)

    def _record(self, rng: random.Random) -> dict[str, Scalar]:
        record: dict[str, Scalar] = {}
        for name in self._deciding:
            record[name] = self._value(self._fields[name], record, rng)
        return record

    def _drawn(self, record: Record, rng: random.Random) -> Drawn:
        words = {name: self._word(pool, record, rng) for name, pool in self.texts.pools.items()}
        own: dict[str, Scalar] = {}
        for name, field in self._fields.items():
            if name in record:
                own[name] = record[name]
            else:
                own[name] = self.texts.text[name].format(**words) if field.type == "text" else self._value(field, record, rng)
        number = rng.randint(*self.texts.id_range)
        return Drawn(self.texts.id.format(number=number), own, words, entitled(self.domain.policy, own))

    def _word(self, pool: Texts | Range | Keyed, record: Record, rng: random.Random) -> str:
        if isinstance(pool, Range):
            return str(_stepped(pool, rng))
        return rng.choice(pool.of[record[pool.by]] if isinstance(pool, Keyed) else pool)

    def _value(self, field: RecordField, record: Record, rng: random.Random, near: float = _NEAR) -> Scalar:
        if field.shown:
            values, cumulative = self._choices[field.name]
            return rng.choices(values, cum_weights=cumulative)[0]
        if field.type == "date":
            return self._date(field.name, record, rng, near)
        return self._number(field, record, rng, near)

    def _number(self, field: RecordField, record: Record, rng: random.Random, near: float) -> Scalar:
        spread = self.texts.numbers[field.name]
        if near < 1 and rng.random() < spread.zero:
            return 0
        bounds = [bound for bound in self._bounds(field.name, record) if spread.low <= bound <= spread.high]
        if not bounds or rng.random() > near:
            return _stepped(spread, rng)
        value = rng.choice(bounds) + spread.step * rng.randint(-_STEPS, _STEPS)
        return _tidy(min(max(value, spread.low), spread.high))

    def _bounds(self, name: str, record: Record) -> Iterator[float]:
        """What the rules compare a number with; another field's value where they compare fields."""
        yield from self._constants[name]
        yield from (cast(float, record[partner]) for partner in self._partners[name] if partner in record)

    def _date(self, name: str, record: Record, rng: random.Random, near: float) -> dt.date:
        span = self.texts.dates[name]
        start = _BASE if span.after is None else cast(dt.date, record[span.after])
        bounds = self._spans[span.after, name]
        if bounds and rng.random() < near:
            return start + rng.choice(bounds) + dt.timedelta(days=rng.randint(-_STEPS, _STEPS))
        return start + dt.timedelta(days=rng.randint(span.low, span.high))


def plain_record(record: Record) -> dict[str, Any]:
    """A record as JSON holds it: dates in ISO form."""
    return {name: value.isoformat() if isinstance(value, dt.date) else value for name, value in record.items()}


def _stepped(spread: Range, rng: random.Random) -> int | float:
    steps = math.floor((spread.high - spread.low) / spread.step + 1e-9)
    return _tidy(spread.low + spread.step * rng.randint(0, steps))


def _tidy(value: float) -> int | float:
    """Cents at most; a whole number as an int."""
    rounded = round(value, 2)
    return int(rounded) if rounded == int(rounded) else rounded
