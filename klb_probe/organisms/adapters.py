"""Low-rank adapters (LoRA) from disk, checked against their base and merged into its weights: ``W + scale * B A``.

The files are those of ``peft`` (``adapter_config.json`` and ``adapter_model.safetensors``), but neither it nor ``trl`` is
needed here; ``organism.json`` beside them says which base the adapter was trained on, and how.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from klb_probe.errors import KlbError
from klb_probe.files import file_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG, WEIGHTS, SIDECAR = "adapter_config.json", "adapter_model.safetensors", "organism.json"
RECORDS = "records.txt"
# peft's wrapper around the model puts this before the names of its modules.
_PREFIX = "base_model.model."
_TENSOR = re.compile(rf"{re.escape(_PREFIX)}(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# Entries of adapter_config.json that leave `scale * B A` as it is, whatever they say. Any other must be empty.
_HARMLESS = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "r",
    "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora", "init_lora_weights", "megatron_core",
    "qalora_group_size",
}  # fmt: skip
_EMPTY: tuple[Any, ...] = (None, False, {}, [], "none")


class Lesson(BaseModel):
    """One training, as it is recorded.

    Attributes:
        adapter_sha256: Of what came out.
        data_command: What wrote the data, where their description says so.
        prompts: Number of examples by format and wording.
        settings: What decides the training beside data and seed.
        outcome: Steps done, minutes, and the last held-out numbers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    adapter_sha256: str
    data_sha256: str
    data_command: str = ""
    n_examples: int
    prompts: dict[str, int] = {}
    seed: int
    command: str
    settings: dict[str, Any]
    outcome: dict[str, Any]


class Organism(Lesson):
    """What ``organism.json`` says: what an adapter is, on which weights it stands, and how it was trained.

    Attributes:
        base: What ``--model`` named: an alias, a hub id or a folder.
        base_fingerprint: Of the base's weights (``HuggingFaceModel.fingerprint``).
        before: The trainings it went on from (``--start``), the first one first.
    """

    name: str
    base: str
    base_fingerprint: str
    base_gguf_sha256: str | None = None
    before: tuple[Lesson, ...] = ()
    versions: dict[str, str]
    licence: str

    @property
    def lessons(self) -> tuple[Lesson, ...]:
        """All its trainings, the last one last."""
        return (*self.before, Lesson(**{name: getattr(self, name) for name in Lesson.model_fields}))


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter in memory.

    Attributes:
        folder: Where it was read.
        organism: Its sidecar.
        rank: Of every pair.
        scale: Of ``B A``.
        pairs: By module name, A ``[rank, in]`` and B ``[out, rank]`` in float32.
        targets: Last parts of the names of the modules it changes.
    """

    folder: Path
    organism: Organism
    rank: int
    scale: float
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    targets: frozenset[str]


def read_organism(folder: Path) -> Organism:
    """The sidecar of an adapter folder; KlbError if it is absent or not one."""
    path = folder / SIDECAR
    if not path.is_file():
        raise KlbError(f"{folder} has no {SIDECAR}, so nothing says which base the adapter belongs to")
    try:
        return Organism.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise KlbError(f"{path} is not a sidecar of an adapter: {where + ': ' if where else ''}{first['msg']}") from error


def trained_records(folder: Path) -> frozenset[str] | None:
    """Hashes of the records of all lessons; None for an adapter that was trained on other things than records."""
    path = folder / RECORDS
    return frozenset(path.read_text(encoding="utf-8").split()) if path.is_file() else None


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter folder.

    Raises:
        KlbError: A file is absent, damaged or not the one the sidecar describes; the adapter is of a kind that is not plain
            low-rank adaptation; tensors do not come in pairs of one rank; a number is not finite.
    """
    organism = read_organism(folder)
    config = _read_config(folder / CONFIG)
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise KlbError(f"{folder} has no {WEIGHTS}")
    sha256 = file_sha256(weights)
    if sha256 != organism.adapter_sha256:
        raise KlbError(f"{weights} has sha256 {sha256[:12]}..., but {SIDECAR} says {organism.adapter_sha256[:12]}...")
    try:
        tensors = load_file(weights)
    except (SafetensorError, OSError) as error:
        raise KlbError(f"{weights} is not a safetensors file: {str(error).splitlines()[0]}") from error
    rank = config["r"]
    alpha = config["lora_alpha"]
    return Adapter(
        folder,
        organism,
        rank,
        alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank,
        _pairs(tensors, rank, weights),
        frozenset(config["target_modules"]),
    )


