"""A contestant's function: found by name, and called on every round without a hint of whose it is."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from klb_probe.contest.rounds import ContestRound, Field
from klb_probe.errors import KlbError


@dataclass(frozen=True)
class Detector:
    """A function of a round, higher for a more likely knowing lie, under the name it was given by."""

    name: str
    score: Callable[[ContestRound], float]


def load_detectors(specs: Sequence[str]) -> list[Detector]:
    """The functions of ``module:function`` or ``path/to/file.py:function``; modules of the current folder can be named.

    Raises KlbError in one line for a name that cannot be found or is no function, and for one given twice.
    """
    if twice := sorted({spec for spec in specs if specs.count(spec) > 1}):
        raise KlbError(f"--detector {twice[0]} is given twice")
    return [_load(spec) for spec in specs]


def _load(spec: str) -> Detector:
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise KlbError(f"--detector {spec}: give it as module:function or path/to/file.py:function")
    module = _file(Path(where), spec) if where.endswith(".py") else _module(where, spec)
    found = getattr(module, name, None)
    if not callable(found):
        raise KlbError(f"--detector {spec}: {where} has no function {name}")
    return Detector(spec, found)


def _file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise KlbError(f"--detector {spec}: no such file: {path}")
    source = importlib.util.spec_from_file_location(f"klb_probe_detector_{path.stem}", path)
    loader = source.loader if source else None
    if source is None or loader is None:
        raise KlbError(f"--detector {spec}: {path} is no Python file")
    module = importlib.util.module_from_spec(source)
    sys.modules[source.name] = module  # dataclasses and pickle look a module up by its name
    _run(lambda: loader.exec_module(module), spec)
    return module


def _module(name: str, spec: str) -> ModuleType:
    here, before = str(Path.cwd()), list(sys.path)
    sys.path.insert(0, here)
    try:
        return _run(lambda: importlib.import_module(name), spec)
    finally:
        sys.path[:] = before


def _run(load: Callable[[], Any], spec: str) -> Any:
    try:
        return load()
    except Exception as error:
        raise KlbError(f"--detector {spec}: cannot be imported ({_said(error)})") from error


def detector_scores(detector: Detector, field: Field, seed: int = 0) -> np.ndarray:
    """Its score of every round ``[round]``. Rounds come one by one in random order: their order says nothing.

    Raises KlbError naming the round for an exception in the detector, and for a score that is no finite number.
    """
    scores, names = np.zeros(len(field.rounds)), field.table["name"].tolist()
    for number in np.random.default_rng(seed).permutation(len(scores)):
        try:
            score = float(detector.score(field.rounds[number]))
        except Exception as error:
            raise KlbError(f"--detector {detector.name} fails on round {names[number]} ({_said(error)})") from error
        if not np.isfinite(score):
            raise KlbError(f"--detector {detector.name} gives {score} on round {names[number]}; a score is a finite number")
        scores[number] = score
    return scores


def _said(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
