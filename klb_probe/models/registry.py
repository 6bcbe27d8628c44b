"""From what a user types after ``--model`` to where the weights are: alias, hub id, local folder or GGUF file."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

from klb_probe.errors import KlbError

DEFAULT_MODEL = "smollm2-135m"


class PipGguf(BaseModel):
    """Weights inside a pip distribution, as one GGUF file of known content."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    distribution: str
    install: str
    sha256: str


class RegistryEntry(BaseModel):
    """One alias of ``registry.yaml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hub: str
    dtype: str | None = None
    pip_gguf: PipGguf | None = None
    notes: str = ""


@dataclass(frozen=True)
class ModelSource:
    """Where the weights of a named model are; exactly one of ``gguf``, ``folder`` and ``hub`` is set."""

    name: str
    gguf: Path | None = None
    folder: Path | None = None
    hub: str | None = None
    dtype: str | None = None
    sha256: str | None = None
    hint: str | None = None


@cache
def registry() -> dict[str, RegistryEntry]:
    """The known aliases."""
    raw = yaml.safe_load(Path(__file__).with_name("registry.yaml").read_text(encoding="utf-8"))
    return {alias: RegistryEntry.model_validate(entry) for alias, entry in raw.items()}


def resolve(name: str) -> ModelSource:
    """Find the weights a name stands for, without loading anything.

    An alias wins; then an existing path; then anything shaped ``owner/name`` is a hub id. Raises KlbError for the rest.
    """
    entries = registry()
    if name in entries:
        return _resolve_alias(name, entries[name])
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise KlbError(f"no such GGUF file: {path}")
        return ModelSource(name=path.stem, gguf=path.resolve())
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise KlbError(f"{path} is not a model folder: it has no config.json (a GGUF model is named by its file)")
        return ModelSource(name=path.resolve().name, folder=path.resolve())
    if path.is_file():
        raise KlbError(f"{path} is neither a model folder nor a .gguf file")
    is_path = name.startswith((".", "/", "~")) or os.sep in name.replace("/", "", 1) or name.count("/") > 1
    if is_path:
        raise KlbError(f"no such model folder: {path}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return ModelSource(name=name, hub=name, hint=f"{name} is no folder here, so it was taken for a hub id")
    close = difflib.get_close_matches(name, entries, n=1)
    raise KlbError(
        f"unknown model {name!r}{f' (did you mean {close[0]}?)' if close else ''}; known aliases: {', '.join(entries)}; "
        "or give a hub id (owner/name), a folder or a .gguf file"
    )


def _resolve_alias(alias: str, entry: RegistryEntry) -> ModelSource:
    if entry.pip_gguf:
        if path := _file_in_distribution(entry.pip_gguf.distribution):
            return ModelSource(name=alias, gguf=path, dtype=entry.dtype, sha256=entry.pip_gguf.sha256)
        return ModelSource(name=alias, hub=entry.hub, dtype=entry.dtype, hint=f"weights also come by: {entry.pip_gguf.install}")
    return ModelSource(name=alias, hub=entry.hub, dtype=entry.dtype)


def _file_in_distribution(distribution: str) -> Path | None:
    """The .gguf file a pip distribution installed (read, never imported)."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    return None
