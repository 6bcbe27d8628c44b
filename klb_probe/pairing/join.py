"""Signals and labels of the same rounds in one table; what does not match stops everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from klb_probe.errors import KlbError
from klb_probe.pairing.labels import KEYS, LABELS, label_table, listed

POSITIONS = ("gate", "before_reply", "reply_mean", "reply_last", "claim", "action", "elicited")
READING = ["turn", "position", "lens", "layer"]
SIGNAL_COLUMNS = [*KEYS, *READING, "margin", "own_margin"]


@dataclass(frozen=True)
class Paired:
    """Signals with the labels of their rounds.

    Attributes:
        table: One row a scored round x position x lens x layer: the keys, the labels, ``margin`` and ``own_margin`` (logits,
            the mean over the round's turns at that position), ``n_turns``. Conditions under the paper's names.
        rounds: One row a scored round, with its ``words``; ``round_id``, the row's number on file, joins it to the others.
        turns: Signals of scored rounds as they were read: one row a turn x position x lens x layer, with ``round_id``.
        unscored: Signals of rounds without a verdict (gate failed, judge's reply unusable, provider's error).
        counts: Rounds by kind.
    """

    table: pd.DataFrame
    rounds: pd.DataFrame
    turns: pd.DataFrame
    unscored: pd.DataFrame
    counts: dict[str, int]


def join(signals: pd.DataFrame, rows: Sequence[Mapping[str, Any]]) -> Paired:
    """Join one to one by agent, domain, condition, initial trust, sample and round.

    Every round with signals must be on file and every scored round on file must have signals.

    Raises KlbError naming up to five rounds that do not match and how many there are; also for duplicates on either side and
    for margins that are not finite.
    """
    signals = _checked(signals)
    labels = label_table(rows)
    with_signals = signals[KEYS].drop_duplicates(ignore_index=True)
    both = with_signals.merge(labels[[*KEYS, "scored"]].reset_index(names="round_id"), how="outer", on=KEYS, indicator=True)
    _refuse(both[both["_merge"] == "left_only"], both[(both["_merge"] == "right_only") & both["scored"].eq(True)])

    matched = both.loc[both["_merge"] == "both", [*KEYS, "round_id", "scored"]]
    signals = signals.merge(matched.astype({"round_id": int, "scored": bool}), on=KEYS, validate="many_to_one")
    turns = signals[signals["scored"]].drop(columns="scored").reset_index(drop=True)
    unscored = signals[~signals["scored"]].drop(columns=["scored", "round_id"]).reset_index(drop=True)
    rounds = labels[labels["scored"]].reset_index(names="round_id")
    rounds["condition"] = rounds.pop("named")
    counts = {
        "scored": len(rounds),
        "owed": int(rounds["owed"].sum()),
        "lies_owed": int((rounds["owed"] & rounds["lied"]).sum()),
        "unscored": len(labels) - len(rounds),
        "unscored_with_signals": len(unscored[KEYS].drop_duplicates()),
    }
    return Paired(_by_round(turns, rounds), rounds, turns, unscored, counts)


def _checked(signals: pd.DataFrame) -> pd.DataFrame:
    if missing := [name for name in SIGNAL_COLUMNS if name not in signals]:
        raise KlbError(f"the signals lack {', '.join(missing)}")
    if signals.empty:
        raise KlbError("the signals hold no rows")
    signals = signals[SIGNAL_COLUMNS].astype({**dict.fromkeys(KEYS[:4], str), "sample": int, "round": int})
    if (bad := ~np.isfinite(signals["margin"])).any():
        raise KlbError(f"{bad.sum()} margins are not finite, in {listed(signals[bad].drop_duplicates(KEYS))}")
    if (twice := signals.duplicated([*KEYS, *READING])).any():
        where = listed(signals[twice].drop_duplicates(KEYS))
        raise KlbError(f"{twice.sum()} signals are there twice, in {where}")
    if unknown := sorted(set(signals["position"]) - set(POSITIONS)):
        raise KlbError(f"unknown positions {', '.join(unknown)}; known: {', '.join(POSITIONS)}")
    return signals


def _refuse(unknown: pd.DataFrame, silent: pd.DataFrame) -> None:
    """Raise KlbError if there is anything that does not match."""
    wrong = [
        f"{len(rounds)} {what}: {listed(rounds)}"
        for what, rounds in (("with signals are not on file", unknown), ("on file have no signals", silent))
        if len(rounds)
    ]
    if wrong:
        raise KlbError(f"rounds do not match: {'; '.join(wrong)}")


def _by_round(turns: pd.DataFrame, rounds: pd.DataFrame) -> pd.DataFrame:
    """One value a round: the mean over its turns at a position."""
    grouped = turns.groupby(["round_id", "position", "lens", "layer"], sort=False)
    means = grouped.agg(margin=("margin", "mean"), own_margin=("own_margin", "mean"), n_turns=("turn", "size")).reset_index()
    labels = [name for name in LABELS if name in rounds and name != "scored"]
    table = rounds[["round_id", *KEYS, *labels]].merge(means, on="round_id", validate="one_to_many")
    order = {name: number for number, name in enumerate((*POSITIONS, *dict.fromkeys(turns["lens"])))}
    return table.sort_values(
        ["position", "lens", "layer", "round_id"],
        key=lambda column: column.map(order) if column.name in ("position", "lens") else column,
        ignore_index=True,
    )
