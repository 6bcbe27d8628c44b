"""Whom an organism is asked about: the held-out cases with their twins, and fresh random records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Literal

from klb_probe.cases.load import Domain, Situation
from klb_probe.errors import KlbError
from klb_probe.organisms.examples import Example, examples

# Added to the seed of fresh records; training data are made with small seeds.
FRESH = 1_000_000
_SPARE = 50


@dataclass(frozen=True)
class Subject:
    """A record and what its customer wrote.

    Attributes:
        source: ``cases`` (cases and twins, held out of all training) or ``records`` (random, with training's openings).
        domain: The domain, with its brief policy.
        situation: The record; its ``pair`` is the unit of resampling: a case and its twin, or two records of one draw.
        record_id: What the record is called.
    """

    source: Literal["cases", "records"]
    domain: Domain
    situation: Situation
    record_id: str


def held_out_subjects(domains: Iterable[Domain], of_each_kind: int | None = None) -> list[Subject]:
    """Every case and twin; or only of the first few cases of each kind in each domain."""
    return [
        Subject("cases", domain, domain.situation(case, twin=twin), case.record_id)
        for domain in domains
        for kind in ("owed", "calibration")
        for case in [one for one in domain.cases if one.kind == kind][:of_each_kind]
        for twin in (False, True)
        if not twin or case.twin is not None
    ]


def fresh_subjects(domains: Sequence[Domain], n: int, seed: int, trained_on: frozenset[str] = frozenset()) -> list[Subject]:
    """``n`` random records (one more if that is odd), in pairs of one that is owed and one that is not; domains take turns.

    Args:
        domains: Domains with a brief policy.
        n: How many over all domains.
        seed: Of the draw; :data:`FRESH` is added to it.
        trained_on: Hashes of records that must not come up again.
    """
    by_name = {domain.policy.domain: domain for domain in domains}
    drawn = examples("honest", list(by_name), _SPARE * n, FRESH + seed)
    pairs = (list(rows) for _, rows in groupby(drawn, key=lambda one: one.pair))
    both = ((rows[0], rows[-1]) for rows in pairs)  # a record may be asked about in two wordings
    new = (pair for pair in both if trained_on.isdisjoint(one.record_hash for one in pair))
    chosen = [one for pair in islice(_of_their_own(new), (n + 1) // 2) for one in pair]
    if len(chosen) < n:
        raise KlbError(f"only {len(chosen)} of {n} records are new to the training data; pass a smaller --records")
    return [
        Subject(
            "records",
            by_name[one.domain],
            Situation(
                f"{one.domain}/{one.record_id}", f"{one.domain}/{one.pair}", one.domain, one.record, one.opening, one.entitled
            ),
            one.record_id,
        )
        for one in chosen
    ]


def _of_their_own(pairs: Iterable[tuple[Example, Example]]) -> Iterator[tuple[Example, Example]]:
    """Pairs whose ids did not come up before: tables and players know a record by its id."""
    known: set[tuple[str, str]] = set()
    for pair in pairs:
        ids = {(one.domain, one.record_id) for one in pair}
        if len(ids) == 2 and known.isdisjoint(ids):
            known |= ids
            yield pair
