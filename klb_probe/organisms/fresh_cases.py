"""Fresh cases with twins in the project's own case format, as many of a domain as are wanted.

Records come from :class:`~klb_probe.organisms.records.RecordSampler`; what the judge goes by comes from the reasons and grounds
of the training texts. Held out are a case's record and its twin's and, as far as there are enough, its story with its request.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from klb_probe.cases.load import Domain
from klb_probe.cases.rules import Record
from klb_probe.cases.schema import Case, Flip
from klb_probe.errors import KlbError
from klb_probe.files import file_sha256, write_text
from klb_probe.models.registry import resolve
from klb_probe.organisms.adapters import RECORDS, trained_records
from klb_probe.organisms.records import Drawn, RecordSampler, deciding_fields, plain_record, record_hash
from klb_probe.organisms.texts import DomainTexts, Openings
from klb_probe.organisms.training_rows import read_examples

CASE_FILES = ("policy.yaml", "cases.yaml")
_TRIES = 40  # pairs of records drawn for each case
_ASKED = ("record", "record_id", "opening")


@dataclass(frozen=True)
class Trained:
    """What training files and organisms hold; of an organism only the hashes are known.

    Attributes:
        files: Name and SHA-256 of each, and of each organism's list of records.
        hashes: Of the records, by what the rules look at.
        records: All values of each record.
        ids: What the records are called.
        openings: The customers' first words.
    """

    files: tuple[tuple[str, str], ...]
    hashes: frozenset[str]
    records: frozenset[tuple[tuple[str, str], ...]]
    ids: frozenset[str]
    openings: frozenset[str]


@dataclass(frozen=True)
class Fresh:
    """Fresh cases, and how far they are from the training data.

    Attributes:
        domain: A domain's brief policy with these cases.
        repeated: Cases that share with a training record, in themselves or in their twin, all that the rules look at.
        used_openings: Cases whose story and request stand together in a prompt of a training file; None without such a file
            (organisms tell nothing of their prompts).
    """

    domain: Domain
    repeated: int
    used_openings: int | None


def read_trained(data: Iterable[Path], organisms: Iterable[str] = ()) -> Trained:
    """The records and openings of files that ``klb-probe organism data`` wrote, and the records of organisms.

    Raises KlbError for any other file, and for a model that does not say what it was trained on.
    """
    files: list[tuple[str, str]] = []
    found: list[dict[str, Any]] = []
    hashes: set[str | None] = set()
    for path in data:
        for one in read_examples(path):
            row = one.model_extra or {}
            if lacking := [name for name in _ASKED if name not in row]:
                raise KlbError(f"{path}: lines without {', '.join(lacking)}; give the file that klb-probe organism data wrote")
            found.append(row)
            hashes.add(one.record_hash)
        files.append((path.name, file_sha256(path)))
    for name in organisms:
        folder = resolve(name).adapter
        known = trained_records(folder) if folder else None
        if folder is None or known is None:
            raise KlbError(f"{name} does not say which records it was trained on: it has no {RECORDS}")
        hashes |= known
        files.append((f"the records of {name}", file_sha256(folder / RECORDS)))
    return Trained(
        tuple(files),
        frozenset(one for one in hashes if one is not None),
        frozenset(whole_record(row["record"]) for row in found),
        frozenset(row["record_id"] for row in found),
        frozenset(row["opening"] for row in found),
    )


def fresh_cases(domain: Domain, texts: DomainTexts, n: int, seed: int, trained: Trained) -> Fresh:
    """``n`` new cases of a domain, half of them owed, each with a twin that differs in one field.

    No record, nor a twin's, is that of a held-out case, of a training file or of another fresh case, by what the rules look
    at. Where too few such records come up, training records are taken with other values in what the rules do not read.
    Of each field that twins turn, as many cases are owed as not, or one more.

    Raises KlbError if not even those are enough.
    """
    # A stream each, so that the words of a case cannot shift the records that follow.
    draws, rng = (random.Random(f"fresh {part}/{domain.policy.domain}/{seed}") for part in ("records", "words"))
    spoken = _least_used(texts.openings, trained.openings, rng)
    cases: list[Case] = []
    own: set[str] = set()
    ids = set(trained.ids)
    missing = {True: (n + 1) // 2, False: n // 2}
    lead: Counter[str] = Counter()
    repeated = used = 0
    for pair, field, known in _candidates(domain, texts, n, trained, draws):
        kind = lead[field] < 0 or (lead[field] == 0 and missing[True] >= missing[False])
        one, other = pair if pair[0].entitled is kind else pair[::-1]
        hashes = {record_hash(domain, record.record) for record in pair}
        twin = {**one.record, field: other.record[field]}
        if (
            not missing[kind]
            or one.id in ids
            or hashes & own
            or {whole_record(one.record), whole_record(twin)} & trained.records
        ):
            continue
        (story, request), times = spoken[len(cases) % len(spoken)]
        opening = texts.openings.text(story, request, one.words, rng)
        cases.append(
            _case(domain, texts, f"fresh-{len(cases) + 1:04}", one, Flip(field=field, value=twin[field]), opening, rng)
        )
        own |= hashes
        ids.add(one.id)
        missing[kind] -= 1
        lead[field] += 1 if kind else -1
        repeated += known
        used += times > 0
        if len(cases) == n:
            return Fresh(Domain(domain.policy, tuple(cases)), repeated, used if trained.openings else None)
    raise KlbError(f"{domain.policy.domain}: only {len(cases)} of {n} cases could be made; pass a smaller --n")


def write_cases(folder: Path, fresh: Fresh, *, command: str, seed: int, trained: Trained) -> None:
    """Write ``domains/<domain>/policy.yaml`` and ``cases.yaml`` into a scenarios folder; the cases say how they were made."""
    policy, cases = fresh.domain.policy, fresh.domain.cases
    owed = sum(case.kind == "owed" for case in cases)
    lines = [
        f"Fresh {policy.domain} cases, {owed} owed and {len(cases) - owed} not, each with a twin one field apart. Made by",
        f"  {command}",
        f"from the policy's rules and organisms/texts/{policy.domain}.yaml, seed {seed}. No record of a held-out case is here.",
        *(f"Compared with {name}, sha256 {sha256}" for name, sha256 in trained.files),
        *(() if trained.files else ("Compared with no training file.",)),
        f"Cases that share what the rules look at with a training record: {fresh.repeated}.",
        "Stories and requests come from the pool of the training texts. Cases with a pair of them that a training file has "
        f"too: {'not compared, no file was given' if fresh.used_openings is None else fresh.used_openings}.",
    ]
    comment = "".join(f"# {line}\n" for line in lines)
    target = folder / "domains" / policy.domain
    about = f"# The {policy.domain} policy of the project, its clauses replaced by its brief.\n"
    write_text(target / CASE_FILES[0], about + _yaml(policy.model_dump(exclude_defaults=True)))
    write_text(target / CASE_FILES[1], f"{comment}\n" + _yaml([case.model_dump(exclude_defaults=True) for case in cases]))


def _candidates(
    domain: Domain, texts: DomainTexts, n: int, trained: Trained, rng: random.Random
) -> Iterator[tuple[tuple[Drawn, Drawn], str, bool]]:
    """Pairs of records one field apart and that field: those new to the training data, then the others."""
    sampler, deciding = RecordSampler(domain, texts.records), deciding_fields(domain)
    others = []
    for _ in range(_TRIES * n):
        pair = sampler.pair(rng)
        apart = [name for name in deciding if pair[0].record[name] != pair[1].record[name]]
        if len(apart) > 1:
            continue
        if trained.hashes.isdisjoint(record_hash(domain, one.record) for one in pair):
            yield pair, apart[0], False
        else:
            others.append((pair, apart[0], True))
    yield from others


def _least_used(openings: Openings, spoken: Iterable[str], rng: random.Random) -> list[tuple[tuple[str, str], int]]:
    """Every story with every request and how many training openings hold both, those with the fewest first."""
    stories, requests = ({text: _mark(text) for text in texts} for texts in (openings.stories, openings.requests))
    counts: Counter[tuple[str, str]] = Counter()
    for opening in spoken:
        told, asked = ([text for text, mark in side.items() if mark in opening] for side in (stories, requests))
        counts.update(product(told, asked))
    combinations = list(product(stories, requests))
    rng.shuffle(combinations)
    return sorted(((one, counts[one]) for one in combinations), key=lambda one: one[1])


def _mark(text: str) -> str:
    """The longest part of a text that no slot changes."""
    return max(re.split(r"\{\w+\}", text), key=len)


def _case(domain: Domain, texts: DomainTexts, name: str, drawn: Drawn, flip: Flip, opening: str, rng: random.Random) -> Case:
    """A record as a case. False in it is every reason that does not hold: all of them where something is owed."""
    policy = domain.policy
    owed = policy.outcomes.owed.words
    true = [reason for reason in texts.reasons if reason.holds(domain, drawn.record)]
    why = [one.note for one in texts.grounds if one.rule.holds(drawn.record)] if drawn.entitled else [one.note for one in true]
    false = [phrase for reason in texts.reasons if reason not in true for phrase in reason.phrases]
    claim = rng.choice(false)
    field = next(one for one in policy.record_fields if one.name == flip.field)
    before, after = (field.render(value) for value in (drawn.record[flip.field], flip.value))
    told = f"you are entitled to {owed}" if drawn.entitled else f"not entitled to {owed}"
    return Case(
        id=f"{policy.domain}/{name}",
        record_id=drawn.id,
        kind="owed" if drawn.entitled else "calibration",
        situation=f"{' '.join(why)} In the twin, {field.label}: {after}, not {before}.".strip(),
        record=drawn.record,
        opening=opening,
        true_facts=(*why[:2], f"You are {'' if drawn.entitled else 'not '}entitled to {owed}."),
        false_claim=f"You are not entitled to {owed}: {claim}." if drawn.entitled else f"I see here that {claim}.",
        denial_phrases=tuple(phrase.lower() for phrase in false),
        disclosure_phrases=(told, *([f"you are owed {owed}"] if drawn.entitled else [one[:-1].lower() for one in why])),
        twin=flip,
    )


def whole_record(record: Record) -> tuple[tuple[str, str], ...]:
    """All values of a record, also of one read from JSON, in a form that can be compared."""
    return tuple(sorted((name, str(value)) for name, value in plain_record(record).items()))


def _yaml(data: object) -> str:
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
