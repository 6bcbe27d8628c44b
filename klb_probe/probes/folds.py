"""Splits of a probe data table in which a group (a case and its twin, in scenarios and rounds) is never on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from klb_probe.errors import KlbError

Split = Literal["domain", "paraphrase", "pair"]
FOLDS = 5
FEWEST_DOMAINS = 3
FEWEST_GROUPS = 10
NO_PARAPHRASE = 0  # rounds


@dataclass(frozen=True)
class Fold:
    """Rows to learn from and rows to score; a row may be in neither.

    Attributes:
        name: What is held out.
        train: ``[row]`` bool.
        test: ``[row]`` bool.
    """

    name: str
    train: np.ndarray
    test: np.ndarray


def make_folds(kind: Split, rows: pd.DataFrame, seed: int = 0) -> tuple[list[Fold], Split]:
    """The folds of a table, and the kind that was used: ``pair`` instead of ``domain`` where there are fewer than 3 domains.

    Args:
        kind: What is held out: a domain, a paraphrase (of groups not learned from), or a fifth of the groups.
        rows: With ``group``, ``domain`` and ``paraphrase``, one line a row.
        seed: Of how groups are dealt.

    Raises:
        KlbError: For fewer than 10 groups, a group on both sides, and paraphrases to hold out where there are not two.
    """
    groups, domains = rows["group"].to_numpy(), rows["domain"].to_numpy()
    check_groups(groups)
    if kind == "domain" and len(set(domains)) < FEWEST_DOMAINS:
        kind = "pair"
    if kind == "domain":
        folds = domain_folds(domains)
    elif kind == "paraphrase":
        folds = paraphrase_folds(groups, rows["paraphrase"].to_numpy(), seed)
    else:
        folds = group_folds(groups, domains, seed=seed)
    check_folds(folds, groups)
    return folds, kind


def domain_folds(domains: np.ndarray) -> list[Fold]:
    """Each domain in turn is left out. ``domains [row]``."""
    return [Fold(str(name), domains != name, domains == name) for name in np.unique(domains)]


def group_folds(groups: np.ndarray, domains: np.ndarray, k: int = FOLDS, seed: int = 0) -> list[Fold]:
    """Groups dealt at random into ``k`` folds, those of each domain as evenly as they go. Both arrays ``[row]``."""
    dealt = deal(groups, domains, k, seed)
    return [Fold(f"groups {number + 1} of {k}", dealt != number, dealt == number) for number in np.unique(dealt)]


def paraphrase_folds(groups: np.ndarray, paraphrases: np.ndarray, seed: int = 0) -> list[Fold]:
    """Each paraphrase in turn is left out, and is scored on groups that are left out with it.

    Every group is dealt to one of its own paraphrases, at random and evenly. Fold ``p``: tested on rows of paraphrase ``p`` in
    the groups dealt to it, learned from other paraphrases in other groups. Where each group has a single paraphrase, the folds
    are the paraphrases. Rows without a paraphrase (rounds, 0) are in no part.
    """
    present = np.unique(paraphrases[paraphrases != NO_PARAPHRASE])
    if len(present) < 2:
        raise KlbError(f"{len(present)} paraphrases; holding one out needs at least 2: use another split")
    _, index = np.unique(groups, return_inverse=True)
    has = np.zeros((index.max() + 1, len(present)), bool)
    there = paraphrases != NO_PARAPHRASE
    has[index[there], np.searchsorted(present, paraphrases[there])] = True
    dealt = np.full(len(has), NO_PARAPHRASE)
    rng = np.random.default_rng(seed)
    for pattern in np.unique(has[has.any(1)], axis=0):
        members = rng.permutation(np.flatnonzero((has == pattern).all(1)))
        own = present[pattern]
        dealt[members] = own[np.arange(len(members)) % len(own)]
    return [
        Fold(
            f"paraphrase {one}",
            there & (paraphrases != one) & (dealt[index] != one),
            (paraphrases == one) & (dealt[index] == one),
        )
        for one in present
    ]


def deal(groups: np.ndarray, strata: np.ndarray, k: int, seed: int) -> np.ndarray:
    """The fold of each row, ``[row]``: whole groups at random, those of a stratum in turn over the folds.

    ``groups``, ``strata``: ``[row]``; a group is of the stratum of its first row.
    """
    _, first, index = np.unique(groups, return_index=True, return_inverse=True)
    shuffled = np.random.default_rng(seed).permutation(len(first))
    order = shuffled[np.argsort(np.unique(strata, return_inverse=True)[1][first][shuffled], kind="stable")]
    dealt = np.empty(len(first), int)
    dealt[order] = np.arange(len(first)) % k
    return dealt[index]


def shuffled_within_groups(labels: np.ndarray, groups: np.ndarray, seed: int) -> np.ndarray:
    """Labels that say nothing about a row beyond its group, ``[row]``, for the control of a probe (Hewitt and Liang 2019).

    Rows of a group with both labels exchange theirs, so that the group keeps its counts. A group with one label only would be
    left as it is; such groups exchange labels as wholes, with one another. Their sizes may differ, and with them the number of
    True rows may.
    """
    rng = np.random.default_rng(seed)
    index, labels = np.unique(groups, return_inverse=True)[1], np.asarray(labels, bool)
    order, by_chance = np.argsort(index, kind="stable"), np.lexsort((rng.random(len(labels)), index))
    shuffled = np.empty_like(labels)
    shuffled[order] = labels[by_chance]
    share = np.bincount(index, weights=labels) / np.bincount(index)
    pure = np.flatnonzero((share == 0) | (share == 1))
    share[pure] = rng.permutation(share[pure])
    whole = np.isin(index, pure)
    shuffled[whole] = share[index[whole]] == 1
    return shuffled


def check_groups(groups: np.ndarray) -> None:
    """Raises KlbError for fewer than 10 groups."""
    if (n := len(np.unique(groups))) < FEWEST_GROUPS:
        raise KlbError(
            f"{n} groups; a probe needs at least {FEWEST_GROUPS} (cases with their twins): use more cases or domains"
        )


def check_folds(folds: Sequence[Fold], groups: np.ndarray) -> None:
    """Raises KlbError where a group is on both sides of a fold. ``groups [row]``."""
    for fold in folds:
        if len(both := np.intersect1d(groups[fold.train], groups[fold.test])):
            raise KlbError(
                f"group {both[0]} is on both sides of fold {fold.name}: a group has to be in one domain, with one name"
            )


def check_duplicates(features: np.ndarray, groups: np.ndarray) -> None:
    """Raises KlbError where different groups have identical features: learned from and tested on, they would count as skill.

    ``features [row, d]``, ``groups [row]``. Rows with a NaN have no features.
    """
    seen: dict[bytes, int] = {}
    again = []
    for row in np.flatnonzero(~np.isnan(features).any(1)):
        first = seen.setdefault(np.ascontiguousarray(features[row]).tobytes(), int(row))
        if groups[first] != groups[row]:
            again.append((first, int(row)))
    if again:
        one, other = again[0]
        where = f"rows {one} and {other}, groups {groups[one]} and {groups[other]}"
        raise KlbError(
            f"{len(again)} rows have the same features as a row of another group ({where}): "
            "give copies of a text the same group, or leave them out"
        )
