"""The console that commands print to: nothing is cut off, whatever the width of the terminal."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.measure import Measurement

_ANY = 10_000  # columns


def page(width: int) -> Console:
    """A console as wide as the terminal, or of ``width`` characters in a pipe or a file. Text is printed as it is."""
    return Console(width=None if Console().is_terminal else width, highlight=False, markup=False)


def print_tables(console: Console, *tables: RenderableType) -> None:
    """Print tables whole: one that cannot be as narrow as the terminal keeps its width, and the terminal breaks its lines."""
    for table in tables:
        least = Measurement.get(console, console.options.update(max_width=_ANY), table).minimum
        wide = Console(file=console.file, width=max(least, console.width), highlight=False, markup=False)
        wide.print(table)
