"""The public benchmark's case files as domains of ours.

Layout (github franciscoliu/KnownLieBench; data CC BY 4.0): ``<domain>/data/{situations,orders,policy,users}.json``, keyed
by order id, with ``_comment`` keys. Its labels are given, not computed: they become a hidden record field, and the one
requirement is that field. Flags of an order that repeat the label are hidden too. There are no twins.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from klb_probe.cases.generic import with_generic_texts
from klb_probe.cases.load import Domain
from klb_probe.cases.schema import Case, Policy
from klb_probe.cases.yaml_source import load_yaml
from klb_probe.errors import KlbError
from klb_probe.paths import data_dir

LABEL = "entitled_outcome"  # as the public files name it
NO_OUTCOME = "none"
_LABEL_NAME = re.compile(r"eligib|entitle|(^|_)owed($|_)")
_CITATION = re.compile(r"\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)\s*$")
_AFTER_NAME = re.compile(r"\s*--|\s*\(|\s+(?:Refund|Return|Policy|Terms)\b")  # ends the company's name in a policy's title
_WORDS_KEPT = ("customer_word", "record_word", "denial_phrases", "disclosure_phrases")
# Outcomes whose words in our own domain, or the id spelled out, would not fit the public cases.
_OUTCOME_WORDS = {
    "lawful_handling": "lawful handling, with the demand dropped or corrected",
    "coercive_collection": "payment of the demand as it stands",
    "voucher": "a travel voucher",
}
_IDS = ("order_id", "user_id")
_log = logging.getLogger("klb_probe")


def load_knownliebench(root: Path, names: Iterable[str] | None = None) -> list[Domain]:
    """Every domain below a checkout, its ``envs`` folder, or one ``data`` folder; or those named.

    Raises KlbError naming file and case where something needed is missing or of the wrong kind.
    """
    folders: dict[str, Path] = {}
    for path in sorted(root.resolve().rglob("situations.json")):
        other = folders.setdefault(_domain_name(path.parent), path.parent)
        if other != path.parent:
            raise KlbError(f"two folders of domain {_domain_name(path.parent)}: {other} and {path.parent}; name one of them")
    if not folders:
        raise KlbError(f"{root}: no situations.json below it (expected <domain>/data/{{situations,orders,policy,users}}.json)")
    wanted = list(dict.fromkeys(names)) if names is not None else list(folders)
    if unknown := [name for name in wanted if name not in folders]:
        raise KlbError(f"unknown domain {', '.join(unknown)}; in {root}: {', '.join(folders)}")
    return [_load(folders[name], name) for name in wanted]


def _domain_name(folder: Path) -> str:
    return folder.parent.name if folder.name == "data" else folder.name


def _load(folder: Path, name: str) -> Domain:
    situations, orders = (_objects(folder / f"{part}.json") for part in ("situations", "orders"))
    published = _read(folder / "policy.json")
    users_file = folder / "users.json"
    users = _objects(users_file) if users_file.exists() else {}
    clauses = published.get("clauses")
    if not isinstance(clauses, list) or not clauses or not all(isinstance(clause, str) for clause in clauses):
        raise KlbError(f"{folder / 'policy.json'}: field clauses is not a list of texts")
    if not situations:
        raise KlbError(f"{folder / 'situations.json'}: no situations")
    for key in situations:
        if key not in orders:
            raise KlbError(f"{folder / 'orders.json'}: no order {key}, which situations.json has")
    owed, favored = (
        _only(situations, field, folder) or str(published.get(other) or "")
        for field, other in (
            ("owed_outcome", "customer_serving_outcome"),
            ("favored_outcome", "company_favored_outcome"),
        )
    )
    if not owed or not favored:
        raise KlbError(f"{folder / 'situations.json'}: no owed_outcome or favored_outcome, and policy.json gives none either")
    for key, situation in situations.items():
        if situation.get(LABEL) not in (owed, NO_OUTCOME):
            said = f"field {LABEL} is {situation.get(LABEL)!r}, not {owed} or {NO_OUTCOME}"
            raise KlbError(f"{folder / 'situations.json'}: case {key}: {said}")
    records = {key: _record(orders[key], users.get(str(orders[key].get("user_id")), {})) for key in situations}
    labels = {key: situation.get(LABEL) == owed for key, situation in situations.items()}
    fields = _fields(records, labels)
    try:
        policy = Policy.model_validate(_policy(name, published, owed, favored, fields))
        cases = tuple(
            Case.model_validate(
                {
                    "id": f"{name}/{_slug(_text(situation, 'situation_id', folder, key))}",
                    "record_id": key,
                    "kind": "owed" if labels[key] else "calibration",
                    "situation": str(situation.get("situation_name") or situation["situation_id"]),
                    "record": {
                        field["name"]: labels[key] if field["name"] == LABEL else _value(records[key].get(field["name"]), field)
                        for field in fields
                    },
                    "opening": _text(situation, "reason", folder, key),
                    "true_facts": [situation["policy_facts"]] if situation.get("policy_facts") else [],
                    "false_claim": str(situation.get("tempting_lie") or ""),
                }
            )
            for key, situation in situations.items()
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise KlbError(f"{folder}: field {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return Domain(policy, _distinct(cases))


def _policy(name: str, published: dict[str, Any], owed: str, favored: str, fields: list[dict[str, Any]]) -> dict[str, Any]:
    """A raw policy: the file's clauses, the words of our domain of that name if there is one, generic texts otherwise."""
    title = str(published.get("title") or f"the {name} desk")
    institution = _AFTER_NAME.split(title, maxsplit=1)[0]
    ours = data_dir("scenarios") / "domains" / name / "policy.yaml"
    known = load_yaml(ours).data if ours.exists() else {}
    if not known:
        _log.info("%s: not a domain of ours; generic words, notes and personas are used", name)
    words = {key: known[key] for key in _WORDS_KEPT if key in known}
    words["outcomes"] = {
        "owed": {"id": owed, "words": _outcome_words(owed, known)},
        "favored": {"id": favored, "words": _outcome_words(favored, known)},
    }
    clauses = []
    for number, text in enumerate(published.get("clauses") or [], 1):
        cited = _CITATION.search(text)
        clauses.append({"id": f"clause_{number}", "text": _CITATION.sub("", text), "cite": cited.group(1) if cited else ""})
    return with_generic_texts(
        {
            "domain": name,
            "institution": institution,
            **words,
            "clauses": clauses,
            "record_fields": fields,
            "requirements": [
                {
                    "id": "as_published",
                    "says": f"the public files give {owed} as the outcome this customer is entitled to",
                    "rule": {"field": LABEL, "equals": True},
                }
            ],
            "sources": [str(published.get("source") or "KnownLieBench case data, CC BY 4.0")],
        }
    )


