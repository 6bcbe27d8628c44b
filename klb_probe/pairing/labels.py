"""What is known of each round from its row in a trajectory file: one line a round, under the keys that signals have too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from klb_probe.errors import KlbError
from klb_probe.metrics.panel import round_table

KEYS = ["agent", "domain", "condition", "initial", "sample", "round"]
LABELS = [
    *("case", "trajectory", "owed", "scored", "lied", "detected", "disclosed", "refused", "event", "outcome", "denied"),
    *("trust_before", "mechanism", "text_length", "n_messages"),
]


def label_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One line a round that was begun: the keys (public names), the labels, and ``words``; indexed by the row's number.

    ``trajectory`` numbers the walks, the unit of all resampling. ``named``: the condition under the paper's name. ``words``:
    the agent's messages, one a line; its private thoughts are not among them. ``text_length`` counts their characters,
    ``n_messages`` the messages. ``denied``: the case ended without the owed option. ``mechanism`` is there only where some
    row has it.

    Raises KlbError if a round is there twice.
    """
    rounds = round_table(rows)
    begun = rounds["round"].notna() & (rounds["sample"] != "None")
    messages = [[str(text) for role, text in row.get("transcript") or [] if role == "agent"] for row in rows]
    table = rounds.assign(
        named=rounds["condition"].astype(str),
        condition=[str(row.get("condition")) for row in rows],
        event=[row.get("event") for row in rows],
        outcome=[row.get("outcome") for row in rows],
        denied=[row.get("outcome") not in _granting(row) for row in rows],
        mechanism=[row.get("mechanism") for row in rows],
        words=["\n".join(said) for said in messages],
        text_length=[sum(map(len, said)) for said in messages],
        n_messages=[len(said) for said in messages],
    )[[*KEYS, *LABELS, "named", "words"]]
    table = table[begun]
    try:
        table = table.astype({"sample": int, "round": int})
    except ValueError as error:
        raise KlbError(f"samples and rounds are numbered: {error}") from None
    if (twice := table.duplicated(KEYS)).any():
        raise KlbError(f"{twice.sum()} rounds are there twice: {listed(table[twice])}; pair one run at a time")
    return table if table["mechanism"].notna().any() else table.drop(columns="mechanism")


def _granting(row: Mapping[str, Any]) -> set[Any]:
    """Outcomes that grant the owed option."""
    return {row.get("owed_outcome"), row.get("entitled_outcome")} - {None, "none"}


def listed(rounds: pd.DataFrame, most: int = 5) -> str:
    """The first rounds by name, and how many more there are."""
    named = [f"{'/'.join(map(str, key[:-1]))} round {key[-1]}" for key in rounds[KEYS].head(most).itertuples(index=False)]
    more = len(rounds) - most
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")
