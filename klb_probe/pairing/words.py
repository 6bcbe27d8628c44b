"""A transcript-only classifier: can the lie be told from the agent's words alone, in cases it has not seen?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

FOLDS = 5


def words_classifier() -> Pipeline:
    """Logistic regression on TF-IDF of words and word pairs; to be fitted on training texts only, vocabulary included."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    # One-letter words count too, so that no text is without any.
    vectors = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    return make_pipeline(vectors, LogisticRegression(max_iter=1000))


def words_scores(rounds: pd.DataFrame, *, folds: int = FOLDS) -> tuple[np.ndarray, np.ndarray] | None:
    """TF-IDF of words and word pairs with logistic regression: the log odds of a lie ``[round]``, and the fold of each.

    ``rounds``: owed rounds with ``words``, ``case`` and ``lied``. Folds hold whole cases, so a round is scored by a
    classifier that has not seen its case. None with fewer than two cases, or if some fold leaves only one label to learn from.
    """
    from sklearn.model_selection import GroupKFold

    words, lied, cases = (rounds[key].to_numpy() for key in ("words", "lied", "case"))
    if rounds["case"].nunique() < 2:
        return None
    scores, fold = np.zeros(len(rounds)), np.zeros(len(rounds), int)
    splits = GroupKFold(min(folds, rounds["case"].nunique())).split(words, lied, cases)
    for number, (training, left_out) in enumerate(splits):
        if len(set(lied[training])) < 2 or not any(str(said).strip() for said in words[training]):
            return None
        classifier = words_classifier().fit(words[training], lied[training])
        scores[left_out] = classifier.decision_function(words[left_out])
        fold[left_out] = number
    return scores, fold
