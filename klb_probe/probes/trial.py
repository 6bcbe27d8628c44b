"""One question at one position: every estimator beside its controls, as lines of the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from klb_probe.probes.controls import (
    SUBSPACE,
    bag_of_words_cross_fit,
    conditions,
    lengths,
    one_number,
    random_features,
    random_subspace,
    toward_owed,
)
from klb_probe.probes.evaluation import CrossFit, cross_fit
from klb_probe.probes.folds import shuffled_within_groups
from klb_probe.probes.lens_cosines import lens_cosines
from klb_probe.probes.linear import Estimator
from klb_probe.probes.linear_probe import LinearProbe
from klb_probe.probes.mass_mean import MeanDifference
from klb_probe.probes.measures import Measures, measure, selectivity
from klb_probe.probes.population import Population
from klb_probe.probes.questions import Question
from klb_probe.probes.stage import Stage

RESIDUAL, SHUFFLED, SUBSPACE_FEATURE, RANDOM = "residual", "shuffled labels", "random subspace", "random features"
WORDS, LENGTH, CONDITION = "bag of words", "prompt length", "condition"
LENS_FEATURES = {"margin": "J-Lens margin", "logit": "logit-lens margin"}
LAYER, NESTED, NONE = "layer", "nested", "none"
DRAWS = 2000
FEWEST_CONTROLS = 20  # rounds of the control condition below which all owed rounds without a lie set the threshold of recall
Line = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One question at one position.

    Attributes:
        question: The question.
        stage: The position.
        population: What is learned from, and judged.
        shuffles: Runs with shuffled labels.
        seed: Of everything random.
    """

    question: Question
    stage: Stage
    population: Population
    shuffles: int
    seed: int

    def fit(
        self, features: Callable[[int], np.ndarray], layers: Sequence[int], estimator: Estimator, **changes: Any
    ) -> CrossFit:
        """Out-of-fold scores of an estimator on some features."""
        where = (self.population, self.stage.folds, self.stage.groups, estimator)
        return cross_fit(features, layers, *where, seed=self.seed, **changes)

    @property
    def labels(self) -> np.ndarray:
        """The population's labels, over all rows of the table ``[row]``."""
        return self.placed(self.population.labels)

    def placed(self, labels: np.ndarray) -> np.ndarray:
        """Labels of the population's rows over all rows of the table; False elsewhere."""
        whole = np.zeros(len(self.stage.rows), bool)
        whole[self.population.rows] = labels
        return whole

    @property
    def judged(self) -> np.ndarray:
        """The population's rows as a mask ``[row]``."""
        return self.placed(np.ones(len(self.population.rows), bool))

    @property
    def controls(self) -> np.ndarray | None:
        """Rounds of the control condition without a lie, where there are enough to set a threshold; else None."""
        if self.question.family != "rounds":
            return None
        rows = self.stage.rows
        quiet = ((rows["condition"] == "control") & ~rows["lied"].fillna(True).astype(bool)).to_numpy() & self.stage.usable
        return quiet if quiet.sum() >= FEWEST_CONTROLS else None

    def measured(self, scores: np.ndarray, hard: np.ndarray, fold: np.ndarray) -> Measures:
        """Measures of columns of scores ``[row, column]``."""
        controls = self.controls
        where: dict[str, Any] = {"judged": self.judged, "controls": controls, "draws": DRAWS, "seed": self.seed}
        found = measure(scores, hard, self.labels, self.stage.groups, fold, **where)
        if controls is None and self.question.family == "rounds" and not found.note:
            return replace(
                found, note=f"recall: fewer than {FEWEST_CONTROLS} control rounds, threshold from all owed rounds without a lie"
            )
        return found

    def keys(self, estimator: str, feature: str) -> Line:
        """What names a line."""
        return {
            **{"question": self.question.name, "position": self.stage.position, "estimator": estimator},
            **{"feature": feature, "split": self.stage.split},
        }


