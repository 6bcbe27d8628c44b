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
from klb_probe.models.architecture import refuse_unreadable
from klb_probe.paths import data_dir


class Norm(BaseModel):
    """The final norm: ``rms`` or ``layer``; its gain is the weight itself (``plain``) or one plus it (``one_plus``).

    ``eps`` is needed only where the module does not say it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["rms", "layer"]
    gain: Literal["plain", "one_plus"] = "plain"
    eps: float | None = None


class Scale(BaseModel):
    """What the head's logits are multiplied by: a number of the config, or one over it (``inverse``)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    attribute: str
    inverse: bool = False


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
    scale: Scale | None = None


@dataclass(frozen=True)
class Layout:
    """A hook map resolved on one model.

    Logits are ``softcap * tanh(scale * head(norm(residual)) / softcap)``, without the cap where ``softcap`` is None.
    """

    map: HookMap
    blocks: nn.ModuleList
    final_norm: Any  # modules of many classes, whose attributes a type checker does not know
    unembed: Any
    paths: dict[str, str]
    softcap: float | None
    scale: float


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
    config = _config(model)
    refuse_unreadable(config, type(model).__name__)
    for folder in (*folders, data_dir("hooks")):
        if not folder.is_dir():
            raise KlbError(f"no such folder of hook maps: {folder}")
        maps = [read_hook_map(path) for path in sorted(folder.glob("*.yaml"))]
        # A wrapper may do with the logits of its text model what the text model alone does not: its own type comes first.
        for kind in dict.fromkeys((config.model_type, config.get_text_config().model_type)):
            if found := [hook_map for hook_map in maps if kind in hook_map.model_types]:
                return found[0]
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
    blocks = found["blocks"][1]
    expected = _config(model).get_text_config().num_hidden_layers
    if len(blocks) != expected:
        raise KlbError(f"hook map {hook_map.family}: {found['blocks'][0]} has {len(blocks)} blocks, config says {expected}")
    return Layout(
        map=hook_map,
        blocks=blocks,
        final_norm=found["final_norm"][1],
        unembed=found["unembed"][1],
        paths={part: path for part, (path, _) in found.items()},
        softcap=_number(model, hook_map.softcap, "softcap", hook_map.family),
        scale=_scale(model, hook_map),
    )


def norm_eps(layout: Layout) -> float:
    """The final norm's epsilon: the module's own, else the hook map's."""
    norm = layout.final_norm
    said = [getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)]
    eps = said[0] if said else layout.map.norm.eps
    if eps is None:
        raise KlbError(f"hook map {layout.map.family}: {type(norm).__name__} does not say its eps; add norm.eps")
    return eps


def _scale(model: nn.Module, hook_map: HookMap) -> float:
    if hook_map.scale is None:
        return 1.0
    number = _number(model, hook_map.scale.attribute, "scale", hook_map.family)
    return 1.0 if number is None else 1 / number if hook_map.scale.inverse else number


def _config(model: nn.Module) -> Any:
    """A model's config, of which torch knows nothing."""
    return model.config


def _number(model: nn.Module, attribute: str | None, part: str, family: str) -> float | None:
    """A number of the text model's config, which may be None."""
    if attribute is None:
        return None
    config = _config(model).get_text_config()
    if not hasattr(config, attribute):
        raise KlbError(f"hook map {family}: the config has no {part} attribute {attribute}")
    return getattr(config, attribute)


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