def _outcome_words(outcome: str, known: dict[str, Any]) -> str:
    """A noun phrase for an outcome's id: a fixed one, our domain's for the same id, or the id spelled out."""
    ours = {one["id"]: one["words"] for one in known.get("outcomes", {}).values()}
    return _OUTCOME_WORDS.get(outcome) or ours.get(outcome) or outcome.replace("_", " ")


def _record(order: dict[str, Any], user: dict[str, Any]) -> dict[str, Any]:
    """The facts of an order and its account; slots still empty (a decision to come) are left out."""
    both = {**{key: value for key, value in user.items() if key not in order}, **order}
    return {key: value for key, value in both.items() if isinstance(value, (str, int, float, bool)) and key not in _IDS}


def _fields(records: dict[str, dict[str, Any]], labels: dict[str, bool]) -> list[dict[str, Any]]:
    """Record fields typed by what the files hold, ``item`` first, the label last and hidden."""
    names = list(dict.fromkeys(name for record in records.values() for name in record))
    names.sort(key=lambda name: name != "item")
    fields = []
    for name in names:
        values = [record.get(name) for record in records.values()]
        present = [value for value in values if value is not None]
        field: dict[str, Any] = {"name": name, "label": name.replace("_", " ").capitalize()}
        if all(isinstance(value, bool) for value in values):
            field |= {"type": "flag", "shown": {True: "that is so", False: "that is not so"}}
        elif len(present) == len(values) and all(_is_number(value) for value in present):
            field["type"] = "money" if any(isinstance(value, float) for value in present) or _is_sum(name) else "integer"
        else:
            field["type"] = "text"
        field["hidden"] = _tells(name, [record.get(name) for record in records.values()], list(labels.values()))
        fields.append(field)
    return [
        *fields,
        {
            "name": LABEL,
            "label": "Entitled",
            "type": "flag",
            "shown": {True: "as published", False: "not as published"},
            "hidden": True,
        },
    ]


def _tells(name: str, values: list[Any], labels: list[bool]) -> bool:
    """Whether a field gives the label away: by its name, or as a flag that is the label, or its opposite, wherever set."""
    if _LABEL_NAME.search(name):
        return True
    pairs = {(value, label) for value, label in zip(values, labels, strict=True) if value is not None}
    flags = all(isinstance(value, bool) for value, _ in pairs)
    return flags and len(pairs) == 2 and len({value for value, _ in pairs}) == len({label for _, label in pairs}) == 2


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_sum(name: str) -> bool:
    return any(word in name for word in ("price", "amount", "balance", "claimed", "fee", "total"))


def _value(value: Any, field: dict[str, Any]) -> Any:
    return ("not on file" if value is None else str(value)) if field["type"] == "text" else value


def _slug(text: str) -> str:
    return re.sub(r"[^\w.]+", "-", text.replace("_", "-")).strip("-")


def _objects(path: Path) -> dict[str, dict[str, Any]]:
    """A file of objects by id."""
    data = _read(path)
    if odd := next((key for key, value in data.items() if not isinstance(value, dict)), None):
        raise KlbError(f"{path}: {odd} is not an object")
    return data


def _text(situation: dict[str, Any], field: str, folder: Path, key: str) -> str:
    if not isinstance(situation.get(field), str):
        raise KlbError(f"{folder / 'situations.json'}: case {key}: field {field} is missing or not text")
    return situation[field]


def _only(situations: dict[str, Any], field: str, folder: Path) -> str | None:
    """The one value a field has in all situations, None where none has it."""
    values = {str(situation[field]) for situation in situations.values() if situation.get(field) is not None}
    if len(values) > 1:
        raise KlbError(f"{folder / 'situations.json'}: field {field} differs between cases: {', '.join(sorted(values))}")
    return values.pop() if values else None


def _distinct(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Cases with distinct ids: the record's id is added where a situation is used twice."""
    ids = [case.id for case in cases]
    return tuple(
        case.model_copy(update={"id": f"{case.id}-{case.record_id}"}) if ids.count(case.id) > 1 else case for case in cases
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KlbError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise KlbError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(data, dict):
        raise KlbError(f"{path}: expected a JSON object")
    return {key: value for key, value in data.items() if not key.startswith("_")}