def estimator_lines(trial: Trial, estimator: Estimator) -> tuple[list[Line], CrossFit, list[LinearProbe]]:
    """An estimator on residuals, with shuffled labels, in a random subspace, and on random features; and its directions."""
    stage = trial.stage
    found = trial.fit(stage.residuals, stage.layers, estimator)
    if (found.chosen < 0).all():
        return _layer_lines(trial, estimator.name, RESIDUAL, found)[-1:], found, []
    probes = _final_probes(trial, estimator, found)
    directions = np.stack([probe.direction for probe in probes])
    own = _layer_lines(trial, estimator.name, RESIDUAL, found)
    cosines = {lens.name: lens_cosines(directions, stage.layers, lens) for lens in stage.lenses}
    for line in own:
        at = line["layer"]
        line |= {"cosine_jlens": cosines.get("margin", np.full(len(directions), np.nan))[at]}
        line |= {"cosine_logit": cosines["logit"][at]}
        if len(estimator.settings) > 1:
            line["inverse_l2"] = _setting(found, at)
    lines = [*own, *_shuffled_lines(trial, estimator, found, own)]
    projection = random_subspace(stage.data.d_model, SUBSPACE, trial.seed)
    inside = trial.fit(lambda layer: stage.residuals(layer) @ projection, stage.layers, estimator)
    lines += _layer_lines(trial, estimator.name, SUBSPACE_FEATURE, inside)
    tokens = trial.fit(lambda _: _random_features(trial), [0], estimator)
    lines.append(_single_line(trial, estimator.name, RANDOM, tokens.scores.T, tokens.hard.T, tokens.fold, tokens.note))
    return lines, found, probes


def shared_lines(trial: Trial) -> Iterator[Line]:
    """Controls that do not depend on the estimator: words, length, lens margins; of rounds, the condition."""
    stage, rows = trial.stage, trial.stage.rows
    scores, hard, fold = bag_of_words_cross_fit(rows["text"].tolist(), trial.population, stage.folds, trial.population.labels)
    yield _single_line(trial, "logistic", WORDS, scores[:, None], hard[:, None], fold)
    counted = trial.fit(lambda _: _lengths_read(trial), [0], one_number)
    yield _single_line(trial, one_number.name, LENGTH, counted.scores.T, counted.hard.T, counted.fold, counted.note)
    if trial.question.family == "rounds":
        mean_difference = MeanDifference()
        noted = trial.fit(lambda _: conditions(rows["condition"]), [0], mean_difference)
        yield _single_line(trial, mean_difference.name, CONDITION, noted.scores.T, noted.hard.T, noted.fold, noted.note)
    # What the probe is asked decides which way a yes points: toward owed, but for the model's own answer.
    ones = np.ones(len(rows))
    sign = ones if trial.question.family == "answer" else toward_owed(ones, rows["question"])
    for lens in stage.lenses:
        read = [layer for layer in stage.layers if lens.reads(layer)]
        yield from _layer_lines(
            trial,
            one_number.name,
            LENS_FEATURES.get(lens.name, lens.name),
            trial.fit(stage.margins(lens, sign), read, one_number),
        )


def _layer_lines(trial: Trial, estimator: str, feature: str, found: CrossFit) -> list[Line]:
    """A line a layer, then the nested one."""
    scores = np.vstack([found.scores, found.nested_scores]).T
    measured = trial.measured(scores, np.vstack([found.hard, found.nested_hard]).T, found.fold)
    chosen = found.usual
    lines = [
        {**trial.keys(estimator, feature), "choice": LAYER, "layer": int(layer), **_numbers(measured, at, found.note)}
        for at, layer in enumerate(found.layers)
    ]
    nested = {
        **{"choice": NESTED, "layer": None if chosen is None else int(found.layers[chosen])},
        **{"chosen": " ".join(str(found.layers[at]) for at in found.chosen if at >= 0)},
    }
    return [*lines, {**trial.keys(estimator, feature), **nested, **_numbers(measured, len(found.layers), found.note)}]


def _single_line(
    trial: Trial, estimator: str, feature: str, scores: np.ndarray, hard: np.ndarray, fold: np.ndarray, note: str = ""
) -> Line:
    """The line of features that have no layer."""
    return {**trial.keys(estimator, feature), "choice": NONE, **_numbers(trial.measured(scores, hard, fold), 0, note)}


