"""From what a user types after ``--model`` to where the weights are: alias, hub id, local folder or GGUF file."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, model_validator

from klb_probe.errors import KlbError
from klb_probe.paths import data_dir

DEFAULT_MODEL = "smollm2-135m"


class PipGguf(BaseModel):
    """Weights inside a pip distribution, as one GGUF file of known content."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    distribution: str
    install: str
    sha256: str


class RegistryEntry(BaseModel):
    """One alias of ``registry.yaml``: a hub repository, or another alias with an adapter of the project on it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hub: str | None = None
    base: str | None = None
    adapter: str | None = None
    dtype: str | None = None
    pip_gguf: PipGguf | None = None
    notes: str = ""

    @model_validator(mode="after")
    def _one_place(self) -> RegistryEntry:
        if (self.base is None) != (self.adapter is None) or (self.hub is None) != (self.base is not None):
            raise ValueError("an alias has a hub repository, or a base and an adapter")
        return self


@dataclass(frozen=True)
class ModelSource:
    """Where the weights of a named model are; exactly one of ``gguf``, ``folder`` and ``hub`` is set.

    ``adapter`` is the folder of an adapter to be merged into them, ``base`` what they are called without it.
    """

    name: str
    gguf: Path | None = None
    folder: Path | None = None
    hub: str | None = None
    dtype: str | None = None
    sha256: str | None = None
    hint: str | None = None
    base: str | None = None
    adapter: Path | None = None


@cache
def registry() -> dict[str, RegistryEntry]:
    """The known aliases.

    Examples:
        >>> klb.registry()["smollm2-135m"].hub
        'HuggingFaceTB/SmolLM2-135M-Instruct'
    """
    raw = yaml.safe_load(Path(__file__).with_name("registry.yaml").read_text(encoding="utf-8"))
    return {alias: RegistryEntry.model_validate(entry) for alias, entry in raw.items()}


def resolve(name: str) -> ModelSource:
    """Find the weights a name stands for, without loading anything.

    An alias wins; then an existing path; then anything shaped ``owner/name`` is a hub id. Raises KlbError for the rest.

    Examples:
        >>> source = klb.resolve("smollm2-135m")
        >>> source.gguf.suffix, source.hub is None
        ('.gguf', True)
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
        if (path / "adapter_config.json").is_file():
            from klb_probe.organisms.adapters import read_organism

            return _with_adapter(path.resolve().name, read_organism(path).base, path.resolve())
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
    if entry.base and entry.adapter:
        kind, _, name = entry.adapter.partition("/")
        folder = data_dir(kind) / name
        if not folder.is_dir():
            raise KlbError(f"{alias} is {entry.base} with an adapter, but {folder} is absent: reinstall klb-probe")
        return _with_adapter(alias, entry.base, folder)
    if entry.pip_gguf:
        if path := _file_in_distribution(entry.pip_gguf.distribution):
            return ModelSource(name=alias, gguf=path, dtype=entry.dtype, sha256=entry.pip_gguf.sha256)
        return ModelSource(name=alias, hub=entry.hub, dtype=entry.dtype, hint=f"weights also come by: {entry.pip_gguf.install}")
    return ModelSource(name=alias, hub=entry.hub, dtype=entry.dtype)


def _with_adapter(name: str, base: str, adapter: Path) -> ModelSource:
    try:
        source = resolve(base)
    except KlbError as error:
        raise KlbError(f"the base of {adapter} cannot be found: {error}") from error
    if source.adapter:
        raise KlbError(f"{adapter} names {base} as its base, which has an adapter itself; only one is merged")
    return replace(source, name=name, base=base, adapter=adapter)


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
