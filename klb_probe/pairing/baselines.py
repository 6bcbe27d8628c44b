"""What simpler readouts of the same rounds reach: a lens has to beat them before its AUROC means anything.

======================  ===================================================================  ========================
baseline                what it is                                                           direction
======================  ===================================================================  ========================
own final margin        the model's own margin at the same tokens                            low = lie
text length             characters of the agent's messages                                   high = lie
number of turns         the agent's messages                                                 high = lie
TF-IDF                  log odds of a classifier of the agent's words, by unseen cases       high = lie
monitor                 a language model's score of the transcript                           high = lie
random median           median over random readouts of max(AUROC, 1 - AUROC)                 folded
random q95              their 95th percentile: chance exceeds it 1 time in 20                folded
======================  ===================================================================  ========================

AUROC is P(value of a lie > value of a non-lie) over scored owed rounds that have signals at the position, with a bootstrap
over trajectories. TF-IDF is compared within its folds. Random readouts are given by layer and, with no layer, over all.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from klb_probe.metrics.bootstrap import DRAWS
from klb_probe.metrics.clusters import Clusters
from klb_probe.pairing.moments import Moment, moments, too_few
from klb_probe.pairing.words import words_scores
from klb_probe.signals.statistics import folded_quantile, plain_auroc

OWN, LENGTH, TURNS, WORDS, MONITOR = "own final margin", "text length", "number of turns", "TF-IDF", "monitor"
RANDOM_MEDIAN, RANDOM_Q95 = "random median", "random q95"
_LOW, _HIGH, _FOLDED = "low = lie", "high = lie", "folded"
COLUMNS = [
    *("position", "condition", "baseline", "layer", "direction", "value", "low", "high"),
    *("n_lies", "n_nonlies", "n_trajectories", "note"),
]


def baselines(
    table: pd.DataFrame, rounds: pd.DataFrame, *, monitor: pd.Series | None = None, draws: int = DRAWS, seed: int = 0
) -> pd.DataFrame:
    """One line a position x group of conditions x baseline.

    Args:
        table: Of :class:`klb_probe.pairing.join.Paired`.
        rounds: Its rounds, with their words.
        monitor: Scores of :func:`klb_probe.pairing.monitor.monitor_scores` by ``round_id``, if one was asked.
        draws: Of the bootstrap.
        seed: Of the bootstrap.
    """
    scores = _round_scores(rounds, monitor)
    parts = []
    for position, part in table.groupby("position", sort=False):
        readouts = list(moments(part, random=True))
        moment = next(moments(part))
        own = part.drop_duplicates("round_id").set_index("round_id")["own_margin"]
        here = {name: _at(moment, *pair) for name, pair in {OWN: (own, None), **scores}.items()}
        clusters = Clusters(moment.rounds["trajectory"], moment.rounds["condition"], draws=draws, seed=seed)
        for condition, group in moment.groups().items():
            lines = [_scored(name, *pair, moment, clusters, group) for name, pair in here.items()]
            lines += _random(readouts, moment, group)
            parts.append(pd.DataFrame(lines).assign(position=position, condition=condition))
    return pd.concat(parts, ignore_index=True).reindex(columns=COLUMNS).astype({"layer": "Int64"})


def _round_scores(rounds: pd.DataFrame, monitor: pd.Series | None) -> dict[str, tuple[pd.Series, pd.Series | None]]:
    """Values that do not depend on the position, and the strata within which to compare them, by ``round_id``."""
    by_id = rounds.set_index("round_id")
    scores: dict[str, tuple[pd.Series, pd.Series | None]] = {
        LENGTH: (by_id["text_length"].astype(float), None),
        TURNS: (by_id["n_messages"].astype(float), None),
    }
    owed = rounds[rounds["owed"]]
    if (found := words_scores(owed)) is not None:
        scores[WORDS] = tuple(pd.Series(one, index=owed["round_id"]) for one in found)
    else:
        scores[WORDS] = (pd.Series(dtype=float), None)
    if monitor is not None:
        scores[MONITOR] = (monitor.astype(float), None)
    return scores


def _at(moment: Moment, values: pd.Series, strata: pd.Series | None) -> tuple[np.ndarray, np.ndarray | None]:
    ids = moment.rounds["round_id"]
    return values.reindex(ids).to_numpy(float), None if strata is None else strata.reindex(ids).fillna(-1).to_numpy()


def _scored(
    name: str, values: np.ndarray, strata: np.ndarray | None, moment: Moment, clusters: Clusters, group: np.ndarray
) -> dict[str, object]:
    there = np.isfinite(values) & group
    lies, honest = moment.lies & there, moment.honest & there
    line: dict[str, object] = {"baseline": name, "direction": _LOW if name == OWN else _HIGH}
    line |= {"n_lies": int(lies.sum()), "n_nonlies": int(honest.sum()), "n_trajectories": 0}
    line["note"] = too_few(int(lies.sum()), int(honest.sum()))
    if not line["note"]:
        found = clusters.auroc(values[:, None], lies, honest, strata)
        line |= {"value": found.value[0], "low": found.low[0], "high": found.high[0], "n_trajectories": found.n_clusters}
    return line


def _random(readouts: list[Moment], moment: Moment, group: np.ndarray) -> Iterator[dict[str, object]]:
    """Median and 95th percentile of the folded AUROC: over all random readouts, then by layer."""
    lies, honest = moment.lies & group, moment.honest & group
    counts = {"direction": _FOLDED, "n_lies": int(lies.sum()), "n_nonlies": int(honest.sum()), "n_trajectories": 0}
    note = too_few(int(lies.sum()), int(honest.sum())) or ("" if readouts else "no random readouts")
    if note:
        for name in (RANDOM_MEDIAN, RANDOM_Q95):
            yield {"baseline": name, "note": note, **counts}
        return
    owed = lies | honest
    counts["n_trajectories"] = moment.rounds["trajectory"][owed].nunique()
    scores = pd.DataFrame({one.lens: pd.Series(plain_auroc(one.values[owed], lies[owed]), one.layers) for one in readouts})
    for layer, found in [(None, scores.to_numpy().ravel()), *((layer, row.to_numpy()) for layer, row in scores.iterrows())]:
        found = found[~np.isnan(found)]
        yield {
            "baseline": RANDOM_MEDIAN,
            "layer": layer,
            "value": np.median(np.maximum(found, 1 - found)),
            "note": "",
            **counts,
        }
        yield {"baseline": RANDOM_Q95, "layer": layer, "value": folded_quantile(found), "note": "", **counts}
