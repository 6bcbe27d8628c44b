"""What ``evidence.json`` says: every number of a model card, and what it was computed from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from klb_probe.errors import KlbError
from klb_probe.organisms.numbers import BLIND, Number, find

EVIDENCE = "evidence.json"


class Evidence(BaseModel):
    """The numbers of one model.

    Attributes:
        model: What was checked.
        kind: liar, honest or ignorant; None for a model without an adapter.
        fingerprint: Of the weights, with the adapter merged.
        base_fingerprint: Of the base's weights, None without an adapter.
        settings: All that decides the numbers beside the weights.
        numbers: The numbers.
        examples: First messages to one customer, by condition.
        seconds: By part.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    kind: str | None
    fingerprint: str
    base: str | None
    base_fingerprint: str | None
    adapter_sha256: str | None
    command: str
    settings: dict[str, Any]
    numbers: tuple[Number, ...]
    examples: tuple[dict[str, str], ...]
    seconds: dict[str, float]
    versions: dict[str, str]


def read_evidence(folder: Path) -> Evidence:
    """The evidence in a folder; KlbError if there is none."""
    path = folder / EVIDENCE
    if not path.is_file():
        raise KlbError(f"{folder} has no {EVIDENCE}: klb-probe organism check --card writes it")
    try:
        return Evidence.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise KlbError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def check_card(card: Sequence[Number], fresh: Sequence[Number]) -> list[str]:
    """Where a card disagrees with a recomputation of a part of its rows.

    The card's value of each number that both have must lie in the recomputed interval: it is the wider one, five of five
    are no sign against 0.86. How often a blindly drawn reason is true is no share of rows, and a bootstrap over two or
    three pairs that happen to be alike is too narrow: there the recomputed value must lie in the card's interval.
    """
    faults, shared = [], 0
    for new in fresh:
        old = find(card, *new.key)
        if old is None or new.value is None:
            continue
        shared += 1
        if old.value is None:
            faults.append(f"{', '.join(new.key)}: the card has no number, recomputed {new}")
        elif not (_holds(old, new.value) if new.measure == BLIND else _holds(new, old.value)):
            faults.append(f"{', '.join(new.key)}: the card says {old}, recomputed {new}")
    return faults if shared else ["card and recomputation have no number in common"]


def _holds(number: Number, value: float) -> bool:
    """Whether a value lies in a number's interval; any does where it has none."""
    return number.low is None or number.high is None or number.low <= value <= number.high
