"""Scores of probes on rows of groups that they did not learn from, with strength and layer chosen inside the training rows.

For each fold: grouped inner folds within its training rows give every layer and setting an AUROC; the best setting of each
layer, and the best layer, are fixed by it; then one fit on all training rows scores the rows left out (nested
cross-validation: Varma and Simon 2006, doi:10.1186/1471-2105-7-91). Rows outside the population are scored in the same way, by
the fold that leaves out their group: other framings and rounds, to which a direction may or may not transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from klb_probe.errors import KlbError
from klb_probe.probes.folds import Fold, check_folds, deal
from klb_probe.probes.linear import Estimator, LinearFit
from klb_probe.probes.population import Population
from klb_probe.signals.statistics import plain_auroc


@dataclass(frozen=True)
class CrossFit:
    """Scores out of fold, one row of arrays a layer.

    Attributes:
        layers: ``[layer]``.
        scores: In standard deviations of the training rows labelled False, from their mean ``[layer, row]``; NaN where a row
            was never tested.
        hard: Whether the score was above the estimator's own threshold ``[layer, row]``; False where never tested.
        fold: The fold that tested a row ``[row]``, -1 for none.
        inner: Best mean AUROC over inner folds ``[fold, layer]``; NaN where nothing was chosen.
        setting: The setting that had it ``[fold, layer]``.
        chosen: Index of the layer that had the best of those ``[fold]``, -1 for a fold that was not used.
        note: Which folds were not used, and why.
    """

    layers: np.ndarray
    scores: np.ndarray
    hard: np.ndarray
    fold: np.ndarray
    inner: np.ndarray
    setting: np.ndarray
    chosen: np.ndarray
    note: str

    @property
    def nested_scores(self) -> np.ndarray:
        """Scores at the layer chosen for each row's fold, ``[row]``."""
        return np.where(self.fold >= 0, self._nested(self.scores), np.nan)

    @property
    def nested_hard(self) -> np.ndarray:
        """Hard predictions at that layer, ``[row]``."""
        return (self.fold >= 0) & self._nested(self.hard)

    @property
    def usual(self) -> int | None:
        """Index of the layer that most folds chose, of equals the one that comes first over the folds; None for no fold."""
        used = self.chosen[self.chosen >= 0].tolist()
        return Counter(used).most_common(1)[0][0] if used else None

    def _nested(self, values: np.ndarray) -> np.ndarray:
        return values[self.chosen[self.fold], np.arange(len(self.fold))]


@dataclass(frozen=True)
class _Part:
    """The training rows of one fold: rows of the table, their labels and contrast pairs, and the inner fold of each."""

    rows: np.ndarray
    labels: np.ndarray
    contrast: np.ndarray
    inner: np.ndarray

    def within(self, chosen: np.ndarray) -> _Part:
        """Some of the rows (mask), and of the contrast pairs those that are complete."""
        return _Part(
            self.rows[chosen], self.labels[chosen], _complete(self.contrast[chosen], self.labels[chosen]), self.inner[chosen]
        )


def cross_fit(
    features: Callable[[int], np.ndarray],
    layers: Sequence[int],
    population: Population,
    folds: Sequence[Fold],
    groups: np.ndarray,
    estimator: Estimator,
    *,
    labels: np.ndarray | None = None,
    like: CrossFit | None = None,
    inner_folds: int = 3,
    seed: int = 0,
) -> CrossFit:
    """Learns from the population in the training part of each fold, and scores all rows of its test part.

    A fold is not used if its training rows, or the two sides of every inner split, lack a label (or two contrast pairs, for an
    estimator that needs them); ``note`` says so, and if no fold is left all scores are NaN. Ties between settings go to the
    first of the estimator's, ties between layers to the first layer.

    Args:
        features: The features of every row of the table at a layer ``[row, d]``; NaN for a row without any.
        layers: The layers, each asked for once.
        population: The rows to learn from.
        folds: Masks over the rows of the table; tests do not overlap.
        groups: ``[row]``: what no split may part.
        estimator: What to fit.
        labels: Instead of the population's ``[population row]``, for a control.
        like: Takes the settings and layers of these (the fit with true labels) instead of choosing, for a control.
        inner_folds: Inner folds.
        seed: Of inner folds and of the estimator.

    Raises:
        KlbError: For a group on both sides of a fold, and population rows without features.
    """
    check_folds(folds, groups)
    labels = population.labels if labels is None else np.asarray(labels, bool)
    parts = [_part(population, labels, fold, groups, inner_folds, seed) for fold in folds]
    problems = [_problem(part, estimator, choosing=like is None) for part in parts]
    if like is not None:
        other = ["" if layer >= 0 else "not used with true labels" for layer in like.chosen]
        problems = [problem or also for problem, also in zip(problems, other, strict=True)]
    used = [number for number, problem in enumerate(problems) if not problem]
    scores, hard = np.full((len(layers), len(groups)), np.nan, np.float32), np.zeros((len(layers), len(groups)), bool)
    inner, setting = np.full((2, len(folds), len(layers)), np.nan)
    for at, layer in enumerate(layers):
        values = features(layer)
        if n := np.isnan(values[population.rows]).any(1).sum():
            raise KlbError(
                f"{n} rows of {population.name!r} have no features at layer {layer}: leave them out of the population"
            )
        for number in used:
            part, test = parts[number], np.flatnonzero(folds[number].test)
            if like is None:
                inner[number, at], setting[number, at] = _choose(values, part, estimator, seed)
            else:
                setting[number, at] = like.setting[number, at]
            (fit,) = _fit(values, part, estimator, [setting[number, at]], seed)
            raw, negatives = fit.score(values[test]), fit.score(values[part.rows[~part.labels]]).astype(float)
            scores[at, test] = (raw - negatives.mean()) / (negatives.std() or 1.0)
            hard[at, test] = raw > 0
    fold = np.full(len(groups), -1)
    for number in used:
        fold[folds[number].test] = number
    fold[np.isnan(scores).any(0)] = -1
    chosen = np.full(len(folds), -1)
    chosen[used] = inner[used].argmax(1) if like is None else like.chosen[used]
    skipped = [f"fold {one.name} not used: {problem}" for one, problem in zip(folds, problems, strict=True) if problem]
    return CrossFit(np.asarray(layers), scores, hard, fold, inner, setting, chosen, "; ".join(skipped))


