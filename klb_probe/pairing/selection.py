"""Which layer to read, without looking at the rounds it is judged on; and how often the best of many layers is that good by
chance.

*Nested split*: trajectories are dealt into folds, those of one domain together where there are several domains: the same case
is played once a condition, and with its lie in one fold and its non-lie in another, what the case alone gives to a margin would
count for one label in training and for the other where it is scored. On all folds but one the layer with the largest
|AUROC - 0.5| is chosen, and the direction with it; on the fold left out that layer is scored. Comparisons are made within a
fold, because two layers' margins have no common scale, and are pooled over folds. 0.5 is chance, and below it is worse than
chance.

*Permutation*: labels are permuted among the owed rounds of a case (a second time: of a case and condition), and the largest
distance over layers of an AUROC from its mean under such permutations is kept (without differences between cases, that mean is
0.5). A layer's p is how often this reaches its own distance. This corrects over the layers of a lens at one position, not over
lenses and positions, and takes rounds of a case as exchangeable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from klb_probe.metrics.bootstrap import DRAWS
from klb_probe.metrics.clusters import Clusters, Estimate
from klb_probe.pairing.moments import Moment, moments, too_few
from klb_probe.signals.statistics import plain_auroc

FOLDS = 5
PERMUTATIONS = 1000
NESTED, LAYER = "nested", "layer"


@dataclass(frozen=True)
class Nested:
    """The nested split of one moment.

    Attributes:
        estimate: Pooled AUROC on folds left out, in the direction chosen without them; the interval holds the choices fixed.
        layers: The layer chosen for each fold that was scored.
        low_is_lie: Whether a low margin meant a lie, for each.
    """

    estimate: Estimate
    layers: list[int]
    low_is_lie: list[bool]


def selection(
    table: pd.DataFrame, *, permutations: int = PERMUTATIONS, draws: int = DRAWS, seed: int = 0, folds: int = FOLDS
) -> pd.DataFrame:
    """Nested splits (``kind`` nested) and the AUROC and p of each layer (``kind`` layer), over all rounds and by condition.

    A nested line has the layer chosen most often, all choices, and the pooled AUROC with its interval; ``p`` is that of the
    best layer. ``naive_auroc`` is the largest |AUROC - 0.5| over all rounds and layers, folded above 0.5: what one would
    report by picking the layer on the rounds themselves.
    """
    parts = []
    for moment in moments(table):
        clusters = Clusters(moment.rounds["trajectory"], moment.rounds["condition"], draws=draws, seed=seed)
        for condition, group in moment.groups().items():
            lines = _lines(moment, clusters, group, permutations, seed, folds)
            parts.append(pd.DataFrame(lines).assign(position=moment.position, lens=moment.lens, condition=condition))
    whole = pd.concat(parts, ignore_index=True)
    numbers = dict.fromkeys(("value", "low", "high", "p", "p_within_condition", "naive_auroc"), float)
    return whole.astype({**numbers, "layer": "Int64", "naive_layer": "Int64"})[
        [
            *("position", "lens", "condition", "kind", "layer", "value", "low", "high", "p", "p_within_condition"),
            *("chosen", "low_is_lie", "naive_layer", "naive_auroc", "n_lies", "n_nonlies", "n_trajectories", "note"),
        ]
    ]


def _lines(
    moment: Moment, clusters: Clusters, group: np.ndarray, permutations: int, seed: int, folds: int
) -> list[dict[str, object]]:
    lies, owed = moment.lies & group, (moment.lies | moment.honest) & group
    counts = {"n_lies": int(lies.sum()), "n_nonlies": int((owed & ~lies).sum())}
    keys = ("layer", "value", "low", "high", "p", "p_within_condition", "chosen", "low_is_lie", "naive_layer", "naive_auroc")
    n_trajectories = moment.rounds.loc[owed, "trajectory"].nunique()
    note = too_few(*counts.values())
    empty = {**dict.fromkeys(keys), **counts, "n_trajectories": n_trajectories, "kind": NESTED, "note": note}
    if note:
        return [empty]
    scores = plain_auroc(moment.values[owed], lies[owed])
    case, condition = (moment.rounds[key].to_numpy(str)[owed] for key in ("case", "condition"))
    strata = case, np.char.add(np.char.add(case, "\n"), condition)
    p, p_within = (max_p(moment.values[owed], lies[owed], one, permutations=permutations, seed=seed) for one in strata)
    best = int(np.abs(scores - 0.5).argmax())
    together = units(moment.rounds, lies, owed & ~lies, clusters)
    split = nested(moment.values, lies, owed & ~lies, clusters, together, seed=seed, folds=folds)
    first = {**empty, "p": p.min(), "p_within_condition": p_within.min()}
    first |= {"naive_layer": moment.layers[best], "naive_auroc": max(scores[best], 1 - scores[best])}
    if split is None:
        first["note"] = "no split with lies and non-lies on both sides"
    else:
        found = split.estimate
        first |= {"value": found.value[0], "low": found.low[0], "high": found.high[0], "n_trajectories": found.n_clusters}
        first["layer"] = moment.layers[Counter(split.layers).most_common(1)[0][0]]
        first["chosen"] = " ".join(str(moment.layers[layer]) for layer in split.layers)
        first["low_is_lie"] = f"{sum(split.low_is_lie)} of {len(split.low_is_lie)}"
    by_layer = [
        {**empty, "kind": LAYER, "layer": layer, "value": score, "p": one, "p_within_condition": within}
        for layer, score, one, within in zip(moment.layers, scores, p, p_within, strict=True)
    ]
    return [first, *by_layer]


def nested(
    values: np.ndarray,
    lies: np.ndarray,
    honest: np.ndarray,
    clusters: Clusters,
    together: np.ndarray | None = None,
    *,
    seed: int = 0,
    folds: int = FOLDS,
) -> Nested | None:
    """The nested split of ``values [round, layer]``; layers by index. None if no fold can be scored.

    ``together [round]`` numbers what may not be parted (trajectories by default). There are no more folds than such units with
    a lie. A fold without lies or non-lies, on either side of the split, is not scored.
    """
    together = clusters.index if together is None else together
    folds = min(folds, len(set(together[lies])))
    fold = deal(together, lies, seed=seed, folds=folds)
    oriented, layers, low_is_lie = np.zeros(len(values)), [], []
    scored = np.zeros(len(values), bool)
    owed = lies | honest
    for number in range(folds):
        training, left_out = owed & (fold != number), owed & (fold == number)
        if any(not (kind & side).any() for kind in (lies, honest) for side in (training, left_out)):
            continue
        scores = plain_auroc(values[training], lies[training]) - 0.5
        layer = int(np.abs(scores).argmax())
        oriented[left_out] = np.sign(scores[layer]) * values[left_out, layer]
        layers.append(layer)
        low_is_lie.append(bool(scores[layer] < 0))
        scored |= left_out
    if not layers:
        return None
    estimate = clusters.auroc(oriented[:, None], lies & scored, honest & scored, fold)
    return Nested(estimate, layers, low_is_lie)


def units(rounds: pd.DataFrame, lies: np.ndarray, honest: np.ndarray, clusters: Clusters) -> np.ndarray:
    """What folds keep whole: domains, if two or more have both lies and non-lies, else trajectories; a number a round."""
    domain = pd.factorize(rounds["domain"])[0]
    return domain if len(set(domain[lies]) & set(domain[honest])) >= 2 else clusters.index


def deal(trajectory: np.ndarray, lies: np.ndarray, *, seed: int, folds: int) -> np.ndarray:
    """The fold of each round: whole units, dealt in turn from those with most lies, in random order among equals."""
    counts = np.bincount(trajectory, weights=lies)
    shuffled = np.random.default_rng(seed).permutation(len(counts))
    order = shuffled[np.argsort(-counts[shuffled], kind="stable")]
    fold = np.empty(len(counts), int)
    fold[order] = np.arange(len(counts)) % folds
    return fold[trajectory]


def max_p(
    values: np.ndarray, lied: np.ndarray, strata: Sequence[str] | np.ndarray, *, permutations: int = PERMUTATIONS, seed: int = 0
) -> np.ndarray:
    """p of each layer, corrected over layers by the largest distance of an AUROC from its mean, labels permuted in strata.

    ``values [round, layer]``, ``lied [round]``.
    """
    rng = np.random.default_rng(seed)
    stratum = pd.factorize(np.asarray(strata))[0]
    order = np.argsort(stratum, kind="stable")
    labels, stratum, ranks = lied[order].astype(float), stratum[order], rankdata(values[order], axis=0)
    # Within a stratum, labels follow the order of fresh random numbers.
    permuted = labels[np.argsort(stratum + rng.random((permutations, len(labels))), axis=1)]  # [permutation, round]
    expected = (np.bincount(stratum, weights=labels) / np.bincount(stratum))[stratum]
    # For a given number of lies, AUROC is their rank sum, shifted and scaled.
    found, observed = (np.abs((one - expected) @ ranks) for one in (permuted, labels))
    reached = found.max(1)[:, None] >= observed - 1e-9
    return (1 + reached.sum(0)) / (1 + permutations)
