"""How well scores tell two labels apart, with intervals that resample groups.

Scores of different folds come from different fits, so AUROC compares rows within a fold only, and the comparisons are pooled.
Groups are resampled within the fold that tested them, and one that is drawn twice is not compared with its own copy: with a
dozen groups a fold this would favour comparisons within a group. A row whose score is NaN in any column is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from klb_probe.metrics.bootstrap import DRAWS
from klb_probe.metrics.clusters import Clusters, Estimate
from klb_probe.pairing.moments import too_few

FALSE_POSITIVES = 0.01


@dataclass(frozen=True)
class Measures:
    """Measures by column of the scores, each an :class:`Estimate` of arrays ``[column]``; NaN where undefined.

    Attributes:
        auroc: P(score of a True row > score of a False one), within folds, ties half.
        balanced_accuracy: Mean over the two labels of the share predicted rightly.
        recall: Share of True rows above the lowest threshold with at most 1 % of the control rows above it.
        n: Labelled rows.
        n_positive: Of them, True.
        n_groups: Groups they are of.
        note: What is not defined, and why.
    """

    auroc: Estimate
    balanced_accuracy: Estimate
    recall: Estimate
    n: int
    n_positive: int
    n_groups: int
    note: str


def measure(
    scores: np.ndarray,
    hard: np.ndarray,
    labels: np.ndarray,
    groups: np.ndarray,
    fold: np.ndarray,
    *,
    judged: np.ndarray | None = None,
    controls: np.ndarray | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Measures:
    """All measures of some columns of scores, on the same draws.

    Args:
        scores: ``[row, column]``.
        hard: Predicted True ``[row, column]``.
        labels: ``[row]`` bool; read where ``judged``.
        groups: ``[row]``.
        fold: The fold that tested a row, -1 for none ``[row]``.
        judged: Rows that have a label ``[row]``; all by default.
        controls: Rows that set the threshold of recall ``[row]``; by default the judged ones labelled False.
        draws: Bootstrap draws.
        seed: Of the draws.
    """
    labels = np.asarray(labels, bool)
    tested = _tested(scores, fold)
    judged = tested if judged is None else judged & tested
    positive, negative = judged & labels, judged & ~labels
    controls = negative if controls is None else controls & tested
    counts = int(judged.sum()), int(positive.sum()), len(np.unique(groups[judged]))
    value, low, high = np.full((3, scores.shape[1]), np.nan)
    nothing = Estimate(value, low, high, counts[2])
    if note := too_few(int(positive.sum()), int(negative.sum())):
        return Measures(nothing, nothing, nothing, *counts, note)
    here = judged | controls
    scores, hard, positive, negative, controls, fold = (one[here] for one in (scores, hard, positive, negative, controls, fold))
    clusters = Clusters(groups[here], fold, draws=draws, seed=seed)
    auroc, notes = clusters.auroc(scores, positive, negative, fold, copies=False), []
    if np.isnan(auroc.value).all():
        notes.append("no fold was tested on both labels")
    right = (hard == labels[here][:, None]).astype(float)
    balanced = clusters.estimate((clusters.mean(right, positive) + clusters.mean(right, negative)) / 2, positive | negative)
    recall = nothing
    if controls.any():
        # Higher is more positive here, so the upper end of the controls is the low end of what is negated.
        ends = clusters.low_end(-scores, controls, FALSE_POSITIVES)
        recall = clusters.estimate(clusters.share(-scores, positive, ends, above=False), positive | controls)
    else:
        notes.append("no control row to set a threshold")
    return Measures(auroc, balanced, recall, *counts, "; ".join(notes))


def selectivity(
    scores: np.ndarray,
    labels: np.ndarray,
    shuffled: Sequence[tuple[np.ndarray, np.ndarray]],
    groups: np.ndarray,
    fold: np.ndarray,
    *,
    judged: np.ndarray | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Estimate:
    """AUROC minus the mean AUROC of probes with shuffled labels (Hewitt and Liang 2019), by column, on the same draws.

    ``shuffled``: scores ``[row, column]`` and labels ``[row]`` of each such probe, from the same folds. NaN where any of the
    AUROCs is. The other arguments are those of :func:`measure`.
    """
    tested = _tested(scores, fold)
    here = tested if judged is None else judged & tested
    clusters = Clusters(groups[here], fold[here], draws=draws, seed=seed)

    def auroc(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
        scores, labels = scores[here], np.asarray(labels, bool)[here]
        there = ~np.isnan(scores).any(1)
        if too_few(int((labels & there).sum()), int((~labels & there).sum())):
            return np.full((1 + draws, scores.shape[1]), np.nan)
        return clusters.auroc_draws(scores, labels & there, ~labels & there, fold[here], copies=False)

    controls = np.mean([auroc(*one) for one in shuffled], axis=0)
    return clusters.estimate(auroc(scores, labels) - controls, np.ones(int(here.sum()), bool))


def _tested(scores: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """Rows with a fold and a score in every column, ``[row]``."""
    return (fold >= 0) & ~np.isnan(scores).any(1)
