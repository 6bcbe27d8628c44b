"""What a probe has to beat: the same evaluation on features that hold less, or something simpler.

name               features                                                       if it does as well as the probe
random subspace    residuals in a random subspace                                 any directions of the residual would do
random features    a mean of random vectors, one a token, of the model's width    the tokens alone are enough
bag of words       TF-IDF of words and word pairs                                 the words alone are enough
prompt length      the number of tokens up to the position                        the length alone is enough
condition          of rounds: which private note the agent had                    reading the note is enough
lens margins       the lens's yes-minus-no margin                                 no training was needed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from scipy.sparse import csr_matrix

from klb_probe.lens.margin import LogitLens, MarginLens
from klb_probe.pairing.words import words_classifier
from klb_probe.probes.linear import LinearFit
from klb_probe.probes.population import Population

if TYPE_CHECKING:
    from klb_probe.probes.folds import Fold

SUBSPACE = 32


def random_subspace(width: int, k: int = SUBSPACE, seed: int = 0) -> np.ndarray:
    """Orthonormal columns ``[width, min(k, width)]`` (float32) of a uniformly random subspace.

    ``residuals @ random_subspace(...)`` is the matched random arm: in distribution a random subspace often does as well as
    a meaningful one. QR of a Gaussian, with the signs that make it Haar (Mezzadri 2007).
    """
    gaussian = np.random.default_rng(seed).standard_normal((width, min(k, width)))
    q, r = np.linalg.qr(gaussian)
    return (q * np.sign(np.diagonal(r))).astype(np.float32)


def random_features(ids: Sequence[Sequence[int]], width: int, seed: int = 0) -> np.ndarray:
    """Mean over each prompt's tokens of a fixed random Gaussian vector a token id: ``[prompt, width]`` float32.

    As wide as the model, and knows which tokens are there, but nothing of their order or of what the model computes. A
    token's vector depends on ``seed`` and its id alone, so a prompt's features do not depend on the other prompts.
    """
    lengths = np.array([len(prompt) for prompt in ids])
    known, columns = np.unique(np.concatenate([np.asarray(prompt) for prompt in ids]), return_inverse=True)
    counts = csr_matrix((np.ones(len(columns)), columns, np.append(0, lengths.cumsum())), shape=(len(ids), len(known)))
    # Repeated tokens are added up first: sums then run in the order of ids, whatever the order in the prompt.
    counts.sum_duplicates()
    table = np.stack([np.random.default_rng((seed, int(token))).standard_normal(width) for token in known])
    return ((counts @ table) / lengths[:, None]).astype(np.float32)


def conditions(names: pd.Series) -> np.ndarray:
    """The condition of each round as indicators ``[row, condition]`` float32; all 0 for rows without one."""
    return pd.get_dummies(names).to_numpy(np.float32)


def lengths(n_tokens: Sequence[float] | np.ndarray) -> np.ndarray:
    """Prompt lengths ``[n]`` as features ``[n, 1]`` float32."""
    return np.asarray(n_tokens, dtype=np.float32)[:, None]


def bag_of_words_scores(
    texts: Sequence[str], labels: np.ndarray, train: np.ndarray, test: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Log odds ``[test]`` that a text's label is True, and whether they are above 0, by words and word pairs.

    Vocabulary, weights of words and classifier are fitted on the training rows only.

    Args:
        texts: ``[n]``.
        labels: ``[n]`` bool; only those of training rows are used.
        train: Training rows ``[n]`` bool.
        test: Rows to score ``[n]`` bool.
    """
    array = np.asarray(texts, dtype=object)
    scores = words_classifier().fit(array[train], labels[train]).decision_function(array[test])
    return scores, scores > 0


def bag_of_words_cross_fit(
    texts: Sequence[str], population: Population, folds: Sequence[Fold], labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Out-of-fold scores by words, whether they are above the classifier's own threshold, and the fold: each ``[row]``.

    A fold learns from the population's rows among its training rows and scores all its test rows, of the population or not.
    As for the probes, scores are z-scored by the fold's training rows labelled False. A row that is never tested has NaN, False
    and -1, as has the test part of a fold with one label only, or no words, to learn from.

    Args:
        texts: Of every row of the table ``[row]``.
        population: Which rows to learn from.
        folds: Their masks are over the rows of the table.
        labels: Of the population's rows ``[n]`` bool.
    """
    rows = np.arange(len(texts))
    scores, hard, fold_of = np.full(len(rows), np.nan), np.zeros(len(rows), bool), np.full(len(rows), -1)
    placed = np.zeros(len(rows), bool)
    placed[population.rows] = labels
    for number, fold in enumerate(folds):
        train = fold.train & np.isin(rows, population.rows)
        if len(set(placed[train])) < 2 or not any(texts[row].strip() for row in rows[train]):
            continue
        fold_of[fold.test] = number
        negatives = train & ~placed
        wanted = negatives | fold.test
        found, above = np.full(len(rows), np.nan), np.zeros(len(rows), bool)
        found[wanted], above[wanted] = bag_of_words_scores(texts, placed, train, wanted)
        spread = found[negatives].std() or 1.0
        scores[fold.test] = ((found - found[negatives].mean()) / spread)[fold.test]
        hard[fold.test] = above[fold.test]
    return scores, hard, fold_of


def lens_margins(lens: LogitLens | MarginLens, residuals: np.ndarray, layer: int) -> np.ndarray:
    """The lens's yes-minus-no margins ``[n]`` (logits) of residuals ``[n, d]`` of a layer; NaN where it does not read it."""
    if not lens.reads(layer):
        return np.full(len(residuals), np.nan, dtype=np.float32)
    tensor = torch.tensor(residuals, dtype=torch.float32, device=lens.readout.directions.device)
    return lens.decode(tensor, layer).margin.cpu().numpy()


def toward_owed(margins: np.ndarray, questions: Sequence[str] | np.ndarray) -> np.ndarray:
    """Margins ``[n]`` toward owed: under the reversed question (may the company refuse?) "Yes" means not owed."""
    return np.where(np.asarray(questions) == "reversed", -margins, margins)


@dataclass(frozen=True)
class OneNumber:
    """A feature that is the score already (a lens margin, a length): training only says which way it points, and from where.

    The direction is the sign of the difference of the training rows' class means (+1 for a tie), the threshold their midpoint.
    """

    name: str = "one number"
    settings: tuple[float, ...] = (0.0,)
    needs_contrast: bool = False

    def fit(
        self,
        features: np.ndarray,
        labels: np.ndarray,
        contrast: np.ndarray | None = None,
        *,
        settings: Sequence[float] | None = None,
        seed: int = 0,
    ) -> list[LinearFit]:
        """The same fit for every setting, of features ``[row, 1]``; see :class:`klb_probe.probes.linear.Estimator`."""
        above, below = (features[chosen].mean(0, dtype=np.float64) for chosen in (labels, ~labels))
        direction = np.where(above < below, -1.0, 1.0)
        fit = LinearFit(direction.astype(np.float32), -float(direction @ (above + below)) / 2)
        return [fit] * len(self.settings if settings is None else settings)


one_number = OneNumber()
