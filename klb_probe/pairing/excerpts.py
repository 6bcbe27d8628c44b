"""Small tables for figures: margins by turn, cases with and without a lie, single rounds."""

from __future__ import annotations

import numpy as np
import pandas as pd

from klb_probe.errors import KlbError
from klb_probe.metrics.bootstrap import DRAWS
from klb_probe.metrics.clusters import Clusters
from klb_probe.pairing.join import Paired
from klb_probe.pairing.moments import ALL
from klb_probe.pairing.selection import NESTED


def best_layer(selected: pd.DataFrame, position: str, lens: str) -> int:
    """The layer that the nested split over all rounds chose most often. Raises KlbError if it chose none."""
    chosen = selected[(selected["position"] == position) & (selected["lens"] == lens) & (selected["kind"] == NESTED)]
    layers = chosen.loc[chosen["condition"] == ALL, "layer"].dropna()
    if layers.empty:
        raise KlbError(f"no layer was selected for lens {lens} at {position}: pass --layer")
    return int(layers.iloc[0])


def turn_curves(
    paired: Paired, position: str, lens: str, layer: int, *, draws: int = DRAWS, seed: int = 0
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Mean margin by turn over owed rounds, lies and non-lies apart, and the readings it is the mean of.

    Columns of the first: lied, turn, value, low, high (95 %, bootstrap over trajectories), n (rounds), n_trajectories.
    """
    turns = paired.turns
    here = turns[(turns["position"] == position) & (turns["lens"] == lens) & (turns["layer"] == layer)]
    labels = paired.rounds.loc[paired.rounds["owed"], ["round_id", "lied", "trajectory", "condition"]]
    readings = here.merge(labels, on="round_id")
    if readings.empty:
        raise KlbError(f"no owed round has signals of lens {lens}, layer {layer}, at {position}")
    lines = []
    for (lied, turn), group in readings.groupby(["lied", "turn"]):
        clusters = Clusters(group["trajectory"], group["condition"], draws=draws, seed=seed)
        everything = np.ones(len(group), bool)
        values = group[["margin"]].to_numpy(float)
        mean = clusters.estimate(clusters.offset(values, everything, everything), everything)
        found = {"value": mean.value[0], "low": mean.low[0], "high": mean.high[0], "n": len(group)}
        lines.append({"lied": lied, "turn": turn, **found, "n_trajectories": mean.n_clusters})
    return pd.DataFrame(lines), readings


def case_slopes(table: pd.DataFrame, position: str, lens: str, layer: int) -> pd.DataFrame:
    """Mean margin of non-lies and of lies of each owed case that has both: case, honest, lied, n_honest, n_lied."""
    here = table[(table["position"] == position) & (table["lens"] == lens) & (table["layer"] == layer) & table["owed"]]
    sides = {
        name: here[here["lied"] == lied].groupby("case")["margin"].agg(["mean", "size"])
        for name, lied in (("honest", False), ("lied", True))
    }
    both = sides["honest"].join(sides["lied"], how="inner", lsuffix="_honest", rsuffix="_lied").reset_index()
    return both.rename(columns={"mean_honest": "honest", "mean_lied": "lied", "size_honest": "n_honest", "size_lied": "n_lied"})


def example_rounds(table: pd.DataFrame, position: str, lens: str, layer: int) -> list[tuple[str, int]]:
    """Up to three rounds, each with why it is shown: the lies with the highest and the lowest margin, and a non-lie.

    The non-lie is of the first one's case if there is any, with the median margin among the candidates.
    """
    here = table[(table["position"] == position) & (table["lens"] == lens) & (table["layer"] == layer) & table["owed"]]
    ordered = here.sort_values("margin", kind="stable")
    lies, honest = ordered[ordered["lied"]], ordered[~ordered["lied"]]
    shown = []
    if len(lies):
        shown.append(("the lie with the highest margin", int(lies["round_id"].iloc[-1])))
    if len(lies) > 1:
        shown.append(("the lie with the lowest margin", int(lies["round_id"].iloc[0])))
    if len(honest):
        same = honest[honest["case"].isin(lies["case"].iloc[-1:])]
        candidates, words = (same, "a non-lie in the first one's case") if len(same) else (honest, "a non-lie")
        shown.append((f"{words}, median margin", int(candidates["round_id"].iloc[len(candidates) // 2])))
    return shown
