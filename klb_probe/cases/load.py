"""Reading domains (policy + cases) and framings from YAML, with labels computed and every error placed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from klb_probe.cases.schema import Case, Policy, Scalar
from klb_probe.errors import KlbError
from klb_probe.paths import data_dir

TWIN = "~twin"
T = TypeVar("T")


class Framing(BaseModel):
    """One framing of the system message: what it is for, and its paraphrases (Jinja over the policy's words)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    about: str
    paraphrases: tuple[str, ...] = Field(min_length=1)


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
    """A policy and its cases, as loaded from ``scenarios/domains/<name>``."""

    policy: Policy
    cases: tuple[Case, ...]

    def situations(self) -> list[Situation]:
        """Every case followed by its twin (2 x cases)."""
        return [self._situation(case, twin) for case in self.cases for twin in (False, True)]

    def _situation(self, case: Case, twin: bool) -> Situation:
        record = {**case.record, case.twin.field: case.twin.value} if twin else case.record
        return Situation(
            id=case.id + TWIN * twin,
            pair=case.id,
            domain=self.policy.domain,
            record={field.name: record[field.name] for field in self.policy.record_fields},
            opening=(case.twin.opening or case.opening) if twin else case.opening,
            entitled=entitled(self.policy, record),
        )


def entitled(policy: Policy, record: dict[str, Scalar]) -> bool:
    """Whether every requirement of the policy holds on the record."""
    return all(requirement.rule.holds(record) for requirement in policy.requirements)


def load_domains(names: Iterable[str] | None = None, root: Path | None = None) -> list[Domain]:
    """Load domains by name (all of them by default) from a scenarios folder (the project's by default).

    Raises KlbError naming file, case and field for anything unreadable, inconsistent or mislabelled.
    """
    folder = (root or data_dir("scenarios")) / "domains"
    known = sorted(path.parent.name for path in folder.glob("*/policy.yaml"))
    wanted = list(dict.fromkeys(names)) if names is not None else known
    if unknown := [name for name in wanted if name not in known]:
        raise KlbError(f"unknown domain {', '.join(unknown)}; known: {', '.join(known) or f'none in {folder}'}")
    return [_load_domain(folder / name) for name in wanted]


def load_framings(root: Path | None = None) -> dict[str, Framing]:
    """Load the framings, in file order."""
    path = (root or data_dir("scenarios")) / "framings.yaml"
    return _validate(TypeAdapter(dict[str, Framing]), _read_yaml(path), str(path))


def _load_domain(folder: Path) -> Domain:
    policy_path, cases_path = folder / "policy.yaml", folder / "cases.yaml"
    policy = _validate(TypeAdapter(Policy), _read_yaml(policy_path), str(policy_path))
    if policy.domain != folder.name:
        raise KlbError(f"{policy_path}: domain is {policy.domain!r} but the folder is {folder.name!r}")
    raw = _read_yaml(cases_path)
    if not isinstance(raw, list):
        raise KlbError(f"{cases_path}: expected a list of cases")
    cases = []
    for number, entry in enumerate(raw, 1):
        name = entry.get("id", f"number {number}") if isinstance(entry, dict) else f"number {number}"
        case = _validate(TypeAdapter(Case), entry, f"{cases_path}: case {name}")
        _check_case(policy, case, f"{cases_path}: case {case.id}")
        if case.id in {other.id for other in cases}:
            raise KlbError(f"{cases_path}: case {case.id}: id given twice")
        cases.append(case)
    return Domain(policy, tuple(cases))


def _check_case(policy: Policy, case: Case, where: str) -> None:
    fields = {field.name: field for field in policy.record_fields}
    if case.id.partition("/")[0] != policy.domain:
        raise KlbError(f"{where}: id must start with {policy.domain}/")
    for name in fields.keys() | case.record.keys():
        if name not in case.record:
            raise KlbError(f"{where}: record lacks field {name}")
        if name not in fields:
            raise KlbError(f"{where}: record has unknown field {name} (known: {', '.join(fields)})")
        if problem := fields[name].check(case.record[name]):
            raise KlbError(f"{where}: record field {name} {problem}")
    flip = case.twin
    if flip.field not in fields:
        raise KlbError(f"{where}: twin flips unknown field {flip.field}")
    if problem := fields[flip.field].check(flip.value):
        raise KlbError(f"{where}: twin field {flip.field} {problem}")
    label = entitled(policy, case.record)
    if label != (case.kind == "owed"):
        raise KlbError(f"{where}: kind is {case.kind}, but by its record the customer is {'' if label else 'not '}entitled")
    if entitled(policy, {**case.record, flip.field: flip.value}) == label:
        raise KlbError(f"{where}: twin field {flip.field} = {flip.value!r} does not change the entitlement")


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KlbError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise KlbError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except (yaml.YAMLError, ValueError) as error:  # a date that does not exist is a ValueError
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        raise KlbError(f"{path}:{line} not valid YAML ({getattr(error, 'problem', error)})") from None


def _validate(adapter: TypeAdapter[T], raw: Any, where: str) -> T:
    try:
        return adapter.validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise KlbError(f"{where}: {f'field {field}: ' if field else ''}{first['msg']}") from None
