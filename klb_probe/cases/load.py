"""Reading domains (policy + cases) and framings from YAML, with labels computed and every error placed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jinja2.meta
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from klb_probe.cases.generic import with_generic_texts
from klb_probe.cases.rules import Record, Scalar
from klb_probe.cases.schema import Case, Location, Policy
from klb_probe.cases.yaml_source import Problem, Source, load_yaml, read_yaml
from klb_probe.errors import KlbError
from klb_probe.paths import data_dir

TWIN = "~twin"
T = TypeVar("T")


class Framing(BaseModel):
    """One framing of the system message: what it is for, and its paraphrases (Jinja over the policy's words)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    about: str
    paraphrases: tuple[str, ...] = Field(min_length=1)

    @field_validator("paraphrases")
    @classmethod
    def _templates(cls, paraphrases: tuple[str, ...]) -> tuple[str, ...]:
        for number, text in enumerate(paraphrases, 1):
            try:
                unknown = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(text)) - {"policy"}
            except jinja2.TemplateSyntaxError as error:
                raise ValueError(f"paraphrase {number}: not a Jinja template ({error.message})") from None
            if unknown:
                raise ValueError(f"paraphrase {number}: unknown words {', '.join(sorted(unknown))} (known: policy)")
        return paraphrases


@dataclass(frozen=True)
class Situation:
    """A record with its customer's words and computed entitlement: a case, or its minimal-pair twin.

    ``pair`` is the case's id and names both twins; it is the unit of resampling.
    """

    id: str
    pair: str
    domain: str
    record: dict[str, Scalar]
    opening: str
    entitled: bool


@dataclass(frozen=True)
class Domain:
    """A policy and its cases."""

    policy: Policy
    cases: tuple[Case, ...]

    def situations(self) -> list[Situation]:
        """Every case, followed by its twin where it has one."""
        return [
            self.situation(case, twin=twin)
            for case in self.cases
            for twin in (False, True)
            if not twin or case.twin is not None
        ]

    def situation(self, case: Case, *, twin: bool = False) -> Situation:
        """One case, or its twin."""
        record, opening = case.record, case.opening
        if twin:
            assert case.twin is not None  # asked for where there is one
            record = {**record, case.twin.field: case.twin.value}
            opening = case.twin.opening or opening
        return Situation(
            id=case.id + TWIN * twin,
            pair=case.id,
            domain=self.policy.domain,
            record={field.name: record[field.name] for field in self.policy.record_fields},
            opening=opening,
            entitled=entitled(self.policy, record),
        )


def entitled(policy: Policy, record: Record) -> bool:
    """Whether every requirement of the policy holds on the record."""
    return all(requirement.rule.holds(record) for requirement in policy.requirements)


def load_domains(names: Iterable[str] | None = None, root: Path | None = None) -> list[Domain]:
    """Load domains by name (all of them by default) from a scenarios folder (the project's by default).

    Raises KlbError naming file, line, case and field of the first thing unreadable, inconsistent or mislabelled.

    Examples:
        >>> [domain.policy.domain for domain in klb.load_domains()]
        ['airline', 'billing', 'debt', 'deposit', 'insurance', 'recall', 'refund', 'subscription']
    """
    domains, problems = read_domains(names, root)
    if problems:
        more = f" (and {len(problems) - 1} more: klb-probe cases check lists them)" if len(problems) > 1 else ""
        raise KlbError(f"{problems[0]}{more}")
    return domains


def read_domains(names: Iterable[str] | None = None, root: Path | None = None) -> tuple[list[Domain], list[Problem]]:
    """The domains that are sound, and everything wrong with the others; KlbError only for an unknown name."""
    folder = (root or data_dir("scenarios")) / "domains"
    known = sorted({path.parent.name for path in folder.glob("*/*.yaml")})
    wanted = list(dict.fromkeys(names)) if names is not None else known
    if unknown := [name for name in wanted if name not in known]:
        raise KlbError(f"unknown domain {', '.join(unknown)}; known: {', '.join(known) or f'none in {folder}'}")
    if not wanted:
        raise KlbError(f"no domains in {folder} (expected {folder}/<domain>/policy.yaml and cases.yaml)")
    domains, problems = [], []
    for name in wanted:
        domain, faults = _read_domain(folder / name)
        problems += faults
        if domain is not None and not faults:
            domains.append(domain)
    return domains, problems


def load_framings(root: Path | None = None) -> dict[str, Framing]:
    """Load the framings, in file order: a scenarios folder's own, or the project's where it has none."""
    own = root / "framings.yaml" if root is not None else None
    path = own if own is not None and own.exists() else data_dir("scenarios") / "framings.yaml"
    framings, problems = _validated(TypeAdapter(dict[str, Framing]), load_yaml(path))
    if framings is None:
        raise KlbError(str(problems[0]))
    return framings