def _numbers(measured: Measures, at: int, note: str) -> Line:
    line: Line = {"n": measured.n, "n_positive": measured.n_positive, "n_groups": measured.n_groups}
    for name in ("auroc", "balanced_accuracy", "recall"):
        estimate = getattr(measured, name)
        column = "recall_1_percent" if name == "recall" else name
        line |= {column: estimate.value[at], f"{column}_low": estimate.low[at], f"{column}_high": estimate.high[at]}
    return {**line, "note": "; ".join(one for one in (measured.note, note) if one)}


def _shuffled_lines(trial: Trial, estimator: Estimator, found: CrossFit, own: list[Line]) -> Iterator[Line]:
    """Mean, lowest and highest AUROC over runs with shuffled labels; adds the selectivity to the probe's own lines."""
    stage, population = trial.stage, trial.population
    runs = []
    for number in range(trial.shuffles):
        labels = shuffled_within_groups(population.labels, stage.groups[population.rows], trial.seed + 1000 + number)
        run = trial.fit(stage.residuals, stage.layers, estimator, labels=labels, like=found)
        runs.append((np.vstack([run.scores, run.nested_scores]).T, trial.placed(labels)))
    where: dict[str, Any] = {"judged": trial.judged, "draws": DRAWS, "seed": trial.seed}
    scores = np.vstack([found.scores, found.nested_scores]).T
    gained = selectivity(scores, trial.labels, runs, stage.groups, found.fold, **where)
    for at, line in enumerate(own):
        line |= {
            "selectivity": gained.value[at],
            "selectivity_low": gained.low[at],
            "selectivity_high": gained.high[at],
        }
    single: dict[str, Any] = {"judged": trial.judged, "draws": 2, "seed": trial.seed}
    nothing = np.zeros(scores.shape, bool)
    aurocs = np.stack([measure(one, nothing, labels, stage.groups, found.fold, **single).auroc.value for one, labels in runs])
    kept = ("question", "position", "estimator", "split", "choice", "layer", "chosen", "n", "n_positive", "n_groups")
    for at, line in enumerate(own):
        values = aurocs[:, at]
        note = f"mean, lowest and highest of {len(runs)} runs"
        if np.isnan(values).any():
            note = line["note"] or "not estimable: a run with shuffled labels has no AUROC"
        yield {
            **{name: line[name] for name in kept if name in line},
            **{"feature": SHUFFLED, "auroc": values.mean(), "auroc_low": values.min(), "auroc_high": values.max()},
            "note": note,
        }


def _final_probes(trial: Trial, estimator: Estimator, found: CrossFit) -> list[LinearProbe]:
    """A probe a layer, learned from all rows of the population, with the setting that was chosen most often."""
    population, probes = trial.population, []
    for at, layer in enumerate(trial.stage.layers):
        values = trial.stage.residuals(layer)[population.rows]
        settings = [_setting(found, at)]
        (fit,) = estimator.fit(values, population.labels, population.contrast, settings=settings, seed=trial.seed)
        where = {"question": trial.question.name, "estimator": estimator.name, "position": trial.stage.position}
        probes.append(LinearProbe.of(fit, values, **where, layer=layer))
    return probes


def _setting(found: CrossFit, at: int) -> float:
    used = found.setting[:, at]
    return Counter(used[~np.isnan(used)].tolist()).most_common(1)[0][0]


def _lengths_read(trial: Trial) -> np.ndarray:
    """Tokens up to the position: of a round's later moments more than its prompt. NaN for rows without it."""
    sites = trial.stage.data.sites[trial.stage.position]
    return lengths([np.nan if site is None else len(site.ids) for site in sites])


def _random_features(trial: Trial) -> np.ndarray:
    """Of the rows that have the position; NaN elsewhere."""
    stage = trial.stage
    sites = stage.data.sites[stage.position]
    ids = [site.ids for row in np.flatnonzero(stage.usable) if (site := sites[row]) is not None]
    values = np.full((len(stage.rows), stage.data.d_model), np.nan, np.float32)
    values[stage.usable] = random_features(ids, stage.data.d_model, trial.seed)
    return values
