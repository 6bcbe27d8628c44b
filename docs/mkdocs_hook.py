"""MkDocs hook: the command reference, made of the commands' own help whenever the site is built; names in docstrings."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import typer

from klb_probe.cli import app

MARKER = "<!-- command reference -->"
_ROLE = re.compile(r":(?:func|class|attr|meth|mod):<code>(?:~[\w.]*\.)?([\w.]+)</code>")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the reference where a page has the marker."""
    return markdown.replace(MARKER, reference()) if MARKER in markdown else markdown


def on_page_content(content: str, **_: Any) -> str:
    """Docstrings name others as Sphinx has it (``:func:`name```): the name alone stays."""
    return _ROLE.sub(r"<code>\1</code>", content)


def commands() -> Iterator[tuple[str, Any]]:
    """Every command and group of commands: what one types, and the click command."""
    yield from _below("klb-probe", typer.main.get_command(app))


def examples(command: Any) -> list[str]:
    """The commands that a command's help gives as its example, in order."""
    lines = (line.removeprefix("Example:").strip() for line in (command.epilog or "").split("\n\n"))
    return [line for line in lines if line]


def reference() -> str:
    """All commands as Markdown."""
    return "\n".join(line for name, command in commands() for line in _section(name, command))


def _below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for own, sub in getattr(command, "commands", {}).items():
        yield from _below(f"{name} {own}", sub)


def _section(name: str, command: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=name)
    subcommands = getattr(command, "commands", {})
    yield f"## {name}\n"
    yield f"```text\n{command.get_usage(context)}\n```\n"
    yield f"{_plain(command.help)}\n"
    if subcommands:
        yield "Commands: " + ", ".join(f"[`{own}`](#{name.replace(' ', '-')}-{own})" for own in subcommands) + "\n"
    yield "Example:\n\n```\n" + "\n".join(examples(command)) + "\n```\n"
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and "completion" not in one.name]
    if arguments:
        yield "| argument | |\n|---|---|"
        yield from (f"| `{(one.metavar or one.name).upper()}` | {_plain(one.help)} |" for one in arguments)
        yield ""
    if options:
        yield "| option | default | |\n|---|---|---|"
        yield from (
            f"| `{' / '.join([*one.opts, *one.secondary_opts])}` | {_default(one)} | {_plain(one.help)} |" for one in options
        )
        yield ""


def _default(option: Any) -> str:
    if option.required:
        return "needed"
    return "" if option.default in (None, False, "") else f"`{option.default}`"


def _plain(text: str | None) -> str:
    """Help as Markdown: what looks like HTML, a table's border or rich's escape is text."""
    return html.escape(text or "", quote=False).replace("|", "\\|").replace("\\[", "[").replace("*", "\\*")
