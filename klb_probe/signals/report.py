"""What a person reads after ``jlens``: two compact tables, what they show and what they do not."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from klb_probe.plots import LENS_TITLES, QUESTION_WORDS, framings_of, main_question, owed_words

_SHOWN_LAYERS = 9

DOES_NOT_SHOW = (
    "Does not show: belief or intent. A margin is a linear reading of the residual stream along yes/no token directions, "
    "not a direct measure of either (the paper says the same of its Figure 6); any direction separates texts that differ "
    "on the surface, so an AUROC inside the random-readout band is no evidence of knowledge."
)


def shown_layers(layers: list[int]) -> list[int]:
    """About nine of the layers, evenly spread, first and last included."""
    steps = min(_SHOWN_LAYERS, len(layers)) - 1
    return [layers[i] for i in sorted({round(i * (len(layers) - 1) / steps) for i in range(steps + 1)})] if steps else layers


def tables(summary: pd.DataFrame) -> RenderableType:
    """Margins, contrasts and scores at a few layers; ``summary.csv`` has all layers, and the twin's margins too.

    The first lens fills the first two tables; scores stand beside their random-readout nulls, and for the logit-lens
    twin too.
    """
    framings = framings_of(summary)
    questions = list(dict.fromkeys(summary.loc[summary["statistic"] == "mean_margin", "question"]))
    main = main_question(summary)
    differences = list(dict.fromkeys(summary.loc[summary["statistic"] == "framing_contrast", "framing"]))
    lenses = list(dict.fromkeys(summary["lens"]))
    lens, title = lenses[0], LENS_TITLES[lenses[0]]
    grids = []
    for question in questions:
        margins = [
            _Column(f"{framing}\n{owed_words(label)}", lens, "mean_margin", framing, question, label)
            for framing in framings
            for label in (True, False)
        ]
        grids += _grids(summary, f"{title}, {question} question: mean yes-minus-no margin in logits [95 % interval]", margins)
    contrasts = [
        _Column(f"owed - not owed\n{framing}", lens, "entitlement_contrast", framing, main, None) for framing in framings
    ] + [
        _Column(f"{name.replace('minus', '-')}\n{owed_words(label)}", lens, "framing_contrast", name, main, label)
        for name in differences
        for label in (True, False)
    ]
    asked = QUESTION_WORDS[main]
    grids += _grids(summary, f"{title}: contrasts of the margin toward owed, {asked}, in logits [95 % interval]", contrasts)
    for statistic, name in (
        ("auroc", "AUROC of entitlement"),
        ("pair_accuracy", "Pairs with owed above its twin"),
    ):
        columns = [
            _Column(f"{LENS_TITLES[one]}\n{framing}", one, statistic, framing, main, None)
            for one in lenses
            for framing in framings
        ]
        null = "null: 95th percentile of random readouts, folded"
        grids += _grids(summary, f"{name}, {asked} [95 % interval] | {null}", columns)
    share = summary[summary["statistic"] == "identity_share"].set_index("layer")["value"]
    if len(share):  # only a run with controls has it
        columns = [
            _Column(f"{LENS_TITLES[one]}\n{framing}", one, "agreement", framing, main, None)
            for one in lenses
            for framing in framings
        ]
        grids += _grids(summary, f"Prompts where the margin has the sign of the model's own, {asked} [95 % interval]", columns)
        shares = ", ".join(f"{share[layer]:.2f} at {layer}" for layer in shown_layers(sorted(share.index)))
        grids.append(Text(f"\nIdentity share tr(J)/d of the J-Lens by layer: {shares}"))
    return Group(*grids)


def what_it_shows(summary: pd.DataFrame, model: str) -> str:
    """One sentence of the numbers, chosen without regard to their size."""
    lens = summary["lens"].iloc[0]
    main = main_question(summary)
    table = summary[(summary["lens"] == lens) & (summary["question"] == main)]
    last = table["layer"].max()
    final, outside = [], []
    scores = [name for name in ("auroc", "pair_accuracy") if (table["statistic"] == name).any()]
    for framing in framings_of(summary):
        here = table[table["framing"] == framing]
        at_last = here[here["layer"] == last].set_index("statistic", drop=False)
        final.append(f"{' and '.join(_value(at_last.loc[name], sign=False) for name in scores)} under {framing}")
        inner = here[(here["statistic"] == scores[-1]) & (here["layer"] < last)]
        beyond = (inner["value"].clip(lower=1 - inner["value"]) > inner["null_q95"]).sum()
        outside.append(f"{beyond} of {len(inner)} layers under {framing}")
    n_cases, n_pairs = (table.loc[table["statistic"] == name, "n_pairs"].max() for name in (scores[0], scores[-1]))
    counted = f"{n_cases} cases" if len(scores) == 1 else f"{n_pairs} pairs"
    counted += f" of {n_cases} cases" if len(scores) == 2 and n_cases != n_pairs else ""
    share, orders = (", and share of pairs it orders rightly", "orders pairs") if len(scores) == 2 else ("", "orders prompts")
    sentence = (
        f"Shows ({QUESTION_WORDS[main]}): AUROC of {model}'s own final margin for entitlement{share}: {'; '.join(final)} "
        f"(chance 0.50; n = {counted}); below the last layer, the "
        f"{LENS_TITLES[lens]} margin {orders} outside its random-readout band in {', '.join(outside)} (a random direction: "
        "1 in 20, neighbouring layers together)"
    )
    moved = table[(table["statistic"] == "framing_contrast") & (table["layer"] == last)]
    for framing, rows in moved.groupby("framing", sort=False):
        owed, not_owed = (_value(rows[rows["entitled"] == label].iloc[0]) for label in (True, False))
        sentence += f"; {framing}, the final margin toward owed moves by {owed} where owed and {not_owed} where not"
    return sentence + "."


@dataclass(frozen=True)
class _Column:
    header: str
    lens: str
    statistic: str
    framing: str
    question: str
    entitled: bool | None

    def rows(self, summary: pd.DataFrame) -> pd.DataFrame:
        """This column's estimates, by layer."""
        chosen = summary[
            (summary["lens"] == self.lens)
            & (summary["statistic"] == self.statistic)
            & (summary["framing"] == self.framing)
            & (summary["question"] == self.question)
        ]
        return (chosen if self.entitled is None else chosen[chosen["entitled"] == self.entitled]).set_index("layer")


