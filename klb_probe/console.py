"""The console that commands print to: nothing is cut off, whatever the width of the terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table

_ANY = 10_000  # columns


def page(width: int) -> Console:
    """A console as wide as the terminal, or of ``width`` characters in a pipe or a file. Text is printed as it is."""
    return Console(width=None if Console().is_terminal else width, highlight=False, markup=False)


def print_tables(console: Console, *tables: RenderableType) -> None:
    """Print tables whole: one that cannot be as narrow as the terminal keeps its width, and the terminal breaks its lines."""
    for table in tables:
        width = max(console.width, _fitted(console, table))
        Console(file=console.file, width=width, highlight=False, markup=False).print(table)


def _fitted(console: Console, shown: RenderableType) -> int:
    """Give the tables inside column widths that cut no word and no cell that is not to wrap; the width that this takes.

    Rich itself shrinks the widest columns first, whatever the length of their words.
    """
    if isinstance(shown, Group):
        return max(_fitted(console, one) for one in shown.renderables)
    options = console.options.update(max_width=_ANY)
    whole = Measurement.get(console, options, shown).maximum
    if not isinstance(shown, Table) or whole <= console.width:
        return 0  # text wraps, and a table that fits is printed as it is
    least, most = [], []
    for column in shown.columns:
        cells = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
        word, cell = max(one.minimum for one in cells), max(one.maximum for one in cells)
        most.append(max(column.min_width or 0, word, min(cell, column.max_width or cell)))
        least.append(most[-1] if column.no_wrap else max(column.min_width or 0, word))
    beside = whole - sum(most)  # padding and lines
    spare, wanted = max(0, console.width - beside - sum(least)), sum(most) - sum(least)
    for column, low, high in zip(shown.columns, least, most, strict=True):
        column.width = low + (spare * (high - low) // wanted if wanted else 0)
    return beside + sum(least)
