"""What a person reads after ``jlens``: two compact tables, what they show and what they do not."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from klb_probe.plots import LENS_TITLES

_SHOWN_LAYERS = 9

DOES_NOT_SHOW = (
    "Does not show: belief or intent. A margin is a linear reading of the residual stream along yes/no token directions, "
    "not a direct measure of either (the paper says the same of its Figure 6); any direction separates texts that differ "
    "on the surface, so an AUROC inside the random-readout band is no evidence of knowledge."
)


def shown_layers(n_layers: int) -> list[int]:
    """About nine layers, evenly spread, first and last included."""
    steps = min(_SHOWN_LAYERS, n_layers) - 1
    return sorted({round(i * (n_layers - 1) / steps) for i in range(steps + 1)}) if steps else [0]


def tables(summary: pd.DataFrame) -> RenderableType:
    """Margins, contrasts and AUROC at a few layers; ``summary.csv`` has all layers and the twin's margins too.

    The first lens fills the first two tables; AUROC stands beside its logit-lens twin and both random-readout nulls.
    """
    framings = framings_of(summary)
    differences = list(dict.fromkeys(summary.loc[summary["statistic"] == "framing_contrast", "framing"]))
    lenses = list(dict.fromkeys(summary["lens"]))
    lens, title = lenses[0], LENS_TITLES[lenses[0]]
    margins = [
        _Column(f"{framing}\n{_owed(label)}", lens, "mean_margin", framing, label)
        for framing in framings
        for label in (True, False)
    ]
    contrasts = [
        _Column(f"owed - not owed\n{framing}", lens, "entitlement_contrast", framing, None) for framing in framings
    ] + [
        _Column(f"{name.replace('minus', '-')}\n{_owed(label)}", lens, "framing_contrast", name, label)
        for name in differences
        for label in (True, False)
    ]
    auroc = [_Column(f"{LENS_TITLES[one]}\n{framing}", one, "auroc", framing, None) for one in lenses for framing in framings]
    return Group(
        _grid(summary, f"{title}: mean yes-minus-no margin in logits [95 % interval]", margins),
        _grid(summary, f"{title}: contrasts of the margin in logits [95 % interval]", contrasts),
        _grid(summary, "AUROC of entitlement [95 % interval] | 95th percentile of random readouts, folded", auroc),
    )


def framings_of(summary: pd.DataFrame) -> list[str]:
    """The framings of a summary, in order."""
    return list(dict.fromkeys(summary.loc[summary["statistic"] == "auroc", "framing"]))


def what_it_shows(summary: pd.DataFrame, model: str) -> str:
    """One sentence of the numbers, chosen without regard to their size."""
    framings = framings_of(summary)
    lens = summary["lens"].iloc[0]
    scores = summary[(summary["statistic"] == "auroc") & (summary["lens"] == lens)]
    last = scores["layer"].max()
    final, outside = [], []
    for framing in framings:
        line = scores[scores["framing"] == framing]
        final.append(f"{_value(line[line['layer'] == last].iloc[0], sign=False)} under {framing}")
        inner = line[line["layer"] < last]
        beyond = (inner["value"].clip(lower=1 - inner["value"]) > inner["null_q95"]).sum()
        outside.append(f"{beyond} of {len(inner)} layers under {framing}")
    sentence = (
        f"Shows: {model}'s own final margin tells owed from not owed with AUROC {', '.join(final)} "
        f"(n = {scores['n_pairs'].iloc[0]} pairs); before the last layer, the {LENS_TITLES[lens]} margin lies outside "
        f"its random-readout band in {', '.join(outside)} (a random direction would in about 1 of 20)"
    )
    moved = summary[(summary["statistic"] == "framing_contrast") & (summary["lens"] == lens) & (summary["layer"] == last)]
    for framing, rows in moved.groupby("framing", sort=False):
        owed = _value(rows[rows["entitled"]].iloc[0])
        not_owed = _value(rows[~rows["entitled"]].iloc[0])
        sentence += f"; {framing}, the final margin differs by {owed} where owed and {not_owed} where not"
    return sentence + "."


@dataclass(frozen=True)
class _Column:
    header: str
    lens: str
    statistic: str
    framing: str
    entitled: bool | None

    def rows(self, summary: pd.DataFrame) -> pd.DataFrame:
        """This column's estimates, by layer."""
        chosen = summary[
            (summary["lens"] == self.lens) & (summary["statistic"] == self.statistic) & (summary["framing"] == self.framing)
        ]
        return (chosen if self.entitled is None else chosen[chosen["entitled"] == self.entitled]).set_index("layer")


def _grid(summary: pd.DataFrame, title: str, columns: list[_Column]) -> RenderableType:
    grid = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    grid.add_column("layer", justify="right")
    cells: list[pd.Series] = []
    for column in columns:
        rows = column.rows(summary)
        first = rows.iloc[0]
        grid.add_column(f"{column.header}\nn={first['n']} ({first['n_pairs']} pairs)", justify="right", no_wrap=True)
        cells.append(rows.apply(_cell, axis=1))
    n_layers = int(summary["layer"].max()) + 1
    for layer in shown_layers(n_layers):
        grid.add_row(f"{layer}{' = own' if layer == n_layers - 1 else ''}", *(cell[layer] for cell in cells))
    return Group(Text(f"\n{title}", style="bold"), grid)


def _cell(row: pd.Series) -> str:
    if row["statistic"] != "auroc":
        return _value(row)
    return f"{_value(row, sign=False)} | {row['null_q95']:.2f}"


def _value(row: pd.Series, *, sign: bool = True) -> str:
    form = f"{'+' if sign else ''}.2f"
    if pd.isna(row["value"]):
        return "-"
    return f"{row['value']:{form}} [{row['low']:{form}}, {row['high']:{form}}]"


def _owed(entitled: bool) -> str:
    return "owed" if entitled else "not owed"
