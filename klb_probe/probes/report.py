"""What is printed of probes: a line a probe with its controls beside it, a line a transfer, and a reading in words."""

from __future__ import annotations

import pandas as pd
from rich.table import Table

from klb_probe.probes.reading import DOES_NOT_SHOW, reading
from klb_probe.probes.tables import (
    CONDITION,
    JLENS,
    LENGTH,
    LOGIT,
    RANDOM,
    SHUFFLED,
    SUBSPACE,
    WORDS,
    controls,
    main_estimator,
    nested_probes,
    number,
    whole,
    with_interval,
)

__all__ = ["DOES_NOT_SHOW", "WIDTH", "reading", "table", "transfer_table"]

WIDTH = 132  # of the table of probes: at a smaller width columns would be lost
_HEADS = {
    SHUFFLED: "shuf-\nfled",
    SUBSPACE: "rand.\nsub-\nspace",
    RANDOM: "rand.\nfeat-\nures",
    WORDS: "words",
    LENGTH: "len-\ngth",
    CONDITION: "con-\ndi-\ntion",
    JLENS: "J-\nLens",
    LOGIT: "logit\nlens",
}
_INTERVAL = len("0.93 [0.90, 0.96]")


def table(probes: pd.DataFrame) -> Table:
    """A line a question, position and estimator (and split, if there are several): nested probe, then AUROC of its controls."""
    nested = nested_probes(probes)
    many = nested["split"].nunique() > 1
    heads = {name: head for name, head in _HEADS.items() if name != CONDITION or (probes["feature"] == CONDITION).any()}
    printed = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("question", "position"):
        printed.add_column(title, no_wrap=True)
    printed.add_column("estimator", max_width=15)
    printed.add_column("AUROC nested\n[95 %]", justify="right", min_width=_INTERVAL, max_width=_INTERVAL)
    for title in ("layer", "bal.\nacc.", "recall\n1 %", "selec-\ntivity", *heads.values(), "n /\ngroups"):
        printed.add_column(title, justify="right", no_wrap=True)
    for line in nested.itertuples():
        question = f"{line.question}\n({line.split})" if many else line.question
        cells = [question, line.position, line.estimator, with_interval(line), whole(line.layer)]
        cells += [number(value) for value in (line.balanced_accuracy, line.recall_1_percent, line.selectivity)]
        beside = controls(probes, line)
        cells += [number(beside.get(name)) for name in heads]
        printed.add_row(*cells, f"{whole(line.n)}/{whole(line.n_groups)}")
    return printed


def transfer_table(transfer: pd.DataFrame, estimator: str | None = None) -> Table:
    """A line a position and pair of populations: AUROC on the second of the probe trained on the first.

    Args:
        transfer: Rows as in ``transfer.csv``; of rows by layer only the nested choice is printed.
        estimator: Default: logistic regression, else the first.
    """
    estimator = estimator or main_estimator(transfer)
    rows = transfer[(transfer["choice"] != "layer") & (transfer["estimator"] == estimator)]
    many = rows["split"].nunique() > 1
    printed = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("trained on", "tested on", "position", "estimator", *["split"] * many):
        printed.add_column(title, no_wrap=True)
    for title in ("layer", "AUROC [95 %]", "n / groups"):
        printed.add_column(title, justify="right", no_wrap=True)
    for line in rows.itertuples():
        cells = [line.train, line.test, line.position, line.estimator, *[line.split] * many]
        printed.add_row(*cells, whole(line.layer), with_interval(line), f"{whole(line.n)} / {whole(line.n_groups)}")
    return printed
