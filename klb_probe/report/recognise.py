"""What a folder holds: which command wrote it, and whether it is whole and of this version."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from klb_probe.errors import KlbError

Kind = Literal["jlens", "tokens", "run", "signals", "score", "pair", "probe", "contest", "organism"]
# The one file that tells a folder, and what it is; run.json belongs to several commands and says which.
_MARKS: dict[str, Kind] = {
    "pairing.json": "pair",
    "panel.json": "score",
    "signals.json": "signals",
    "evidence.json": "organism",
}
_COMMANDS = ("jlens", "run", "probe", "contest")
_TRAJECTORIES = "trajectories_*.jsonl"
# What commands put inside another command's folder by default.
_INSIDE: dict[Kind, tuple[str, ...]] = {
    "run": ("score", "signals"),
    "signals": ("pairs",),
    "organism": ("rounds",),
}
_KNOWN = "jlens, run, rounds, score, pair, probe, contest, organism check"


@dataclass(frozen=True)
class Output:
    """The output of one command.

    Attributes:
        kind: What it is; ``tokens`` is ``jlens --positions all``.
        path: Its folder.
        record: Its JSON record; empty for trajectory files without one.
    """

    kind: Kind
    path: Path
    record: dict[str, Any] = field(repr=False)

    def table(self, name: str, columns: Iterable[str], *, text: Iterable[str] = ()) -> pd.DataFrame:
        """One of its CSV files; KlbError if it is missing, cannot be read, or lacks columns.

        Columns named in ``text`` are taken word for word: a token may read "nan", or be nothing.
        """
        path = self.path / name
        try:
            names = list(pd.read_csv(path, nrows=0))
            words = [name for name in text if name in names]
            # Commands write what is undefined as nothing; a name may be "None", and a token "nan".
            gaps = {name: [""] for name in names if name not in words}
            read = pd.read_csv(path, keep_default_na=False, na_values=gaps, dtype=dict.fromkeys(words, str))
        except FileNotFoundError:
            raise KlbError(f"{path} is missing: run the command again") from None
        except (ValueError, OSError) as error:
            raise KlbError(f"{path} cannot be read ({str(error).splitlines()[0]})") from None
        if missing := [column for column in columns if column not in read]:
            raise KlbError(f"{path} lacks {', '.join(missing)}: another version wrote it; run the command again")
        return read

    def of(self, *keys: str) -> Any:
        """A value of the record, by its path of keys; KlbError if it is not there."""
        value: Any = self.record
        for key in keys:
            if not isinstance(value, dict) or key not in value:
                raise KlbError(f"{self.path} does not record {'.'.join(keys)}: another version wrote it; run the command again")
            value = value[key]
        return value


def recognise(folders: Iterable[Path]) -> list[Output]:
    """The outputs in folders, each once, and those that commands put inside them by default.

    Raises KlbError for a folder that is missing, empty or of no known command, that did not come to its end, or that another
    version wrote.
    """
    found: dict[Path, Output] = {}
    for folder in folders:
        for output in _outputs(folder):
            found.setdefault(output.path.resolve(), output)
    return list(found.values())


def _outputs(folder: Path) -> Iterator[Output]:
    output = _output(folder)
    yield output
    for name in _INSIDE.get(output.kind, ()):
        inside = folder / name
        # A folder without any of these is one that a command has begun and not filled yet.
        if any((inside / mark).is_file() for mark in _MARKS) or any(inside.glob(_TRAJECTORIES)):
            yield from _outputs(inside)


def _output(folder: Path) -> Output:
    if not folder.is_dir():
        raise KlbError(f"{folder} is {'a file, not a folder' if folder.exists() else 'not there'}; give output folders")
    if not any(folder.iterdir()):
        raise KlbError(f"{folder} is empty")
    for name, kind in _MARKS.items():
        if (folder / name).is_file():
            return _checked(Output(kind, folder, _read(folder / name)))
    if (folder / "run.json").is_file():
        record = _read(folder / "run.json")
        command = record.get("command")
        if command not in _COMMANDS:
            raise KlbError(f"{folder} is of {command or 'an unknown command'}; a report shows {_KNOWN}")
        return _checked(Output("tokens" if record.get("position") == "all" else command, folder, record))
    if any(folder.glob(_TRAJECTORIES)):  # the public runner's, or of klb-probe organism check
        return Output("run", folder, {})
    raise KlbError(f"{folder} holds no output of {_KNOWN}")


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise KlbError(f"{path} cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise KlbError(f"{path} is not a record of a run")
    return value


def _checked(output: Output) -> Output:
    """The output; KlbError if it is unfinished or of another minor version, whose files may mean something else."""
    if output.kind != "run" and output.record.get("complete") is False:  # rounds are shown as far as they go
        raise KlbError(f"{output.path} has not come to its end; run the command again, with --resume where it has one")
    wrote, here = output.record.get("versions", {}).get("klb-probe"), importlib.metadata.version("klb-probe")
    if wrote is not None and _minor(wrote) != _minor(here):
        raise KlbError(f"{output.path} was written by klb-probe {wrote}, this is {here}; run the command again")
    return output


def _minor(version: str) -> list[str]:
    return str(version).split(".")[:2]