def merge(model: PreTrainedModel, adapter: Adapter, *, name: str, fingerprint: str) -> None:
    """Add an adapter to the weights of its base, in place, and store the sum in each weight's dtype.

    The product is computed in float64 on the CPU: in float32 its last bits, and so the fingerprint of the merged weights,
    would depend on the machine.

    Args:
        model: The base.
        adapter: What to add.
        name: How messages call the base.
        fingerprint: Of the base's weights.

    Raises:
        KlbError: The adapter belongs to another base, or its tensors are not those that its configuration means on this one.
            Nothing is changed then.
    """
    organism = adapter.organism
    modules = {path: module for path, module in model.named_modules() if path.rpartition(".")[2] in adapter.targets}
    for path, (a, b) in adapter.pairs.items():
        module = modules.get(path)
        if module is None:
            raise KlbError(f"adapter {organism.name} changes {path}, which {name} lacks: it belongs to {organism.base}")
        if not isinstance(module, nn.Linear):
            raise KlbError(f"adapter {organism.name} changes {path}, a {type(module).__name__}; only linear layers are merged")
        if module.weight.shape != (len(b), a.shape[1]):
            raise KlbError(
                f"adapter {organism.name} has shape {[len(b), a.shape[1]]} at {path}, but {name} {list(module.weight.shape)}: "
                f"it belongs to {organism.base}"
            )
        if module.weight is model.get_input_embeddings().weight:
            raise KlbError(f"adapter {organism.name} changes {path}, whose weights are also the embedding of {name}")
    if absent := [path for path in modules if path not in adapter.pairs]:
        raise KlbError(f"adapter {organism.name} lacks tensors for {len(absent)} modules that it targets, such as {absent[0]}")
    if fingerprint != organism.base_fingerprint:
        raise KlbError(f"adapter {organism.name} was trained on other weights than {name}'s: it belongs to {organism.base}")
    with torch.no_grad():
        for path, (a, b) in adapter.pairs.items():
            weight = modules[path].weight
            added = adapter.scale * (b.double() @ a.double())
            weight.copy_(weight.float() + added.float().to(weight.device))


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise KlbError(f"{path.parent} has no {path.name}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise KlbError(f"{path} is not JSON: {error}") from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise KlbError(f"{path}: only LoRA adapters are read, not {kind}")
    if odd := [key for key, value in config.items() if key not in _HARMLESS and value not in _EMPTY]:
        raise KlbError(f"{path}: {odd[0]} = {config[odd[0]]!r} is not supported; only plain LoRA is merged")
    if config.get("init_lora_weights") not in (True, False, None, "gaussian"):  # the others change the base itself
        raise KlbError(f"{path}: init_lora_weights = {config['init_lora_weights']!r} is not supported")
    rank, alpha, targets = (config.get(key) for key in ("r", "lora_alpha", "target_modules"))
    sound = isinstance(rank, int) and rank > 0 and isinstance(alpha, (int, float)) and math.isfinite(alpha)
    if not sound or not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise KlbError(f"{path}: r, lora_alpha and a list of target_modules are needed; got {rank}, {alpha}, {targets}")
    return config


def _pairs(tensors: dict[str, Tensor], rank: int, path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise KlbError(f"{path} holds {name}, which is no part of a plain LoRA adapter")
        if not torch.isfinite(tensor).all():
            raise KlbError(f"{path}: {name} has numbers that are not finite")
        sides.setdefault(match["module"], {})[match["side"]] = tensor.float()
    if not sides:
        raise KlbError(f"{path} holds no tensor")
    for module, pair in sides.items():
        if pair.keys() != {"A", "B"}:
            raise KlbError(f"{path} lacks lora_{'B' if 'A' in pair else 'A'} of {module}")
        if any(side.ndim != 2 for side in pair.values()) or {pair["A"].shape[0], pair["B"].shape[1]} != {rank}:
            raise KlbError(f"{path}: {module} is not of rank {rank}")
    return {module: (pair["A"], pair["B"]) for module, pair in sides.items()}
