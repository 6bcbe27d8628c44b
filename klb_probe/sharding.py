"""Work split over machines: which part is whose, and finished parts put together again.

The unit of a run and of its readout is the trajectory: its random streams are named after it, so that it is the same walk in
whichever part it is played. A part is a run (or signals) folder of its own; all parts, merged, hold what one process would
have written, in the order of the parts.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klb_probe.errors import KlbError
from klb_probe.files import file_sha256, replacing, write_json
from klb_probe.outputs import clear

if TYPE_CHECKING:
    from klb_probe.dialogue.trajectory import Row, Trajectories

RECORD = "run.json"
# What one part of a run, or of its signals, does not share with the others.
_OF_ONE_RUN_PART = ("arguments", "complete", "rounds", "versions")
_OF_ONE_SIGNALS_PART = ("positions", "rounds", "unmapped", "versions")
# Where and how a part was made, in the recorded arguments of a run.
_PLACE = {"shard": None, "resume": False, "overwrite": False}


@dataclass(frozen=True)
class Shard:
    """The ``index``-th (from 1) of ``count`` parts: items ``index - 1``, ``index - 1 + count``, ..."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """``"2/4"``; KlbError for anything else."""
        first, slash, second = text.partition("/")
        if not (slash and first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
            raise KlbError(f"--shard wants i/n with 1 <= i <= n, such as 2/4; got {text!r}")
        return cls(int(first), int(second))

    def of(self, items: Sequence[Any]) -> tuple[Any, ...]:
        """This shard's items."""
        return tuple(items[self.index - 1 :: self.count])

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def check_all_there(found: Sequence[tuple[Path, Shard]], command: str) -> None:
    """Raise KlbError for a shard that is there twice, and for those that are missing; ``command`` makes them."""
    seen: dict[int, Path] = {}
    for path, shard in found:
        if shard.index in seen:
            raise KlbError(f"{seen[shard.index]} and {path} are both shard {shard}")
        seen[shard.index] = path
    count = found[0][1].count
    if missing := [f"{i}/{count}" for i in range(1, count + 1) if i not in seen]:
        raise KlbError(f"shard {', '.join(missing)} is missing; make it with `{command} --shard`, then merge again")


def walk_of(file: Trajectories, row: Row) -> tuple[Any, ...]:
    """Which trajectory a row belongs to, among several files."""
    return (file.path, *(row.get(name) for name in ("condition", "initial", "sample")))


def walks_of(files: Iterable[Trajectories], shard: Shard | None) -> set[tuple[Any, ...]]:
    """The trajectories of a shard, counted in file order; all without one."""
    walks = list(dict.fromkeys(walk_of(file, row) for file in files for row in file.rows))
    return set(shard.of(walks) if shard else walks)


def shard_record(shard: Shard | None, files: Iterable[Trajectories]) -> dict[str, Any]:
    """What the manifest of a part of a readout says about it; nothing for the whole."""
    return {"shard": str(shard), "read": {file.path.name: file_sha256(file.path) for file in files}} if shard else {}


def merge(shards: Sequence[Path], out: Path) -> str:
    """Merge the shards of a run, or of its signals; says in words what was merged.

    Raises:
        KlbError: When they are not finished shards of one piece of work, one is given twice, or one is missing.
    """
    from klb_probe.signals.signals_file import MANIFEST

    for path in shards:
        if not path.is_dir():
            raise KlbError(f"no such folder: {path}")
    if all((path / MANIFEST).exists() for path in shards):
        return f"signals of {merge_signals(shards, out)['rounds']} rounds"
    if all((path / RECORD).exists() for path in shards):
        return f"{merge_runs(shards, out)['rounds']} rounds"
    raise KlbError(f"shards are folders of a run, each with {RECORD}, or of its signals, each with {MANIFEST}; or lens files")


