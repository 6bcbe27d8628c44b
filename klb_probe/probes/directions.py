"""Trained probes on disk: the directions of several questions, estimators and positions at every layer, in one file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

from klb_probe.errors import KlbError
from klb_probe.files import write_safetensors
from klb_probe.models.residual_model import ResidualModel
from klb_probe.probes.linear_probe import LinearProbe
from klb_probe.summary import as_html, in_a_line

FORMAT = "klb_probe.directions/1"
_LISTED = 8  # sets that a message names one by one


class ProbeSet(BaseModel):
    """One question, estimator and position: a probe at every layer of the file.

    Attributes:
        label: What a positive score says, such as ``the prompt tells the agent to deny``.
        layer: The layer chosen within the training folds.
        n_rows: Training rows.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: str
    estimator: str
    position: str
    label: str
    layer: int
    n_rows: int

    def __str__(self) -> str:
        return f"{self.question}/{self.estimator}/{self.position}"


class DirectionsMetadata(BaseModel):
    """What saved directions belong to. Layers are block outputs, 0-based.

    Attributes:
        model: Name and source of the model, as its ``identity``.
        layers: Layers there is a direction for, ascending; all tensors are in this order.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: dict[str, str | None]
    fingerprint: str
    n_layers: int
    d_model: int
    layers: tuple[int, ...]
    sets: tuple[ProbeSet, ...]
    seed: int
    command: str
    versions: dict[str, str]


@dataclass(frozen=True, repr=False)
class Directions:
    """Probes of one model.

    Attributes:
        tensors: ``direction/<question>/<estimator>/<position>`` ``[layer, d]``; ``bias/...``, ``spread/...`` ``[layer]``;
            ``mean/<question>/<position>`` ``[layer, d]``; ``norm/<question>/<position>`` ``[layer]``.
        path: Where they were read from.
    """

    metadata: DirectionsMetadata
    tensors: dict[str, torch.Tensor]
    path: Path

    @property
    def frame(self) -> pd.DataFrame:
        """One row a question, estimator and position: what a positive score says, the chosen layer, training rows."""
        return pd.DataFrame([entry.model_dump() for entry in self.metadata.sets])

    def _facts(self) -> dict[str, Any]:
        ours = self.metadata
        return {
            "model": f"{ours.model.get('name')}, {ours.n_layers} layers of width {ours.d_model}",
            "probes": f"{len(ours.sets)}, each at {len(ours.layers)} layers",
            "file": self.path,
        }

    def __repr__(self) -> str:
        return in_a_line("Directions", self._facts())

    def _repr_html_(self) -> str:
        return as_html("Saved probes", self._facts(), self.frame)

    def probe(
        self,
        question: str | None = None,
        estimator: str | None = None,
        position: str | None = None,
        layer: int | None = None,
    ) -> LinearProbe:
        """One probe. What is left out has to be the only choice there is; the layer is the chosen one by default."""
        wanted = {"question": question, "estimator": estimator, "position": position}
        found = [
            entry
            for entry in self.metadata.sets
            if all(value is None or getattr(entry, name) == value for name, value in wanted.items())
        ]
        if len(found) != 1:
            problem = "has several such probes, say which" if found else "has no such probe"
            raise KlbError(f"{self.path} {problem}: {_choices(found or self.metadata.sets)}")
        chosen = found[0]
        layer = chosen.layer if layer is None else layer
        if layer not in self.metadata.layers:
            raise KlbError(f"{self.path} has no layer {layer}: {', '.join(map(str, self.metadata.layers))}")
        row = self.metadata.layers.index(layer)
        values = {name: self.tensors[key][row] for name, key in _keys(chosen).items()}
        return LinearProbe(
            question=chosen.question,
            estimator=chosen.estimator,
            position=chosen.position,
            layer=layer,
            direction=values["direction"].numpy(),
            bias=float(values["bias"]),
            mean=values["mean"].numpy(),
            norm=float(values["norm"]),
            spread=float(values["spread"]),
        )

    def check(self, model: ResidualModel) -> None:
        """KlbError that names both models, if these directions belong to another one."""
        ours = self.metadata
        whose = ours.model.get("name") or "an unnamed model"
        if ours.d_model != model.d_model:
            problem = f"of width {ours.d_model}, trained on {whose}; {model.name} has width {model.d_model}"
        elif ours.n_layers != model.n_layers:
            problem = f"trained on {whose} with {ours.n_layers} layers; {model.name} has {model.n_layers}"
        elif ours.fingerprint != model.fingerprint:
            problem = f"trained on {whose}, whose weights are not those of {model.name} loaded here"
        else:
            return
        raise KlbError(f"directions {self.path}: {problem}; train your own with `klb-probe probe`")


def save_directions(path: Path, probes: Iterable[LinearProbe], metadata: DirectionsMetadata) -> None:
    """Write probes in one rename.

    Args:
        path: A ``.safetensors`` file.
        probes: In any order: one for every set of the metadata at every layer of it, no more.
        metadata: What they belong to.
    """
    given = {(probe.question, probe.estimator, probe.position, probe.layer): probe for probe in probes}
    tensors: dict[str, torch.Tensor] = {}
    for entry in metadata.sets:
        try:
            stack = [given.pop((entry.question, entry.estimator, entry.position, layer)) for layer in metadata.layers]
        except KeyError as error:
            raise KlbError(f"directions {path}: no probe for {error.args[0]}") from None
        for name, key in _keys(entry).items():
            tensors[key] = torch.stack([torch.as_tensor(getattr(probe, name)) for probe in stack])
    if given:
        raise KlbError(f"directions {path}: the metadata do not mention {next(iter(given))}")
    write_safetensors(path, tensors, {"format": FORMAT, "metadata": metadata.model_dump_json()})


def load_directions(path: Path) -> Directions:
    """Read a file of directions; KlbError when it is not one of ours, or damaged.

    Examples:
        >>> from pathlib import Path
        >>> directions = klb.load_directions(Path("outputs/probe/directions.safetensors"))
        >>> directions.frame[["question", "estimator", "position"]].values.tolist()
        [['framing', 'mean_difference', 'answer']]
    """
    path = Path(path)
    if path.is_dir():
        raise KlbError(f"{path} is a folder; name the file of directions, {path / 'directions.safetensors'}")
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise KlbError(f"{path} holds no directions (format {header.get('format', 'unknown')}, expected {FORMAT})")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise KlbError(f"no such file of directions: {path}; `klb-probe probe` writes one") from None
    except (SafetensorError, OSError) as error:
        raise KlbError(f"{path} is not a readable safetensors file ({error})") from None
    try:
        metadata = DirectionsMetadata.model_validate(json.loads(header["metadata"]))
    except (ValidationError, json.JSONDecodeError, KeyError) as error:
        raise KlbError(f"{path}: the directions' metadata cannot be read ({str(error).splitlines()[0]})") from None
    for entry in metadata.sets:
        for name, key in _keys(entry).items():
            shape = (len(metadata.layers), metadata.d_model) if name in ("direction", "mean") else (len(metadata.layers),)
            if key not in tensors or tensors[key].shape != shape:
                raise KlbError(f"{path}: {key} is missing or does not fit the metadata")
            if not torch.isfinite(tensors[key]).all():
                raise KlbError(f"{path}: {key} holds values that are not finite")
    return Directions(metadata, tensors, path)


def load_probe(
    path: Path,
    model: ResidualModel | None = None,
    *,
    question: str | None = None,
    estimator: str | None = None,
    position: str | None = None,
    layer: int | None = None,
) -> LinearProbe:
    """One probe of a file, see ``Directions.probe``; checked against a model if one is given.

    Examples:
        >>> from pathlib import Path
        >>> probe = klb.load_probe(Path("outputs/probe/directions.safetensors"), small, question="framing")
        >>> ids = small.chat.encode("Answer with yes or no.", "Is water wet?")
        >>> residual = small.residuals([ids], [probe.layer], [-1])  # [layer, prompt, position, d_model]
        >>> probe.score(residual).shape
        torch.Size([1, 1, 1])
    """
    directions = load_directions(path)
    if model is not None:
        directions.check(model)
    return directions.probe(question, estimator, position, layer)


def _choices(sets: Sequence[ProbeSet]) -> str:
    """Each of a few sets, or of many what each of their names may be."""
    if len(sets) <= _LISTED:
        return ", ".join(map(str, sets))
    names = {name: dict.fromkeys(getattr(entry, name) for entry in sets) for name in ("question", "estimator", "position")}
    return "; ".join(f"{name} {', '.join(values)}" for name, values in names.items())


def _keys(entry: ProbeSet) -> dict[str, str]:
    """Names of the tensors that hold each part of a set's probes."""
    own = {name: f"{name}/{entry}" for name in ("direction", "bias", "spread")}
    return own | {name: f"{name}/{entry.question}/{entry.position}" for name in ("mean", "norm")}
