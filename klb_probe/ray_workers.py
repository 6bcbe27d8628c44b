"""Shards on the workers of a Ray cluster: one a GPU, or so many on CPUs. A worker that dies has its shard done again.

The cluster is the one in RAY_ADDRESS, else one started on this machine and stopped at the end. Its machines need this package
and a shared file system: shards are files, as those of Slurm tasks, and are merged as those are.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from klb_probe.errors import KlbError
from klb_probe.files import write_json
from klb_probe.outputs import check_writable
from klb_probe.sharding import Shard

RETRIES = 3
PLAN = "plan.json"
_PART = re.compile(r"\d+-of-(\d+)(\.|$)")


def in_shards(
    work: Callable[..., None],
    arguments: dict[str, Any],
    out: Path,
    join: Callable[[Sequence[Path], Path], Any],
    *,
    workers: int | None = None,
    most: int | None = None,
    asked: Any,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """Do work in as many shards as there are workers, and put the shards together.

    Shards lie in ``<out>.shards`` until they are merged; after a failure they stay there, to be gone on with.

    Args:
        work: A command's function, called in a worker with ``arguments`` and the ``shard`` (``"i/n"``) and ``out`` of its part.
            It may be called again for the same part after its worker died.
        arguments: Of the work.
        out: What is written in the end, a folder or a lens file.
        join: Makes ``out`` of the parts.
        workers: How many; by default one a GPU of the cluster.
        asked: What decides the result, as JSON takes it: shards of another call are not gone on with.
        most: Parts that the work has, where a shard without one would fail: there are no more workers than these.
        device: With ``cpu``, workers take no GPU.
        resume: Go on with the shards of a stopped call.
        overwrite: Drop the shards of a stopped call.

    Raises:
        KlbError: Without ray, for shards of a stopped call unless one of the two is set, and for a shard whose worker died
            ``RETRIES`` + 1 times. What the work itself raises is raised here.
    """
    ray = _ray()
    folder = out.with_name(f"{out.name}.shards")
    check_writable(folder)
    before = _stopped(folder)
    if before and not (resume or overwrite):
        raise KlbError(f"{folder} holds shards of a stopped run; pass --overwrite to drop them (or --resume, if there is one)")
    if resume and not before and out.exists() and (out.is_file() or any(out.iterdir())):
        raise KlbError(f"{out} is there, and no shards to go on with in {folder}; pass --overwrite to start again")
    wanted = json.loads(json.dumps(asked, default=str))
    if resume and before and _read_plan(folder) != wanted:
        raise KlbError(f"{folder} holds shards of another call; give the same options, or --overwrite to drop them")
    with _cluster(ray):
        count, resources = _workers(ray, workers, most, device)
        if overwrite:
            _drop(folder)
        write_json(folder / PLAN, wanted)
        if resume and before - {count}:
            raise KlbError(f"{folder} holds shards of {max(before)} workers; pass --workers {max(before)}")
        shards = [Shard(i, count) for i in range(1, count + 1)]
        suffix = out.suffix if out.suffix in (".pt", ".safetensors") else ""
        parts = [folder / f"{shard.index}-of-{count}{suffix}" for shard in shards]
        task = ray.remote(max_retries=RETRIES, **resources)(_do)
        tasks = {
            task.remote(work, {**arguments, "shard": str(shard), "out": part.absolute()}, str(Path.cwd())): shard
            for shard, part in zip(shards, parts, strict=True)
        }
        _wait(ray, tasks)
    join(parts, out)
    _drop(folder)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise KlbError('--ray needs its library: pip install "klb-probe[ray]"') from error
    return ray


@contextlib.contextmanager
def _cluster(ray: Any) -> Iterator[None]:
    """The cluster this process is in, or that of RAY_ADDRESS, or one of its own."""
    if ray.is_initialized():
        yield
        return
    ray.init(ignore_reinit_error=True, logging_level=logging.WARNING)  # RAY_ADDRESS is looked at by ray itself
    try:
        yield
    finally:
        ray.shutdown()


def _workers(ray: Any, workers: int | None, most: int | None, device: str) -> tuple[int, dict[str, int]]:
    """How many workers, and what one takes of the cluster: a GPU, or its share of the CPUs, no more than one machine has."""
    total = ray.cluster_resources()
    gpus = 0 if device == "cpu" else int(total.get("GPU", 0))
    if not (workers or gpus):
        raise KlbError("the cluster has no GPU to count workers by; pass --workers N for workers on CPUs")
    count = min(workers or gpus, most or sys.maxsize)
    if gpus:
        return count, {"num_gpus": 1}
    largest = max(int(node["Resources"].get("CPU", 1)) for node in ray.nodes() if node["Alive"])
    return count, {"num_cpus": max(1, min(int(total.get("CPU", 1)) // count, largest))}


def _do(work: Callable[..., None], arguments: dict[str, Any], folder: str) -> None:
    """A shard, in a worker: in the caller's folder, with its messages on stderr."""
    os.chdir(folder)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("klb_probe").setLevel(logging.INFO)
    work(**arguments)


def _wait(ray: Any, tasks: dict[Any, Shard]) -> None:
    """Wait for all; the first that fails ends the others."""
    left = list(tasks)
    try:
        with tqdm(total=len(left), desc="shards", unit="shard", disable=None) as bar:
            while left:
                (done, *_), left = ray.wait(left)
                _result(ray, done, tasks[done])
                bar.update()
    finally:
        for task in left:
            ray.cancel(task, force=True)


def _result(ray: Any, task: Any, shard: Shard) -> None:
    try:
        ray.get(task)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise KlbError(f"shard {shard}: its worker died {RETRIES + 1} times ({why}); what is done is kept") from None


def _stopped(folder: Path) -> set[int]:
    """Of how many shards a folder holds parts."""
    return {int(match[1]) for path in folder.glob("*-of-*") if (match := _PART.match(path.name))}


def _read_plan(folder: Path) -> Any:
    path = folder / PLAN
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _drop(folder: Path) -> None:
    """Remove parts, and their folder if nothing else is in it."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if _PART.match(path.name) or path.name == PLAN:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()
