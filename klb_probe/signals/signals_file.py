"""The signals file: tidy Parquet, one row a (trajectory, round, turn, position, lens, layer), and its manifest.

Written round by round, so that memory does not grow with their number; in place only when whole.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from klb_probe.files import replacing, write_json
from klb_probe.signals.rounds import RoundSignals

SIGNALS, MANIFEST = "signals.parquet", "signals.json"
JOIN_KEYS = ("agent", "domain", "condition", "initial", "sample", "round")
_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("agent", "domain", "condition", "initial")),
        *((name, pa.int32()) for name in ("sample", "round")),
        *((name, pa.string()) for name in ("case", "order_id")),
        ("turn", pa.int32()),
        *((name, pa.string()) for name in ("position", "lens")),
        *((name, pa.int32()) for name in ("layer", "n_tokens")),
        *((name, pa.float32()) for name in ("margin", "own_margin")),
    ]
)


class SignalsSink:
    """Takes what was read, round by round.

    Attributes:
        positions: Moments read, by kind.
        unmapped: Moments that could not be found, with where and why.
        rounds: Rounds added.
    """

    def __init__(self, write: Callable[[list[dict[str, Any]]], None]) -> None:
        self._write = write
        self.positions: Counter[str] = Counter()
        self.unmapped: list[dict[str, Any]] = []
        self.rounds = 0

    def add(self, row: Mapping[str, Any], signals: RoundSignals) -> None:
        """Add what was read in one round."""
        keys = _keys(row)
        if signals.rows:
            self._write([{**keys, **one} for one in signals.rows])
        self.positions.update(kind for _, kind in {(one["turn"], one["position"]) for one in signals.rows})
        self.unmapped += [{**keys, "turn": one.turn, "position": one.kind, "why": one.why} for one in signals.unmapped]
        self.rounds += 1

    def skip(self, row: Mapping[str, Any], why: str) -> None:
        """Say that a round could not be read at all."""
        self.unmapped.append({**_keys(row), "turn": -1, "position": "round", "why": why})


class Collected(SignalsSink):
    """Keeps the rows in memory, as ``lines``."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        super().__init__(self.lines.extend)


def _keys(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row.get(name) for name in (*JOIN_KEYS, "case", "order_id")}


@contextlib.contextmanager
def signals_file(folder: Path, about: Mapping[str, Any]) -> Iterator[SignalsSink]:
    """A folder's signals file and manifest, in place once everything is read."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / SIGNALS) as path, pq.ParquetWriter(path, _SCHEMA, compression="zstd") as parquet:
        writer = SignalsSink(lambda lines: parquet.write_table(pa.Table.from_pylist(lines, schema=_SCHEMA)))
        yield writer
    write_json(
        folder / MANIFEST,
        {
            **about,
            "positions": dict(writer.positions),
            "rounds": writer.rounds,
            "unmapped": writer.unmapped,
            "complete": True,
        },
    )
