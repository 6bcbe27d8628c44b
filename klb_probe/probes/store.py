"""Residuals on disk, each under the hash of the token ids and positions it was read at.

A folder of safetensors shards, one folder a model and type of number. A shard holds ``residuals`` ``[layer, entry, d_model]``,
so that one layer of many entries is read without the others, and in its header the entries' keys and whose residuals they are.
Shards are written whole under names of their own and never changed: what a run had read when it stopped is kept, and several
processes may write at once.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from klb_probe.errors import KlbError
from klb_probe.files import safe_name, write_safetensors
from klb_probe.models.residual_model import ResidualModel
from klb_probe.probes.site import Site

FORMAT = "klb_probe.residuals/1"
SHARD_ENTRIES = 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TENSOR = "residuals"


@dataclass
class ResidualStore:
    """What has been read of one model. As a context manager it writes what is left in its buffer at the end, come what may.

    Attributes:
        folder: Of the shards.
        facts: Whose residuals they are and how they are stored: what every shard's header must say.
        dtype: Type of number on disk.
        entries: Most entries of a shard; so many are lost when a process is killed.
    """

    folder: Path
    facts: dict[str, str]
    dtype: torch.dtype
    entries: int = SHARD_ENTRIES
    _places: dict[str, tuple[Path, int]] = field(default_factory=dict)  # key -> shard, entry
    _shards: set[Path] = field(default_factory=set)
    _keys: list[str] = field(default_factory=list)
    _buffer: list[Tensor] = field(default_factory=list)

    @classmethod
    def open(cls, root: Path, model: ResidualModel, dtype: str = "auto", *, entries: int = SHARD_ENTRIES) -> ResidualStore:
        """The store of a model below a folder; nothing is written yet.

        Args:
            root: Folder of stores.
            model: The model.
            dtype: ``float32`` or ``bfloat16``; ``auto`` is bfloat16 for models in bfloat16, and float32 for all others.
            entries: Most entries of a shard.

        Raises KlbError for another type, and for a shard that cannot be read or is of another model.
        """
        stored, computed = _dtype_name(dtype, model.dtype), str(model.dtype).removeprefix("torch.")
        facts = {
            "format": FORMAT,
            "model": model.name,
            "identity": json.dumps(model.identity, sort_keys=True),
            "fingerprint": model.fingerprint,
            "settings": model.settings,
            "n_layers": str(model.n_layers),
            "d_model": str(model.d_model),
            "computed_in": computed,
            "dtype": stored,
        }
        name = safe_name(model.name)
        suffix = stored if stored == computed else f"{stored}-of-{computed}"
        store = cls(
            Path(root) / f"{name}-{model.fingerprint[:12]}-{model.settings[:6]}-{suffix}", facts, DTYPES[stored], entries
        )
        store._scan()
        return store

    @property
    def n_layers(self) -> int:
        """Blocks of the model."""
        return int(self.facts["n_layers"])

    @property
    def d_model(self) -> int:
        """Width of the model."""
        return int(self.facts["d_model"])

    def __len__(self) -> int:
        """Residuals on disk, as far as this process knows."""
        return len(self._places)

    def __enter__(self) -> ResidualStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def missing(self, sites: Sequence[Site]) -> list[int]:
        """Indices of the sites that nobody has read yet; shards that other processes wrote since are taken in."""
        self._scan()
        buffered = set(self._keys)
        return [index for index, site in enumerate(sites) if site.key not in self._places and site.key not in buffered]

    def add(self, keys: Sequence[str], residuals: Tensor) -> None:
        """Take residuals ``[layer, entry, d_model]``, to be written with others.

        Raises KlbError, naming the layer, if some are not finite in the type of the store.
        """
        if residuals.shape != (expected := (self.n_layers, len(keys), self.d_model)):
            raise KlbError(f"residuals have shape {tuple(residuals.shape)}, not {expected} (layer, entry, d_model)")
        stored = residuals.to("cpu", self.dtype)
        if not (finite := torch.isfinite(stored).all(-1).all(-1)).all():
            layer = int((~finite).nonzero()[0, 0])
            raise KlbError(f"{self.facts['model']}: residuals of layer {layer} are not finite in {self.facts['dtype']}")
        self._keys += keys
        self._buffer.append(stored)
        if len(self._keys) >= self.entries:
            self.flush()

    def flush(self) -> None:
        """Write what is in the buffer."""
        if not self._keys:
            return
        path = self.folder / f"{uuid.uuid4().hex}.safetensors"
        header = {**self.facts, "keys": json.dumps(self._keys)}
        write_safetensors(path, {_TENSOR: torch.cat(self._buffer, dim=1)}, header)
        self._take_in(path, self._keys)
        self._keys, self._buffer = [], []

    def load(self, sites: Sequence[Site], layer: int) -> np.ndarray:
        """Residuals ``[site, d_model]`` of one layer, float32.

        Raises KlbError for sites that are not on disk and for shards that can no longer be read.
        """
        if not 0 <= layer < self.n_layers:
            raise KlbError(f"{self.facts['model']} has layers 0-{self.n_layers - 1}, not {layer}")
        if absent := sum(site.key not in self._places for site in sites):
            raise KlbError(f"{absent} of {len(sites)} residuals are not in {self.folder}; extract them first")
        found = np.empty((len(sites), self.d_model), np.float32)
        wanted: dict[Path, list[tuple[int, int]]] = {}
        for index, site in enumerate(sites):
            path, entry = self._places[site.key]
            wanted.setdefault(path, []).append((index, entry))
        for path, places in wanted.items():
            rows, entries = map(list, zip(*places, strict=True))
            try:
                with safe_open(path, "pt") as file:
                    found[rows] = file.get_slice(_TENSOR)[layer].float().numpy()[entries]
            except (SafetensorError, OSError) as error:
                raise _unreadable(path, error) from None
        return found

    def _scan(self) -> None:
        """Take in shards that are new in the folder. Those being written have hidden names."""
        for path in sorted(self.folder.glob("[!.]*.safetensors")):
            if path not in self._shards:
                self._take_in(path, self._read_keys(path))

    def _take_in(self, path: Path, keys: Sequence[str]) -> None:
        self._shards.add(path)
        for entry, key in enumerate(keys):
            self._places.setdefault(key, (path, entry))

    def _read_keys(self, path: Path) -> list[str]:
        """Keys of a shard whose header and shape are as they must be."""
        try:
            with safe_open(path, "pt") as file:
                header = file.metadata() or {}
                shape = file.get_slice(_TENSOR).get_shape() if _TENSOR in file.keys() else None  # noqa: SIM118 (no mapping)
            keys = json.loads(header.pop("keys", "null"))
        except (SafetensorError, OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        if header.get("format") != FORMAT:
            raise KlbError(f"{path} holds no residuals (format {header.get('format', 'unknown')}); move it away")
        for name in ("fingerprint", "n_layers", "d_model", "computed_in", "dtype"):
            if header.get(name) != self.facts[name]:
                theirs, ours = (f"{facts.get('model')} ({name} {facts.get(name)})" for facts in (header, self.facts))
                raise KlbError(f"{path} is of {theirs}, not of {ours}; move it away")
        if not isinstance(keys, list) or shape != [self.n_layers, len(keys), self.d_model]:
            raise _unreadable(path, f"its residuals have shape {shape}")
        return keys


def _dtype_name(asked: str, computed: torch.dtype) -> str:
    if asked == "auto":
        return "bfloat16" if computed == torch.bfloat16 else "float32"
    if asked == "float16":
        raise KlbError("residuals are not stored in float16: those of some models exceed its range; use float32 or bfloat16")
    if asked not in DTYPES:
        raise KlbError(f"residuals are stored in auto, {' or '.join(DTYPES)}, not {asked}")
    return asked


def _unreadable(path: Path, why: Any) -> KlbError:
    return KlbError(f"residuals in {path} cannot be read ({why}); delete it, and they are read again by the next run")
