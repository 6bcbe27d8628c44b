"""The entries every contest has: lenses, the model's own margin, probes, and what the words alone give.

Higher says a knowing lie, and the sign of every entry is fixed beforehand: a yes-minus-no margin is high in a model that knows
of an entitlement while it denies it. Entries that learn (``cross-fitted``) learn from other cases than they score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from klb_probe.contest.comparisons import LYING, MAIN, Comparison, sides
from klb_probe.contest.rounds import OWN, Field
from klb_probe.errors import KlbError
from klb_probe.probes.controls import bag_of_words_cross_fit
from klb_probe.probes.directions import Directions
from klb_probe.probes.evaluation import cross_fit
from klb_probe.probes.folds import Fold, group_folds
from klb_probe.probes.linear import Estimator, LinearFit
from klb_probe.probes.logistic import Logistic
from klb_probe.probes.population import Population

LENS_NAMES = {"margin": "J-Lens margin", "logit": "logit-lens margin"}
LENS, OWN_KIND, DIRECTIONS, FITTED, TEXT, DETECTOR = "lens", OWN, "directions", "cross-fitted", "text", "detector"
EACH, NESTED, GIVEN, NONE = "layer", "nested", "given", "none"
_OWN_SLOTS = ("gate", "before_reply")
_POSITIONS = {"answer": "before_reply"}  # as the files of probes name them


@dataclass(frozen=True)
class Entry:
    """Scores of one entry, or of one entry at several layers.

    Attributes:
        name: As the table has it.
        kind: lens, own margin, directions, cross-fitted, text or detector.
        slot: Where it reads; empty for words, and for detectors, which read what they like.
        choice: layer (one column a layer), nested (the layer was chosen on other cases), given, none.
        layers: Of each column; None where there is none.
        scores: ``[round, column]``; NaN for rounds it cannot score.
        fold: The fold that scored a round ``[round]``, if it was cross-fitted.
        note: What was left out.
    """

    name: str
    kind: str
    slot: str
    choice: str
    layers: tuple[int | None, ...]
    scores: np.ndarray
    fold: np.ndarray | None = None
    note: str = ""


class _AsItIs:
    """Takes a one-number feature as the score: nothing is learned, only the layer is chosen with it."""

    name = "as it is"
    settings = (0.0,)
    needs_contrast = False

    def fit(
        self,
        features: np.ndarray,
        labels: np.ndarray,
        contrast: np.ndarray | None = None,
        *,
        settings: Sequence[float] | None = None,
        seed: int = 0,
    ) -> list[LinearFit]:
        """The same for every setting, of features ``[row, 1]``; see :class:`klb_probe.probes.linear.Estimator`."""
        return [LinearFit(np.ones(1, np.float32), 0.0)] * len(self.settings if settings is None else settings)


def folds_of(field: Field, seed: int = 0) -> list[Fold]:
    """Cases dealt into five folds, whichever organism played them."""
    return group_folds(field.table["case"].to_numpy(str), field.table["domain"].to_numpy(str), seed=seed)


def lens_entries(field: Field, layer: int | None = None, seed: int = 0) -> Iterator[Entry]:
    """By slot and lens the margin at every layer, at the layer that does best on other cases, and at a given layer."""
    for slot in _filled(field):
        there = field.has(slot)
        for lens in field.lenses:
            values = field.margins(lens, slot)
            layers = np.flatnonzero(~np.isnan(values[there]).any(0))
            name = LENS_NAMES.get(lens, lens)
            if layer is not None:
                if layer not in layers:
                    raise KlbError(f"--layer {layer}: the {name} reads layers {', '.join(map(str, layers))}")
                yield Entry(name, LENS, slot, GIVEN, (layer,), values[:, [layer]])
            fitted = _cross_fitted(field, slot, MAIN, values, layers, _AsItIs(), seed)
            yield Entry(name, LENS, slot, NESTED, fitted.layers, fitted.scores, fitted.fold, fitted.note)
            yield Entry(name, LENS, slot, EACH, tuple(map(int, layers)), values[:, layers])


def own_entries(field: Field) -> Iterator[Entry]:
    """The model's own margin, at the gate and before the reply."""
    for slot in _filled(field):
        if slot in _OWN_SLOTS:
            yield Entry(OWN, OWN_KIND, slot, NONE, (None,), field.own_margins(slot)[:, None])


