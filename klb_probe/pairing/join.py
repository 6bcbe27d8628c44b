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
        table: One row a scored round x position x lens x layer: the keys, the labels, ``margin`` and ``own_margin`` (logits, of
            the round's first turn at that position; of claims the mean), ``n_turns``. Conditions under the paper's names.
        rounds: One row a scored round, with its ``words``; ``round_id``, the row's number on file, joins it to the others.
        turns: Signals of scored rounds as they were read: one row a turn x position x lens x layer, with ``round_id``.
        unscored: The same of rounds without a verdict (gate failed, judge's reply unusable, provider's error).
        counts: Rounds by kind.
    """

    table: pd.DataFrame
    rounds: pd.DataFrame
    turns: pd.DataFrame
    unscored: pd.DataFrame
    counts: dict[str, int]


def join(signals: pd.DataFrame, rows: Sequence[Mapping[str, Any]], positions: Sequence[str] = ()) -> Paired:
    """Join one to one by agent, domain, condition, initial trust, sample and round.

    Every round with signals must be on file and every scored round on file must have signals, at some position: not every round
    has all of them. Only readings at ``positions`` are kept, if any are named.

    Raises KlbError naming up to five rounds that do not match and how many there are; also for duplicates on either side and
    for margins that are not finite.
    """
    read = signals
    signals, with_signals = _checked(signals)
    labels = label_table(rows)
    if "case" in read:
        _same_cases(read, labels)
    on_file = labels[[*KEYS, "scored"]].reset_index(names="round_id")
    both = with_signals.merge(on_file, how="outer", on=KEYS, indicator=True)
    _refuse(both[both["_merge"] == "left_only"], both[(both["_merge"] == "right_only") & both["scored"].eq(True)])

    matched = both[both["_merge"] == "both"].set_index("number")
    if positions:
        signals = signals[signals["position"].isin(positions)].copy()
        if missing := sorted(set(positions) - set(signals["position"])):
            raise KlbError(f"no signals at {', '.join(missing)}; known positions: {', '.join(POSITIONS)}")
    scored = signals["number"].map(matched["scored"].astype(bool))
    signals.insert(0, "round_id", signals.pop("number").map(matched["round_id"].astype(int)))
    turns, unscored = (signals[side].reset_index(drop=True) for side in (scored, ~scored))
    rounds = labels[labels["scored"]].reset_index(names="round_id")
    rounds["condition"] = rounds.pop("named")
    counts = {
        "scored": len(rounds),
        "owed": int(rounds["owed"].sum()),
        "lies_owed": int((rounds["owed"] & rounds["lied"]).sum()),
        "unscored": len(labels) - len(rounds),
        "unscored_with_signals": unscored["round_id"].nunique(),
    }
    return Paired(_by_round(turns, rounds), rounds, turns, unscored, counts)


def _same_cases(signals: pd.DataFrame, labels: pd.DataFrame) -> None:
    """Raise KlbError if a round is of one case in the signals and of another on file: they are of different runs."""
    read = signals[[*KEYS, "case"]].drop_duplicates().astype({"sample": int, "round": int})
    both = read.merge(labels[[*KEYS, "case"]], on=KEYS, suffixes=("", "_on_file"))
    if len(other := both[both["case"].notna() & (both["case"] != both["case_on_file"])]):
        raise KlbError(f"signals of other cases than the rounds on file: {listed(other)}; pair a run with its own signals")


def _checked(signals: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The readings with the ``number`` of their round, and the rounds: number and keys."""
    if missing := [name for name in SIGNAL_COLUMNS if name not in signals]:
        raise KlbError(f"the signals lack {', '.join(missing)}")
    if signals.empty:
        raise KlbError("the signals hold no rows")
    if unknown := sorted(set(signals["position"].unique()) - set(POSITIONS)):
        raise KlbError(f"unknown positions {', '.join(unknown)}; known: {', '.join(POSITIONS)}")
    keys = signals[KEYS].astype(dict.fromkeys(KEYS[:4], "category"))
    number = keys.groupby(KEYS, observed=True, sort=False).ngroup()
    rounds = keys.assign(number=number).drop_duplicates("number").astype({**dict.fromkeys(KEYS[:4], str), "sample": int})
    readings = signals[[*READING, "margin", "own_margin"]].assign(number=number).astype({"lens": "category"})
    readings["position"] = pd.Categorical(readings["position"], POSITIONS)
    if (bad := ~np.isfinite(readings["margin"])).any():
        raise KlbError(f"{bad.sum()} margins are not finite, in {listed(rounds[rounds['number'].isin(number[bad])])}")
    if (twice := readings.duplicated(["number", *READING])).any():
        raise KlbError(f"{twice.sum()} signals are there twice, in {listed(rounds[rounds['number'].isin(number[twice])])}")
    return readings, rounds.astype({"round": int})


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
    """One value a round: that of its first turn at a position, of claims the mean.

    A lie is often contested and said again: later turns hold the lie in their prompt, and rounds with one have more of them.
    """
    by_turn = turns.groupby(["round_id", "position"], observed=True, sort=False)["turn"]
    turns = turns[(turns["turn"] == by_turn.transform("min")) | (turns["position"] == "claim")]
    grouped = turns.groupby(["round_id", "position", "lens", "layer"], observed=True, sort=False)
    means = grouped.agg(margin=("margin", "mean"), own_margin=("own_margin", "mean"), n_turns=("turn", "size")).reset_index()
    # Positions in the order of a round, lenses in the order they were read.
    means["lens"] = means["lens"].cat.set_categories(turns["lens"].unique().tolist())
    means = means.sort_values(["position", "lens", "layer", "round_id"], ignore_index=True).astype(
        {"position": str, "lens": str}
    )
    labels = [name for name in LABELS if name in rounds and name != "scored"]
    return means.merge(rounds[["round_id", *KEYS, *labels]], on="round_id", how="left", validate="many_to_one")[
        ["round_id", *KEYS, *labels, "position", "lens", "layer", "margin", "own_margin", "n_turns"]
    ]
