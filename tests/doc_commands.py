"""What the documentation says to type: commands in fences and in running text, and files that pages give whole."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from klb_probe.cli import app

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "scenarios" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`((?:klb-probe|python -m klb_probe\.jlens) [^`]+)`")
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A fenced block: its info line and its text."""

    page: Path
    info: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that the block is the whole text of."""
        title = _TITLE.search(self.info)
        return title[1] if title else None

    @property
    def language(self) -> str:
        return self.info.partition(" ")[0]

    def commands(self) -> Iterator[str]:
        """Lines of this project's commands, continued lines put together."""
        if self.language in ("", "console", "bash", "sh"):
            for line in self.text.replace("\\\n", " ").splitlines():
                if line.startswith(("klb-probe ", "python -m klb_probe.jlens")):
                    yield line


def blocks(page: Path) -> list[Block]:
    """Fenced blocks of a page, in order."""
    return [Block(page, info.strip(), text) for info, text in _FENCE.findall(page.read_text(encoding="utf-8"))]


def mentioned(page: Path) -> list[str]:
    """Commands with arguments in the running text of a page."""
    return _SPAN.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))


def words_of(line: str) -> list[str]:
    """A command line's words after the program's name, ``--debug`` aside."""
    words = shlex.split(line, comments=True)
    words = ["jlens", *words[3:]] if words[0] == "python" else words[1:]
    return [word for word in words if word != "--debug"]


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that is meant, and what is left for it."""
    command, left = typer.main.get_command(app), list(words)
    while left and left[0] in getattr(command, "commands", {}):
        command = command.commands[left.pop(0)]
    return command, left


def parse(line: str) -> None:
    """Parse a whole command line as the command would, without running it; raises what click raises."""
    command, left = command_of(words_of(line))
    if not {"-h", "--help"} & set(left):
        command.make_context("klb-probe", left)


def unknown_options(line: str) -> list[str]:
    """Options in a line that its command does not have."""
    command, left = command_of(words_of(line))
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"-h", "--help"}
    return [word for word in left if word.startswith("--") and word.partition("=")[0] not in known]


def hook() -> Any:
    """The module that makes the command reference."""
    spec = importlib.util.spec_from_file_location("mkdocs_hook", ROOT / "docs" / "mkdocs_hook.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