_MOST_COLUMNS = 4


def _grids(summary: pd.DataFrame, title: str, columns: list[_Column]) -> list[RenderableType]:
    """One grid for every four columns, so that a line fits a terminal; columns without an estimate are left out."""
    columns = [column for column in columns if len(column.rows(summary))]
    some = [columns[start : start + _MOST_COLUMNS] for start in range(0, len(columns), _MOST_COLUMNS)]
    return [_grid(summary, title, part) for part in some]


def _grid(summary: pd.DataFrame, title: str, columns: list[_Column]) -> RenderableType:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column("layer", justify="right")
    cells: list[pd.Series] = []
    prompts: list[int] = []
    units: list[int] = []
    for column in columns:
        rows = column.rows(summary)
        grid.add_column(column.header, justify="right")
        cells.append(rows.apply(_cell, axis=1))
        prompts.append(int(rows["n"].iloc[0]))
        units.append(int(rows["n_pairs"].iloc[0]))
    last = int(summary["layer"].max())
    for layer in shown_layers(sorted(cells[0].index)):
        grid.add_row(f"{layer}{' = own' if layer == last else ''}", *(cell.get(layer, "-") for cell in cells))
    unit = "pairs" if (summary["statistic"] == "pair_accuracy").any() else "cases"
    counted = f"n = {_range(prompts)} prompts, {_range(units)} {unit}"
    return Group(Text(f"\n{title}; a column: {counted}", style="bold"), grid)


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _cell(row: pd.Series) -> str:
    if pd.isna(row["null_q95"]):
        return _value(row, sign=row["statistic"] != "agreement")
    return f"{_value(row, sign=False)} | {row['null_q95']:.2f}"


def _value(row: pd.Series, *, sign: bool = True) -> str:
    digits = 3 if row["statistic"].endswith("contrast") else 2
    form = f"{'+' if sign else ''}.{digits}f"
    if pd.isna(row["value"]):
        return "-"
    return f"{row['value']:{form}} [{row['low']:{form}}, {row['high']:{form}}]"