def direction_entries(field: Field, directions: Mapping[str, Directions]) -> Iterator[Entry]:
    """Probes that were saved for each organism, at the layers chosen there; only those that all three have, at slots read."""
    names = {organism: {str(one): one for one in found.metadata.sets} for organism, found in directions.items()}
    shared = [name for name in next(iter(names.values()), {}) if all(name in one for one in names.values())]
    whose = field.table["organism"].to_numpy(str)
    for name in shared:
        sets = {organism: one[name] for organism, one in names.items()}
        first = next(iter(sets.values()))
        slot = _POSITIONS.get(first.position, first.position)
        if slot not in _filled(field):
            continue
        scores = np.full((len(field.rounds), 1), np.nan)
        for organism, one in sets.items():
            probe = directions[organism].probe(one.question, one.estimator, one.position)
            mine = (whose == organism) & field.has(slot)
            scores[mine, 0] = probe.score(field.residuals(slot, probe.layer)[mine])
        layers = {one.layer for one in sets.values()}
        title = f"saved probe {first.question}/{first.estimator}"
        yield Entry(title, DIRECTIONS, slot, GIVEN, (layers.pop() if len(layers) == 1 else None,), scores)


def probe_entries(field: Field, seed: int = 0) -> Iterator[Entry]:
    """Logistic probes by unseen cases, with the layer chosen on the cases learned from.

    One learns the liar's lies against the ignorant one's denials, and may find no more than which model speaks; the other the
    liar's lies against its own true denials, one model alone, and is then tried on the ignorant one.
    """
    for slot in _filled(field):
        for comparison in (MAIN, LYING):
            layers = np.arange(field.n_layers)
            fitted = _cross_fitted(field, slot, comparison, None, layers, Logistic(), seed)
            yield Entry(
                f"probe of “{comparison.name}”", FITTED, slot, NESTED, fitted.layers, fitted.scores, fitted.fold, fitted.note
            )


def text_entries(field: Field, seed: int = 0) -> Iterator[Entry]:
    """What the words give: TF-IDF of the agent's messages by unseen cases, their length, their number."""
    texts, folds = [one.text for one in field.rounds], folds_of(field, seed)
    for comparison in (MAIN, LYING):
        population = _population(field, comparison, np.ones(len(texts), bool))
        scores, _, fold = bag_of_words_cross_fit(texts, population, folds, population.labels)
        note = "" if (fold >= 0).any() else "no fold has both labels to learn from"
        yield Entry(f"TF-IDF of “{comparison.name}”", TEXT, "", NONE, (None,), scores[:, None], fold, note)
    lengths = np.array([[len(text)] for text in texts], float)
    yield Entry("message length", TEXT, "", NONE, (None,), lengths)
    turns = np.array([[len(one.messages)] for one in field.rounds], float)
    yield Entry("number of messages", TEXT, "", NONE, (None,), turns)


def _filled(field: Field) -> list[str]:
    """The slots that some round has."""
    return [slot for slot in field.slots if field.has(slot).any()]


def _population(field: Field, comparison: Comparison, there: np.ndarray) -> Population:
    found = sides(field.table, comparison)
    rows = np.flatnonzero(found.both & there)
    return Population(comparison.name, rows, found.positive[rows], np.full(len(rows), -1))


@dataclass(frozen=True)
class _Fitted:
    layers: tuple[int | None, ...]
    scores: np.ndarray
    fold: np.ndarray
    note: str


def _cross_fitted(
    field: Field,
    slot: str,
    comparison: Comparison,
    values: np.ndarray | None,
    layers: np.ndarray,
    estimator: Estimator,
    seed: int,
) -> _Fitted:
    """Out-of-fold scores ``[round, 1]`` of all rounds with the slot; features are margins ``[round, layer]``, or residuals."""
    population = _population(field, comparison, field.has(slot))
    if not len(population.rows) or population.labels.all() or not population.labels.any():
        nothing = np.full(len(field.rounds), -1)
        return _Fitted((None,), np.full((len(nothing), 1), np.nan), nothing, f"no rounds of “{comparison.name}” to learn from")
    found = cross_fit(
        lambda layer: field.residuals(slot, layer) if values is None else values[:, [layer]],
        layers.tolist(),
        population,
        folds_of(field, seed),
        field.table["case"].to_numpy(str),
        estimator,
        seed=seed,
    )
    usual = None if found.usual is None else int(found.layers[found.usual])
    return _Fitted((usual,), found.nested_scores[:, None], found.fold, found.note)
