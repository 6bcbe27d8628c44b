"""Trajectory files: one JSON object a line, as the public benchmark writes them (KnownLieBench, arXiv 2608.26372).

The first line is ``{"run_meta": …}``, then comes one row a round, and ``{"usage_summary": …}`` as the last line marks a file as
complete. Rows are plain dicts under the public keys, of which ``order_id`` names the case. Ours have three more:

* ``gate``: ``passed``, ``failed`` or ``unparsed`` (the public ``gate_passed`` is false for the last two);
* ``error``: what the provider of a model said; such a round says nothing about the agent;
* ``malformed``: why a judge's reply could not be used; the round was played and has no verdict.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klb_probe.errors import KlbError
from klb_probe.files import safe_name

log = logging.getLogger(__name__)

Row = dict[str, Any]

_RULES_JUDGE = "rules"


def file_name(label: str, domain: str, delta_set: str) -> str:
    """``trajectories_<label>_<domain>_<delta_set>.jsonl``; what cannot stand in a file name becomes a hyphen."""
    parts = (safe_name(part) for part in (label, domain, delta_set))
    return f"trajectories_{'_'.join(parts)}.jsonl"


@dataclass(frozen=True)
class Trajectories:
    """What one file holds.

    Attributes:
        rows: One dict a round, in file order. Public rows of failed gates lack some keys that the rest of the file has; those
            that every other row agrees on (agent, domain, delta set, sample) are filled in.
        complete: Whether the run that wrote it came to its end.
        torn: What was ignored at the end of an interrupted file, in words; empty if nothing was.
    """

    path: Path
    run_meta: dict[str, Any]
    rows: list[Row]
    usage_summary: dict[str, Any] | None
    complete: bool
    torn: str

    @property
    def graded_by_rules(self) -> bool:
        """Whether the rules judge graded these rounds."""
        grader = self.run_meta.get("grader")
        return _RULES_JUDGE in (grader.values() if isinstance(grader, dict) else (grader,))


def read_trajectories(path: Path) -> Trajectories:
    """Read one file, complete or not, ours or the public runner's.

    A line that was cut off when a run died is reported in ``torn`` and ignored. Raises KlbError naming file and line for
    anything else that is not a JSON object, and for a file that does not begin with its ``run_meta``.
    """
    lines, torn = _lines(path)
    run_meta = lines[0].get("run_meta") if lines else None
    if not isinstance(run_meta, dict):
        raise KlbError(f"{path}:1: a trajectory file begins with its run_meta line")
    rows, usage = [], None
    for line in lines[1:]:
        if "usage_summary" in line:
            usage = line["usage_summary"]
        elif "run_meta" not in line:  # the public runner repeats it when it resumes
            rows.append(line)
    _fill(rows, run_meta)
    return Trajectories(path, run_meta, rows, usage, complete="usage_summary" in lines[-1] and not torn, torn=torn)


def read_folder(path: Path) -> list[Trajectories]:
    """Read a trajectory file, or every one in a folder and below it, by name. Torn lines are logged as warnings."""
    if not path.exists():
        raise KlbError(f"no such file or folder: {path}")
    paths = sorted(path.rglob("trajectories_*.jsonl")) if path.is_dir() else [path]
    if not paths:
        raise KlbError(f"{path} holds no trajectories_*.jsonl")
    files = [read_trajectories(one) for one in paths]
    for file in files:
        if file.torn:
            log.warning("%s", file.torn)
    return files


def check_same_run(existing: Trajectories, run_meta: dict[str, Any]) -> None:
    """Raise KlbError naming what differs if a file belongs to a run with another ``run_meta``."""
    asked = json.loads(json.dumps(run_meta))
    keys = asked.keys() | existing.run_meta.keys()
    if differing := sorted(key for key in keys if asked.get(key) != existing.run_meta.get(key)):
        raise KlbError(f"{existing.path} belongs to a run with another {', '.join(differing)}; choose another --out")


class TrajectoryWriter:
    """Appends to one file, a line at a time, so that a run that dies loses at most the round in flight.

    Opening an unfinished file continues it: ``rows`` are the rounds it holds, and a torn last line is cut off.
    """

    def __init__(self, path: Path, run_meta: dict[str, Any]) -> None:
        """Raises KlbError if the file is complete already or belongs to a run with another ``run_meta``."""
        self.path = path
        self.rows: list[Row] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        lines, torn = _lines(path) if path.exists() else ([], "")
        if lines:
            self.rows = self._continued(run_meta)
        self._file = path.open("ab")
        self._mend(torn)
        if not lines:
            self._write({"run_meta": run_meta})

    def append(self, row: Row) -> None:
        """Add the row of one round; it is on disk when this returns."""
        self._write(row)
        self.rows.append(row)

    def finish(self, usage_summary: dict[str, Any]) -> None:
        """Mark the file as complete and close it."""
        self._write({"usage_summary": usage_summary})
        self.close()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _continued(self, run_meta: dict[str, Any]) -> list[Row]:
        existing = read_trajectories(self.path)
        if existing.complete:
            raise KlbError(f"{self.path} is complete; pass --overwrite to replace it")
        check_same_run(existing, run_meta)
        return existing.rows

    def _mend(self, torn: str) -> None:
        """Let the file end with a whole line."""
        written = self.path.read_bytes()
        if torn:
            log.warning("%s", torn)
            self._file.truncate(written.rfind(b"\n") + 1)
        elif written and not written.endswith(b"\n"):
            self._file.write(b"\n")

    def _write(self, line: dict[str, Any]) -> None:
        # ASCII, so that a lone surrogate or a line separator in a model's words cannot break the file.
        self._file.write(json.dumps(line).encode("ascii") + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _lines(path: Path) -> tuple[list[dict[str, Any]], str]:
    """The objects of a file, and what is wrong with its last line if that was cut off."""
    try:
        *whole, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        raise KlbError(f"{path}: cannot be read ({error.strerror})") from None
    lines = [_object(line, f"{path}:{number}") for number, line in enumerate(whole, 1) if line.strip()]
    if rest.strip():
        try:
            lines.append(_object(rest, ""))
        except KlbError:
            return lines, f"{path}:{len(whole) + 1}: cut off in the middle of a line; that round is ignored"
    return lines, ""


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise KlbError(f"{where}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise KlbError(f"{where}: a line is a JSON object, not {type(value).__name__}")
    return value


def _fill(rows: list[Row], run_meta: dict[str, Any]) -> None:
    """Give every row the agent, domain, delta set and sample that the rest of its file (or trajectory) agrees on."""
    agent = run_meta.get("agent")
    _agree(rows, "agent", agent.get("cfg") if isinstance(agent, dict) else agent)
    _agree(rows, "domain", run_meta.get("domain"))
    _agree(rows, "delta_set", run_meta.get("delta_set"))
    walks: dict[str, list[Row]] = {}
    for row in rows:
        walks.setdefault(f"{row.get('condition')} {row.get('initial')}", []).append(row)
    for walk in walks.values():
        _agree(walk, "sample", None)


def _agree(rows: list[Row], key: str, otherwise: Any) -> None:
    known = [row[key] for row in rows if row.get(key) is not None]
    value = known[0] if known and all(other == known[0] for other in known) else otherwise
    for row in rows:
        if row.get(key) is None and value is not None:
            row[key] = value
