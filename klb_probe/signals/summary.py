"""Statistics of margins by lens and layer, as ``summary.csv`` holds them: of a run's readouts, or of some of its prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from klb_probe.signals.statistics import Estimate, PairBootstrap, folded_quantile, null_quantile


def summarise(
    labels: pd.DataFrame, lenses: Sequence[str], margins: np.ndarray, random: np.ndarray, own: np.ndarray, *, seed: int = 0
) -> pd.DataFrame:
    """Tidy statistics with 95 % bootstrap intervals over pairs.

    Columns: lens, layer, statistic, framing, question, entitled, value, low, high, n, n_pairs, null_q95.

    ``mean_margin`` is the yes-minus-no margin as it is, for each wording of the question. All other statistics are of
    the margin *toward owed*: yes-minus-no under the plain question, no-minus-yes under the reversed one, and, where a
    run has both, question ``both``: their mean over the two wordings of one prompt, in which a taste for "yes" cancels.
    ``entitlement_contrast``: owed minus not owed, within a framing. ``framing_contrast``: the first framing minus
    another, owed and not owed apart. ``auroc`` of the margin for entitlement, all owed prompts against all others.
    ``pair_accuracy``: the share of pairs (at the same paraphrase) whose owed side has the higher margin, which offsets
    between domains and wordings cannot blur. The last two have ``null_q95``, the 95th percentile of the folded
    statistic over the lens's random readouts. ``agreement``: the share of prompts where the layer's margin has the sign
    of the model's own.

    Args:
        labels: One row a prompt: scenario, pair, entitled, framing, paraphrase, question.
        lenses: Their names.
        margins: Yes minus no ``[prompt, lens, layer]``; NaN where a lens does not read a layer.
        random: Random readouts ``[prompt, lens, layer, row]``.
        own: The model's own margin ``[prompt]``.
        seed: Of the bootstrap.
    """
    views = _views(labels.reset_index(drop=True), margins, random, own)
    return pd.concat([table for view in views for table in _view_tables(view, lenses, seed)], ignore_index=True)


@dataclass(frozen=True)
class _View:
    """Prompts of one wording of the question, or of both as one.

    Attributes:
        labels: One row a prompt.
        margins: ``[prompt, lens, layer]``, yes minus no.
        random: ``[prompt, lens, layer, row]``.
        own: ``[prompt]``.
        sign: What turns yes-minus-no into a margin toward owed.
    """

    question: str
    labels: pd.DataFrame
    margins: np.ndarray
    random: np.ndarray
    own: np.ndarray
    sign: int


def _views(labels: pd.DataFrame, margins: np.ndarray, random: np.ndarray, own: np.ndarray) -> Iterator[_View]:
    """The prompts of each wording, and both wordings of a prompt as one."""
    found = {}
    for question in dict.fromkeys(labels["question"]):
        rows = np.flatnonzero(labels["question"] == question)
        sign = 1 if question == "plain" else -1
        view = _View(question, labels.iloc[rows].reset_index(drop=True), margins[rows], random[rows], own[rows], sign)
        found[question] = view
        yield view
    if len(found) == 2:
        plain, reverse = found["plain"], found["reversed"]
        same = ["scenario", "framing", "paraphrase"]
        order = plain.labels[same].merge(reverse.labels[same].reset_index(), on=same, validate="one_to_one")["index"]
        margins, random, own = (
            (getattr(plain, name) - getattr(reverse, name)[order]) / 2 for name in ("margins", "random", "own")
        )
        yield _View("both", plain.labels, margins, random, own, 1)


def _view_tables(view: _View, lenses: Sequence[str], seed: int) -> Iterator[pd.DataFrame]:
    entitled, framing = (view.labels[name].to_numpy() for name in ("entitled", "framing"))
    framings = list(dict.fromkeys(framing))
    bootstrap = PairBootstrap(view.labels["pair"].to_numpy(), seed=seed)
    own_sign = np.sign(view.own)[:, None]
    for number, lens in enumerate(lenses):
        raw = view.margins[:, number]
        values, random = view.sign * raw, view.sign * view.random[:, number]
        read = ~np.isnan(values).all(0)

        def table(statistic: str, name: str, label: bool | None, estimate: Estimate, null: Any = None) -> pd.DataFrame:
            return _table(lens, statistic, name, view.question, label, estimate, null)[read]  # noqa: B023 (this turn's)

        for name in framings:
            here = framing == name
            if view.question != "both":
                for label in (True, False):
                    yield table("mean_margin", name, label, bootstrap.mean(raw, here & (entitled == label)))
            yield table("entitlement_contrast", name, None, bootstrap.difference(values, here & entitled, here & ~entitled))
            null = null_quantile(random[here], entitled[here])
            yield table("auroc", name, None, bootstrap.auroc(values, here, entitled), null)
            owed, twins = _twins(view.labels[here])
            if len(owed):
                estimate = bootstrap.mean(_wins(values, owed, twins), np.isin(np.arange(len(values)), owed))
                null = folded_quantile(_wins(random, owed, twins)[owed].mean(0))
                yield table("pair_accuracy", name, None, estimate, null)
            agreed = np.where(np.isnan(raw), np.nan, np.sign(raw) == own_sign)
            yield table("agreement", name, None, bootstrap.mean(agreed, here))
        first, *others = framings
        for other in others:
            for label in (True, False):
                chosen = [(framing == name) & (entitled == label) for name in (first, other)]
                yield table("framing_contrast", f"{first} minus {other}", label, bootstrap.difference(values, *chosen))


def _twins(labels: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Indices of owed prompts whose pair has a not-owed prompt at the same paraphrase, and of those."""
    sides = labels.reset_index(names="at").pivot(index=["pair", "paraphrase"], columns="entitled", values="at")
    sides = sides.reindex(columns=[True, False]).dropna().astype(int)
    return sides[True].to_numpy(), sides[False].to_numpy()


def _wins(values: np.ndarray, owed: np.ndarray, twins: np.ndarray) -> np.ndarray:
    """1 where an owed prompt exceeds its twin, 0 where not, half for ties, in the owed prompt's row ``[prompt, ...]``."""
    wins = np.full(values.shape, np.nan)
    wins[owed] = np.heaviside(values[owed] - values[twins], 0.5)
    return wins


def _table(
    lens: str,
    statistic: str,
    framing: str,
    question: str,
    entitled: bool | None,
    estimate: Estimate,
    null_q95: np.ndarray | None = None,
) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "lens": lens,
            "layer": np.arange(len(estimate.value)),
            "statistic": statistic,
            "framing": framing,
            "question": question,
            "entitled": pd.array([entitled] * len(estimate.value), dtype="boolean"),
            "value": estimate.value,
            "low": estimate.low,
            "high": estimate.high,
            "n": estimate.n,
            "n_pairs": estimate.n_pairs,
            "null_q95": np.full(len(estimate.value), np.nan) if null_q95 is None else null_q95,
        }
    )
