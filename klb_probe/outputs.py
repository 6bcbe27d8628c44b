"""Output folders: never overwritten unasked, and attributable through their ``run.json``."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from klb_probe.errors import KlbError
from klb_probe.files import safe_name


def default_folder(command: str, model: str) -> Path:
    """``outputs/<command>-<model>-<time>``."""
    return Path("outputs") / f"{command}-{safe_name(model)}-{dt.datetime.now():%Y%m%d-%H%M%S}"


def check_folder(folder: Path, *, overwrite: bool, resume: bool | None = None) -> None:
    """Refuse a folder that holds anything, unless told to overwrite or to resume; nothing is touched yet.

    ``resume`` is None for a command that has no such option.
    """
    if overwrite and resume:
        raise KlbError("pass --overwrite or --resume, not both")
    if folder.exists() and not folder.is_dir():
        raise KlbError(f"--out {folder} is a file, not a folder")
    check_writable(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (overwrite or resume):
        go_on = "" if resume is None else "--resume to continue that run or "
        raise KlbError(f"--out {folder} exists; pass {go_on}--overwrite to replace it, or name another folder")


def check_writable(path: Path) -> None:
    """Refuse a file or folder that could not be made, before any work is done."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if existing != path and not existing.is_dir():
        raise KlbError(f"{path} cannot be made: {existing} is a file")
    if not os.access(existing, os.W_OK) or existing.is_relative_to("/proc"):
        raise KlbError(f"{path} cannot be written: no permission in {existing}")


def clear(folder: Path, names: Iterable[str]) -> None:
    """Remove the files a command writes, and nothing else."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


def plain_argument(value: Any) -> Any:
    """A command's argument as ``run.json`` holds it."""
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    return str(value) if isinstance(value, Path) else value
