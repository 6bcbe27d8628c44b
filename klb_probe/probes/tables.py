"""Names in the tables of probes, and which of their rows stand beside each other."""

from __future__ import annotations

from typing import Any

import pandas as pd

from klb_probe.summary import number

PROBE = "residual"
SHUFFLED = "shuffled labels"
SUBSPACE = "random subspace"
RANDOM = "random features"
WORDS = "bag of words"
LENGTH = "prompt length"
CONDITION = "condition"  # of rounds
JLENS = "J-Lens margin"
LOGIT = "logit-lens margin"
CONTROLS = (SHUFFLED, SUBSPACE, RANDOM, WORDS, LENGTH, CONDITION, JLENS, LOGIT)
CHANCE = 0.5
_MAIN = "logistic"


def main_split(table: pd.DataFrame) -> pd.DataFrame:
    """One split a question (or a family of transfers): held-out domains where it has them, else its first."""
    key = "question" if "question" in table else "family"
    kept = []
    for _, rows in table.groupby(key, sort=False):
        splits = names_of(rows["split"])
        best = next((split for split in splits if "domain" in str(split)), splits[0])
        kept.append(rows[rows["split"] == best])
    return pd.concat(kept) if kept else table


def main_estimator(table: pd.DataFrame) -> str:
    """The estimator that stands for a table: logistic regression, else the first (of probes, if it has features)."""
    rows = table[table["feature"] == PROBE] if "feature" in table else table
    names = names_of(rows["estimator"])
    return next((name for name in names if _MAIN in name), names[0] if names else "")


def nested_probes(probes: pd.DataFrame) -> pd.DataFrame:
    """The probes whose layer was chosen within the training folds: a row a question, position, estimator and split."""
    return probes[(probes["feature"] == PROBE) & (probes["choice"] == "nested")]


def controls(probes: pd.DataFrame, line: Any) -> dict[str, float]:
    """AUROC of each control that stands beside a nested probe, in the order of ``CONTROLS``, without those it lacks.

    The estimator's own control comes first, then the strongest of any estimator; runs of one kind (shuffles) are averaged. A
    control that has only rows by layer is read at the probe's layer.

    Args:
        probes: Rows as in ``probes.csv``.
        line: A row of :func:`nested_probes` as ``itertuples`` gives it.
    """
    here = probes[(probes["question"] == line.question) & (probes["position"] == line.position)]
    here = here[(here["split"] == line.split) & here["feature"].isin(CONTROLS) & here["auroc"].notna()]
    by_feature = dict(list(here.groupby("feature")))
    found = {}
    for name in (name for name in CONTROLS if name in by_feature):
        rows = by_feature[name]
        whole = rows[rows["choice"] != "layer"]
        rows = whole if len(whole) else rows[rows["layer"] == line.layer]
        own = rows[rows["estimator"] == line.estimator]
        rows = own if len(own) else rows
        if len(rows):
            found[name] = float(rows.groupby(rows["estimator"].fillna(""))["auroc"].mean().max())
    return found


def names_of(values: pd.Series) -> list[str]:
    """The different values of a column in order, without gaps."""
    return list(dict.fromkeys(values.dropna()))


def with_interval(line: Any) -> str:
    """``0.93 [0.90, 0.96]`` of a row's AUROC, or the note that says why there is none."""
    if pd.isna(line.auroc):
        return line.note if isinstance(line.note, str) and line.note else "not estimable"
    return f"{number(line.auroc)} [{number(line.auroc_low)}, {number(line.auroc_high)}]"


def counted(line: Any) -> str:
    """``n = 224 (112 positive), 112 groups`` of a row."""
    return f"n = {whole(line.n)} ({whole(line.n_positive)} positive), {whole(line.n_groups)} groups"


def whole(value: float | None) -> str:
    """A count or layer as it is printed; a table with gaps holds them as floats."""
    return number(value, 0)
