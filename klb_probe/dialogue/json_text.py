"""JSON objects in what a model wrote: bare, fenced, inside prose, or broken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import json_repair

Wrapping = Literal["bare", "fenced", "surrounded", "repaired"]

# Lenient only about raw newlines and tabs inside strings, which models write all the time.
_DECODER = json.JSONDecoder(strict=False)
# Where an object can start, broken or not: a brace and a key (or nothing). A brace in prose, {name}, is none.
_START = re.compile(r"\{\s*(?:[\"'“}]|\w+\s*:)")
# Bounds on the work for hostile text: places looked at, and repairs, each of which reads all the rest.
_MAX_STARTS, _MAX_REPAIRS = 64, 4


@dataclass(frozen=True)
class Found:
    """An object and how it stood in the text: alone, alone in a code fence, with more text round it, or broken."""

    value: dict[str, Any]
    wrapping: Wrapping


def first_object(text: str, wanted: Callable[[dict[str, Any]], bool] = bool) -> Found | None:
    """The first JSON object of a text that is ``wanted`` (by default: not empty), mended if it must be, or None.

    Never raises. The inside of an object that could be read is not searched.
    """
    match, repairs = _START.search(text), 0
    for _ in range(_MAX_STARTS):
        if match is None:
            break
        start = match.start()
        value, end = _decode(text, start)
        if value is None and repairs < _MAX_REPAIRS:
            repairs += 1
            value = _repair(text[start:])
            if value is not None and wanted(value):
                return Found(value, "repaired")
        elif value is not None and wanted(value):
            return Found(value, _wrapping(text[:start], text[end:]))
        match = _START.search(text, end)
    return None


def _decode(text: str, start: int) -> tuple[dict[str, Any] | None, int]:
    """The object that starts at ``start`` and where it ends; None and the next character if it is not JSON."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start + 1


def _repair(text: str) -> dict[str, Any] | None:
    """The first object of broken JSON."""
    try:
        value = json_repair.loads(text, skip_json_loads=True)
    except Exception:  # whatever a guessing parser makes of arbitrary text, the answer is that it found nothing
        return None
    if isinstance(value, list):  # several objects, or an object and prose
        value = next((item for item in value if isinstance(item, dict)), None)
    return value if isinstance(value, dict) else None


def _wrapping(before: str, after: str) -> Wrapping:
    before, after = before.strip(), after.strip()
    if not before and not after:
        return "bare"
    return "fenced" if re.fullmatch(r"```\w*", before) and after in ("```", "") else "surrounded"


def whole(text: str) -> str:
    """Text that UTF-8 can carry: halves of an emoji, which a model can write as JSON escapes, become U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
