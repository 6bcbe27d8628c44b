"""Files written whole: to a neighbour first, then renamed into place."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary neighbour of ``path`` (same suffix) that takes its place on success and vanishes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o644)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


# Names that Windows keeps for devices, whatever follows a dot.
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10))}
_LONGEST = 60  # characters


def safe_name(text: str) -> str:
    """A part of a file name that every system takes: what cannot stand there becomes a hyphen, long text ends in its hash.

    >>> safe_name("owner/model:7b"), safe_name("aux.gguf"), safe_name("..")
    ('owner-model-7b', 'aux.gguf-', 'unnamed')
    """
    name = re.sub(r"[^\w.-]+", "-", text).strip("-.") or "unnamed"
    if len(name) > _LONGEST:
        name = f"{name[: _LONGEST - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return f"{name}-" if name.partition(".")[0].lower() in _DEVICES else name


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text whole."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")  # the same bytes, and so hashes, on every system


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON whole."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_safetensors(path: Path, tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    """Write tensors with header metadata whole."""
    from safetensors.torch import save_file

    with replacing(path) as partial:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata=metadata)


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