def _read_domain(folder: Path) -> tuple[Domain | None, list[Problem]]:
    policy, problems = _read_policy(folder)
    source, faults = read_yaml(folder / "cases.yaml")
    problems += faults
    if source is None:
        return None, problems
    if not isinstance(source.data, list) or not source.data:
        return None, [*problems, Problem(source.path, "expected a list of cases")]
    cases: list[Case] = []
    seen: set[str] = set()
    record_ids: set[str] = set()
    for number, entry in enumerate(source.data):
        name = str(entry["id"]) if isinstance(entry, dict) and "id" in entry else f"number {number + 1}"
        case, faults = _validated(TypeAdapter(Case), source, (number,), name)
        problems += faults
        if case is None:
            continue
        said = [*_case_faults(policy, case)] if policy is not None else []
        if case.id in seen:
            said.append((("id",), "id given twice"))
        elif case.record_id in record_ids:
            said.append((("record_id",), f"record_id {case.record_id} given twice"))
        seen.add(case.id)
        record_ids.add(case.record_id)
        problems += [
            Problem(source.path, message, source.line((number, *where)), name, ".".join(map(str, where)) or None)
            for where, message in said
        ]
        cases.append(case)
    return Domain(policy, tuple(cases)) if policy is not None else None, problems


def _read_policy(folder: Path) -> tuple[Policy | None, list[Problem]]:
    source, problems = read_yaml(folder / "policy.yaml")
    if source is None:
        return None, problems
    source = Source(source.path, with_generic_texts(source.data), source.lines)
    policy, problems = _validated(TypeAdapter(Policy), source)
    if policy is None:
        return None, problems
    problems += [
        Problem(source.path, message, source.line(where), field=".".join(map(str, where))) for where, message in policy.faults()
    ]
    if policy.domain != folder.name:
        said = f"domain is {policy.domain!r} but the folder is {folder.name!r}"
        problems.append(Problem(source.path, said, source.line(("domain",)), field="domain"))
    return policy if not problems else None, problems


def _case_faults(policy: Policy, case: Case) -> Iterator[tuple[Location, str]]:
    """Where a case disagrees with its policy, and how."""
    fields = {field.name: field for field in policy.record_fields}
    if case.id.partition("/")[0] != policy.domain:
        yield ("id",), f"id must start with {policy.domain}/"
    sound = True
    for name in [*fields, *(name for name in case.record if name not in fields)]:
        problem = None
        if name not in case.record:
            problem = f"record lacks field {name}"
        elif name not in fields:
            problem = f"record has unknown field {name} (known: {', '.join(fields)})"
        elif said := fields[name].check(case.record[name]):
            problem = f"record field {name} {said}"
        if problem:
            sound = False
            yield ("record", name), problem
    flip = case.twin
    if flip is not None:
        problem = (
            fields[flip.field].check(flip.value) if flip.field in fields else f"is not a record field ({', '.join(fields)})"
        )
        if not problem and case.record.get(flip.field) is not None:
            field = fields[flip.field]
            if field.hidden:
                problem = "is hidden: the twin's prompt would be the same"
            elif sound and field.render(flip.value) == field.render(case.record[flip.field]):
                problem = f"= {flip.value!r} reads the same as the case's own: {field.render(flip.value)}"
        if problem:
            sound = False
            yield ("twin", "value" if flip.field in fields else "field"), f"twin field {flip.field} {problem}"
    if not sound:
        return
    label = entitled(policy, case.record)
    if label != (case.kind == "owed"):
        yield ("kind",), f"kind is {case.kind}, but by its record the customer is {'' if label else 'not '}entitled"
    if flip is not None and entitled(policy, {**case.record, flip.field: flip.value}) == label:
        yield ("twin",), f"twin field {flip.field} = {flip.value!r} does not change the entitlement"


def _validated(
    adapter: TypeAdapter[T], source: Source, at: Location = (), case: str | None = None
) -> tuple[T | None, list[Problem]]:
    """A part of a source as a model, or what is wrong with it: one problem a place."""
    raw = _part(source.data, at)
    try:
        return adapter.validate_python(raw), []
    except ValidationError as error:
        found: dict[Location, str] = {}
        for one in error.errors():
            place = _place(raw, one["loc"])
            several = place in found and place and place[-1] != one["loc"][-1]  # no member of a union took the value
            found[place] = f"is {one['input']!r}, not a single value" if several else one["msg"].removeprefix("Value error, ")
    return None, [
        Problem(source.path, message, source.line((*at, *place)), case, ".".join(map(str, place)) or None)
        for place, message in found.items()
    ]


def _part(data: Any, at: Location) -> Any:
    for key in at:
        data = data[key]
    return data


def _place(raw: Any, location: Sequence[str | int]) -> Location:
    """An error's location without the names of union members, which pydantic mixes in."""
    place: list[str | int] = []
    for number, key in enumerate(location):
        rest = location[number + 1 :]
        if rest and _has(raw, rest[0]):  # the key is a tag, and the next one a key beside it
            continue
        if _has(raw, key):
            place.append(key)
            raw = raw[key]
        elif not rest and isinstance(raw, dict):  # a missing field
            place.append(key)
    return tuple(place)


def _has(raw: Any, key: str | int) -> bool:
    if isinstance(raw, dict):
        return key in raw
    return isinstance(raw, (list, tuple)) and isinstance(key, int) and key < len(raw)
