"""What one output brings to the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from klb_probe.report.data import Json

Tab = Literal["margins", "pairs", "tokens", "rounds", "behaviour", "pairing", "probes", "tables"]


@dataclass(frozen=True)
class View:
    """What a tab shows of an output.

    Attributes:
        tab: Which.
        data: What is needed at once.
        chunks: What is parsed when it is looked at, by name.
    """

    tab: Tab
    data: Json
    chunks: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One output on the page.

    Attributes:
        title: What it is, in a few words.
        folder: Where it was read from.
        facts: Name and value of what was run, for the overview.
        tables: Key figures, as printed tables.
        says: What the numbers say, in sentences of the command itself.
        limits: What they do not show.
        views: Its tabs.
    """

    title: str
    folder: str
    facts: Sequence[tuple[str, str]]
    tables: Sequence[Json] = ()
    says: Sequence[str] = ()
    limits: Sequence[str] = ()
    views: Sequence[View] = ()
