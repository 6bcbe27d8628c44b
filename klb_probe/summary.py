"""What a result says of itself in a line and in a notebook: what it is, of which model, how many, its key numbers."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import pandas as pd


def in_a_line(what: str, facts: Mapping[str, Any]) -> str:
    """``Margins(model: smollm2-135m; prompts: 64)``."""
    return f"{what}({'; '.join(f'{name}: {value}' for name, value in facts.items())})"


def as_html(what: str, facts: Mapping[str, Any], table: pd.DataFrame | None = None, note: str = "") -> str:
    """A heading, the facts, a small table and a note, as HTML; every text is shown as it is, tags and all."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items())
    # Notebooks align table cells to the right; these hold words.
    parts = [f"<strong>{escape(what)}</strong>", f'<table style="text-align: left"><tbody>{rows}</tbody></table>']
    if table is not None and len(table):
        parts.append(table.to_html(index=False, border=0, escape=True, na_rep="-"))
    if note:
        parts.append(f"<p><em>{escape(note)}</em></p>")
    return f"<div>{''.join(parts)}</div>"


def number(value: float | None, digits: int = 2) -> str:
    """A number as it is printed, "-" for none."""
    if value is None or pd.isna(value):
        return "-"
    return f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0: what rounds to zero has no sign


def estimate(line: Any) -> str:
    """``0.56 [0.38, 0.72]`` of a row's value, low and high; without the bracket where there is no interval."""
    interval = "" if pd.isna(line.low) else f" [{number(line.low)}, {number(line.high)}]"
    return f"{number(line.value)}{interval}"