def _part(population: Population, labels: np.ndarray, fold: Fold, groups: np.ndarray, inner_folds: int, seed: int) -> _Part:
    chosen = fold.train[population.rows]
    rows, labels = population.rows[chosen], labels[chosen]
    index = np.unique(groups[rows], return_inverse=True)[1]
    # Groups with the same share of True rows are dealt out evenly, so that inner folds have both labels where they can.
    share = np.bincount(index, weights=labels) / np.maximum(np.bincount(index), 1)
    inner = deal(index, share[index], inner_folds, seed) if len(rows) else np.zeros(0, int)
    return _Part(rows, labels, _complete(population.contrast[chosen], labels), inner)


def _complete(contrast: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Contrast pairs that still have one row of either label; -1 for the rest."""
    names, index = np.unique(contrast, return_inverse=True)
    sides = [np.bincount(index[labels == side], minlength=len(names)) for side in (False, True)]
    whole = (names >= 0) & (sides[0] == 1) & (sides[1] == 1)
    return np.where(whole[index], contrast, -1)


def _problem(part: _Part, estimator: Estimator, *, choosing: bool) -> str:
    """Why nothing can be learned from a part, or chosen within it; empty if it can."""
    if problem := _lack(part, estimator):
        return problem
    return "" if not choosing or _splits(part, estimator) else "no inner split has both labels on both sides"


def _lack(part: _Part, estimator: Estimator) -> str:
    if part.labels.all() or not part.labels.any():
        return "its training rows lack a label"
    few = estimator.needs_contrast and (part.contrast >= 0).sum() < 4
    return "its training rows have fewer than 2 contrast pairs" if few else ""


def _splits(part: _Part, estimator: Estimator) -> list[tuple[_Part, np.ndarray]]:
    """The inner splits that can be used: what to learn from, and a mask of what to score."""
    splits = []
    for number in np.unique(part.inner):
        scored = part.inner == number
        rest = part.within(~scored)
        if not _lack(rest, estimator) and part.labels[scored].any() and not part.labels[scored].all():
            splits.append((rest, scored))
    return splits


def _choose(values: np.ndarray, part: _Part, estimator: Estimator, seed: int) -> tuple[float, float]:
    """The best mean AUROC over the inner splits, and the setting that has it."""
    found = []
    for rest, scored in _splits(part, estimator):
        fits = _fit(values, rest, estimator, estimator.settings, seed)
        inner = values[part.rows[scored]]
        found.append(plain_auroc(np.stack([fit.score(inner) for fit in fits], axis=1), part.labels[scored]))
    mean = np.mean(found, axis=0)
    # The first of equals, and equal means AUROCs that differ by less than rounding.
    best = int(np.argmax(mean >= mean.max() - 1e-9))
    return float(mean[best]), estimator.settings[best]


def _fit(values: np.ndarray, part: _Part, estimator: Estimator, settings: Sequence[float], seed: int) -> list[LinearFit]:
    return estimator.fit(values[part.rows], part.labels, part.contrast, settings=settings, seed=seed)
