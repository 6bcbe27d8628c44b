"""A fit on disk while it is under way: written whole every few prompts, so that a stopped one goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from klb_probe.errors import KlbError
from klb_probe.files import write_safetensors
from klb_probe.lens.sums import RunningSums

FORMAT = "klb_probe.fit_checkpoint/1"
SUFFIX = ".partial.safetensors"
_TENSORS = ("halves", "norms", "ids", "lengths")


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds: the sums, what they are sums of, and the prompts."""

    sums: RunningSums
    settings: dict[str, Any]
    prompts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Checkpoint:
    """Where a fit is kept while it is under way.

    Attributes:
        path: The file; beside the lens, see :meth:`beside`.
        every: Prompts between two writes: the most that a killed fit loses.
    """

    path: Path
    every: int = 8

    @classmethod
    def beside(cls, out: Path, every: int = 8) -> Checkpoint:
        """The checkpoint of a fit that is to write ``out``."""
        return cls(out.with_name(out.name + SUFFIX), every)

    def save(self, sums: RunningSums, settings: Mapping[str, Any], prompts: tuple[tuple[int, ...], ...]) -> None:
        """Write in one rename. The prompts are kept too: sampling them again would cost time and, on a GPU, differ."""
        state = {"index": sums.index, "used": sums.used, "normalise": sums.normalise}
        tensors = {
            "halves": sums.halves,
            "norms": sums.norms,
            "ids": torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32),
            "lengths": torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32),
        }
        header = {"format": FORMAT, "state": json.dumps(state), "settings": json.dumps(dict(settings))}
        write_safetensors(self.path, tensors, header)

    def load(self) -> Saved | None:
        """What is there, or None; KlbError for a file that is not a whole checkpoint."""
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                header = file.metadata() or {}
                if header.get("format") != FORMAT:
                    raise KlbError(f"{self.path} is not a checkpoint of a fit; move it away")
                found = {name: file.get_tensor(name) for name in _TENSORS}
            state, settings = json.loads(header["state"]), json.loads(header["settings"])
            lengths = found["lengths"].tolist()
            prompts = tuple(tuple(part.tolist()) for part in found["ids"].split(lengths))
            sums = RunningSums(found["halves"], found["norms"], **state)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise KlbError(f"checkpoint {self.path} cannot be read ({error}); pass --overwrite to start again") from None
        return Saved(sums, settings, prompts)

    def remove(self) -> None:
        """Forget it."""
        self.path.unlink(missing_ok=True)


def refuse_other_settings(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """KlbError naming every setting in which a checkpoint is not of the fit asked for."""
    differences = [
        f"{name} {_short(saved.get(name))}, not {_short(wanted.get(name))}"
        for name in dict.fromkeys([*saved, *wanted])
        if saved.get(name) != wanted.get(name)
    ]
    if differences:
        raise KlbError(
            f"checkpoint {path} is of another fit: {'; '.join(differences)}. Ask for the same fit, "
            "or pass --overwrite to start again"
        )


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
