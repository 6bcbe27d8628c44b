"""Hook maps: where an architecture family keeps its blocks, final norm and unembedding (``hooks/*.yaml``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from klb_probe.errors import KlbError
from klb_probe.paths import data_dir


class Norm(BaseModel):
    """The final norm: ``rms`` or ``layer``; its gain is the weight itself (``plain``) or one plus it (``one_plus``).

    ``eps`` is needed only where the module does not say it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["rms", "layer"]
    gain: Literal["plain", "one_plus"] = "plain"
    eps: float | None = None


class HookMap(BaseModel):
    """One architecture family. Paths are candidates: exactly one of each list must exist on the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str
    model_types: tuple[str, ...] = Field(min_length=1)
    blocks: tuple[str, ...] = Field(min_length=1)
    final_norm: tuple[str, ...] = Field(min_length=1)
    unembed: tuple[str, ...] = Field(min_length=1)
    norm: Norm
    softcap: str | None = None  # config attribute that holds the final logit soft-cap


@dataclass(frozen=True)
class Layout:
    """A hook map resolved on one model."""

    map: HookMap
    blocks: nn.ModuleList
    final_norm: nn.Module
    unembed: nn.Module
    paths: dict[str, str]


def read_hook_map(path: Path) -> HookMap:
    """Read one hook map file."""
    try:
        return HookMap.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise KlbError(f"{path}: not a valid hook map (field {field or '-'}: {first['msg']})") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise KlbError(f"{path}: not a readable hook map ({str(error).splitlines()[0]})") from None


def find_hook_map(model: nn.Module, folders: Iterable[Path] = ()) -> HookMap:
    """The hook map for a model's type: from the given folders first, then the project's ``hooks/``.

    Raises KlbError that names the class and the file to add when there is none.
    """
    config = model.config
    types = {config.model_type, config.get_text_config().model_type}
    for folder in (*folders, data_dir("hooks")):
        if not folder.is_dir():
            raise KlbError(f"no such folder of hook maps: {folder}")
        for path in sorted(folder.glob("*.yaml")):
            hook_map = read_hook_map(path)
            if types & set(hook_map.model_types):
                return hook_map
    raise KlbError(
        f"no hook map for {type(model).__name__} (model_type {config.model_type}): add hooks/{config.model_type}.yaml "
        "after the pattern of hooks/llama.yaml, or pass its folder with --hooks"
    )


def resolve_layout(model: nn.Module, hook_map: HookMap) -> Layout:
    """Find the modules a hook map names; refuse when a path is missing, ambiguous, or has the wrong number of blocks."""
    found = {
        part: _only_match(model, getattr(hook_map, part), part, hook_map.family) for part in ("blocks", "final_norm", "unembed")
    }
    fits = {
        "blocks": isinstance(found["blocks"][1], nn.ModuleList),
        "final_norm": isinstance(found["final_norm"][1], nn.Module) and not isinstance(found["final_norm"][1], nn.Linear),
        "unembed": getattr(getattr(found["unembed"][1], "weight", None), "ndim", 0) == 2,
    }
    for part, right in fits.items():
        if not right:
            path, module = found[part]
            raise KlbError(f"hook map {hook_map.family}: {part} is {path}, a {type(module).__name__}, which is none")
    if hook_map.softcap and not hasattr(model.config.get_text_config(), hook_map.softcap):
        raise KlbError(f"hook map {hook_map.family}: the config has no softcap attribute {hook_map.softcap}")
    blocks = found["blocks"][1]
    expected = model.config.get_text_config().num_hidden_layers
    if len(blocks) != expected:
        raise KlbError(f"hook map {hook_map.family}: {found['blocks'][0]} has {len(blocks)} blocks, config says {expected}")
    return Layout(
        map=hook_map,
        blocks=blocks,
        final_norm=found["final_norm"][1],
        unembed=found["unembed"][1],
        paths={part: path for part, (path, _) in found.items()},
    )


def _only_match(model: nn.Module, candidates: tuple[str, ...], part: str, family: str) -> tuple[str, Any]:
    matches = [(path, module) for path in candidates if (module := _descend(model, path)) is not None]
    if len(matches) != 1:
        paths = ", ".join(path for path, _ in matches) or "none"
        raise KlbError(
            f"hook map {family}: expected one {part} on {type(model).__name__} among {', '.join(candidates)}; found {paths}"
        )
    return matches[0]


def _descend(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)  # attributes can exist and be None
        if module is None:
            return None
    return module