def merge_runs(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Merge the shards of one run, with their sidecars and live signals; returns the merged ``run.json``."""
    from klb_probe.signals.signals_file import MANIFEST, SIGNALS

    parts = _parts(folders, RECORD, "klb-probe run", _OF_ONE_RUN_PART)
    files = _files_of(parts)
    live = [(folder / "signals" / MANIFEST).exists() for folder, _ in parts]
    if any(live) and not all(live):
        raise KlbError(f"{parts[live.index(False)][0]} has no signals, and other shards have; read them with klb-probe rounds")
    clear(out, [RECORD, *(path.name for kind in ("trajectories", "turns") for path in out.glob(f"{kind}_*.jsonl"))])
    for name, of_one_domain in files.items():
        _join_trajectories(of_one_domain, out / name)
    if all(live):
        merge_signals([folder / "signals" for folder, _ in parts], out / "signals")
    else:
        clear(out / "signals", (SIGNALS, MANIFEST))  # of a run that is replaced
    record = {**parts[0][1], "rounds": sum(one["rounds"] for _, one in parts)}
    del record["shard"], record["plan_sha256"]
    if "arguments" in record:
        record["arguments"] = {**record["arguments"], **_PLACE, "out": str(out)}
    write_json(out / RECORD, record)
    return record


def merge_signals(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Merge the shards of one readout of a run; returns the merged manifest."""
    import pyarrow.parquet as pq

    from klb_probe.signals.signals_file import MANIFEST, SIGNALS

    parts = _parts(folders, MANIFEST, "klb-probe rounds", _OF_ONE_SIGNALS_PART)
    schema = pq.read_schema(parts[0][0] / SIGNALS)
    with replacing(out / SIGNALS) as path, pq.ParquetWriter(path, schema, compression="zstd") as parquet:
        for folder, _ in parts:
            for batch in pq.ParquetFile(folder / SIGNALS).iter_batches():
                parquet.write_batch(batch)
    positions: Counter[str] = Counter()
    for _, one in parts:
        positions.update(one["positions"])
    manifest = {
        **{key: value for key, value in parts[0][1].items() if key not in ("shard", "read")},
        "positions": dict(positions),
        "rounds": sum(one["rounds"] for _, one in parts),
        "unmapped": [moment for _, one in parts for moment in one["unmapped"]],
    }
    write_json(out / MANIFEST, manifest)
    return manifest


def _parts(folders: Sequence[Path], name: str, command: str, own: Sequence[str]) -> list[tuple[Path, dict[str, Any]]]:
    """Folders with their records, in the order of the shards, checked to be finished, of one piece of work, and all there."""
    parts = [(folder, _record(folder / name, command)) for folder in folders]
    parts.sort(key=lambda part: Shard.parse(part[1]["shard"]).index)
    (first, one), *others = parts
    for folder, other in others:
        a, b = _shared(one, own), _shared(other, own)
        if different := sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key)):
            raise KlbError(f"{folder} is not of the same work as {first}: another {', '.join(different)}")
    check_all_there([(folder, Shard.parse(record["shard"])) for folder, record in parts], command)
    return parts


def _record(path: Path, command: str) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KlbError(f"{path}: cannot be read ({error})") from None
    if not (isinstance(record, dict) and record.get("shard")):
        raise KlbError(f"{path.parent} is not a shard; make shards with `{command} --shard i/n`")
    if not record.get("complete"):
        raise KlbError(f"shard {record['shard']}, {path.parent}, did not come to its end; go on with it (--resume), then merge")
    return record


def _shared(record: dict[str, Any], own: Sequence[str]) -> dict[str, Any]:
    """What all shards must agree on."""
    shared = {key: value for key, value in record.items() if key not in own}
    shared["shard"] = Shard.parse(record["shard"]).count
    if isinstance(lens := shared.get("lens"), dict):  # its hash says which, wherever it lies on a machine
        shared["lens"] = {key: value for key, value in lens.items() if key != "file"}
    return _anywhere(shared)


def _anywhere(said: Any) -> Any:
    """A record without the number of its GPU: shards may be made on several of one machine."""
    if isinstance(said, dict):
        return {key: value.partition(":")[0] if key == "device" else _anywhere(value) for key, value in said.items()}
    return said


def _files_of(parts: Sequence[tuple[Path, dict[str, Any]]]) -> dict[str, list[Trajectories]]:
    """The trajectory files of all parts by name; KlbError for one that is not finished, lacks rounds, or is of another run."""
    from klb_probe.dialogue.trajectory import read_trajectories

    files: dict[str, list[Trajectories]] = {}
    for folder, record in parts:
        mine = [read_trajectories(path) for path in sorted(folder.glob("trajectories_*.jsonl"))]
        if (found := sum(len(file.rows) for file in mine)) != record["rounds"] or not all(file.complete for file in mine):
            raise KlbError(f"{folder} holds {found} of its {record['rounds']} rounds; go on with it (--resume), then merge")
        for file in mine:
            files.setdefault(file.path.name, []).append(file)
    for first, *others in files.values():
        for file in others:
            if _meta(file) != _meta(first):
                raise KlbError(f"{file.path} and {first.path} differ in their run_meta: not of one run")
    return files


def _meta(file: Trajectories) -> Any:
    """What a file says of its run, whichever shard it is and on whichever GPU it was made."""
    return _anywhere({key: value for key, value in file.run_meta.items() if key != "shard"})


def _join_trajectories(files: Sequence[Trajectories], out: Path) -> None:
    """One domain's file and sidecar."""
    from klb_probe.dialogue.runner import summed_usage
    from klb_probe.dialogue.sidecar import sidecar_path

    meta = {key: value for key, value in files[0].run_meta.items() if key != "shard"}
    rows = [row for file in files for row in file.rows]
    sidecars = [path for file in files if (path := sidecar_path(file.path)).exists()]
    if not sidecars:
        sidecar_path(out).unlink(missing_ok=True)  # of a run that is replaced
    else:  # before the rows, as a run writes them
        with replacing(sidecar_path(out)) as partial, partial.open("wb") as joined:
            for path in sidecars:
                with path.open("rb") as turns:
                    shutil.copyfileobj(turns, joined)
    lines = [{"run_meta": meta}, *rows, {"usage_summary": summed_usage(rows)}]
    with replacing(out) as partial:
        partial.write_bytes(b"".join(json.dumps(line).encode("ascii") + b"\n" for line in lines))
