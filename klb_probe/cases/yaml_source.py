"""YAML files with the line of every value, so that an error can say where; cycles and repeated keys are errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from klb_probe.cases.schema import Location
from klb_probe.errors import KlbError

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where libyaml is there


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a file, and where."""

    file: Path
    message: str
    line: int | None = None
    case: str | None = None
    field: str | None = None

    def __str__(self) -> str:
        parts = [
            str(self.file),
            *([f"line {self.line}"] if self.line else []),
            *([f"case {self.case}"] if self.case else []),
            *([f"field {self.field}"] if self.field else []),
            self.message,
        ]
        return ": ".join(parts)


@dataclass(frozen=True)
class Source:
    """A file's value, and the lines its parts stand on."""

    path: Path
    data: Any
    lines: dict[Location, int] = field(default_factory=dict)

    def line(self, location: Location) -> int | None:
        """The line of a value, or of the innermost thing around it that has one."""
        return next((self.lines[location[:n]] for n in range(len(location), -1, -1) if location[:n] in self.lines), None)


def read_yaml(path: Path) -> tuple[Source | None, list[Problem]]:
    """Read a file with ``yaml.safe_load``'s types; the source is None where it cannot be read at all."""
    try:
        loader = _LOADER(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, [Problem(path, "no such file")]
    except UnicodeDecodeError as error:
        return None, [Problem(path, f"not UTF-8 text (byte {error.start})")]
    except yaml.YAMLError as error:  # characters YAML does not allow
        return None, [Problem(path, f"not valid YAML ({error})".replace("\n", " "))]
    try:
        root = loader.get_single_node()
        if root is None:
            return Source(path, None), []
        lines: dict[Location, int] = {}
        if problems := list(_faults(root, path, (), (), lines, loader)):
            return None, problems
        return Source(path, loader.construct_document(root), lines), []
    except RecursionError:
        return None, [Problem(path, "nested too deeply")]
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        said = f"not valid YAML ({getattr(error, 'problem', None) or error})"
        return None, [Problem(path, said, mark.line + 1 if mark else None)]
    finally:
        loader.dispose()


def load_yaml(path: Path) -> Source:
    """Read a file, or raise KlbError with its first problem."""
    source, problems = read_yaml(path)
    if source is None:
        raise KlbError(str(problems[0]))
    return source


def _faults(
    node: yaml.Node, path: Path, location: Location, above: tuple[yaml.Node, ...], lines: dict[Location, int], loader: Any
) -> Iterator[Problem]:
    """Cycles, repeated keys and impossible dates below a node; notes every value's line on the way."""
    lines[location] = node.start_mark.line + 1
    if any(node is one for one in above):
        yield Problem(path, "a cycle: an alias (*) to something it stands in", node.start_mark.line + 1)
        return
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield from _faults(item, path, (*location, number), (*above, node), lines, loader)
    elif isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else str(key)
            if name in seen:
                yield Problem(path, f"key {name} given twice", key.start_mark.line + 1)
            seen.add(name)
            yield from _faults(value, path, (*location, name), (*above, node), lines, loader)
            lines[(*location, name)] = key.start_mark.line + 1
    elif node.tag == "tag:yaml.org,2002:timestamp":
        try:
            loader.construct_object(node)
        except ValueError as error:
            field = ".".join(map(str, location[1:])) or None
            yield Problem(path, f"{node.value} is no date ({error})", node.start_mark.line + 1, field=field)
