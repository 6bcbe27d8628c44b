"""How numbers and tables become JSON: short numbers, None for what is undefined, and printed tables as their cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table

from klb_probe.plots import LENS_TITLES

Json = Any
DIGITS = 4  # significant, of what is drawn
CURVE = ("value", "low", "high")


def short(values: Iterable[float], digits: int = DIGITS) -> list[float | None]:
    """Numbers to so many significant digits; None where there is none."""
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in np.asarray(list(values), float)]


def curve(rows: pd.DataFrame, x: str = "layer", columns: Mapping[str, str] | None = None) -> dict[str, Json]:
    """A line with its interval: ``x``, ``value``, ``low`` and ``high``; ``columns`` names the last three where they differ."""
    names = columns or {name: name for name in CURVE}
    return {"x": [int(at) for at in rows[x]], **{name: short(rows[column]) for name, column in names.items()}}


def plain(value: Any) -> Json:
    """A cell of a table as JSON holds it: None for what is missing, Python's own numbers."""
    if value is None or (not isinstance(value, (list, dict)) and pd.isna(value)):
        return None
    return value.item() if isinstance(value, np.generic) else value


def lens_title(name: str) -> str:
    """A lens as figures name it."""
    return LENS_TITLES.get(name, name)


def printed_table(table: Table, title: str = "") -> dict[str, Json]:
    """A table that a command prints, as its cells. "-" stands for what is undefined there; here such a cell is empty."""
    cells = [[_empty(str(cell)) for cell in column.cells] for column in table.columns]
    heads = [str(column.header).replace("-\n", "").replace("\n", " ") for column in table.columns]
    return {"title": title, "columns": heads, "rows": [list(row) for row in zip(*cells, strict=True)]}


def _empty(cell: str) -> str:
    return "" if cell == "-" else cell
