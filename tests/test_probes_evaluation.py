"""Scores come from groups that were not learned from, choices are made without them, and measures say what they say."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from klb_probe.errors import KlbError
from klb_probe.metrics.clusters import Clusters
from klb_probe.probes.contrast_pairs import Lat
from klb_probe.probes.evaluation import cross_fit
from klb_probe.probes.folds import Fold, domain_folds, group_folds, shuffled_within_groups
from klb_probe.probes.linear import LinearFit
from klb_probe.probes.measures import measure, selectivity
from klb_probe.probes.population import Population
from klb_probe.signals.statistics import plain_auroc

DRAWS = 200


@dataclass
class Ridge:
    """Least squares with a penalty on the weights, strongest first; keeps what it was asked to learn from."""

    settings: tuple[float, ...] = (1e4, 1.0)
    needs_contrast: bool = False
    name: str = "ridge"
    asked: list[tuple[np.ndarray, np.ndarray, np.ndarray, tuple[float, ...]]] = field(default_factory=list)

    def fit(self, features, labels, contrast=None, *, settings=None, seed=0):
        settings = tuple(self.settings if settings is None else settings)
        self.asked.append((features, labels, contrast, settings))
        centre, target = features.mean(0), labels - labels.mean()
        x = features - centre
        fits = []
        for penalty in settings:
            direction = np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ target)
            fits.append(LinearFit(direction, float(labels.mean() - 0.5 - centre @ direction)))
        return fits


class Data:
    """Groups of two rows with opposite labels and as many rows outside the population; noise, and a signal at some layers."""

    def __init__(self, seed=0, n_groups=40, n_domains=5, n_layers=5, d=8, signal=None):
        rng = np.random.default_rng(seed)
        self.groups = np.tile(np.repeat(np.arange(n_groups), 2), 2)
        self.domains = self.groups % n_domains
        self.labels = np.tile([True, False], 2 * n_groups)
        self.features = rng.standard_normal((n_layers, len(self.groups), d)).astype(np.float32)
        for layer, size in (signal or {}).items():
            self.features[layer, :, 0] += size * self.labels
        rows = np.arange(2 * n_groups)
        self.population = Population("honest: owed or not", rows, self.labels[rows], self.groups[rows])
        self.judged = np.arange(len(self.groups)) < 2 * n_groups

    def fit(self, estimator=None, **more):
        more = {"folds": domain_folds(self.domains), "groups": self.groups, **more}
        layers = range(len(self.features))
        return cross_fit(self.features.__getitem__, layers, self.population, estimator=estimator or Ridge(), **more)

    def measures(self, scores, hard, fold, **more):
        more = {"judged": self.judged, "draws": DRAWS, **more}
        return measure(scores, hard, self.labels, self.groups, fold, **more)


def test_a_planted_layer_is_chosen_in_every_fold_and_transfers():
    data = Data(signal={2: 3.0})
    found = data.fit()
    assert found.note == ""
    assert list(found.layers[found.chosen]) == [2] * 5
    assert not np.isnan(found.scores).any()
    for judged in (data.judged, ~data.judged):
        made = data.measures(found.nested_scores[:, None], found.nested_hard[:, None], found.fold, judged=judged)
        assert made.auroc.value[0] > 0.95
        assert made.auroc.low[0] > 0.9
        assert made.balanced_accuracy.value[0] > 0.85
        assert (made.n, made.n_positive, made.n_groups) == (80, 40, 40)


def test_nothing_is_chance_for_the_nested_choice_and_not_for_the_best_layer():
    nested, held, best = [], [], []
    for seed in range(20):
        data = Data(seed, n_layers=12)
        found = data.fit(Ridge((1.0,)))
        scores = np.column_stack([found.nested_scores, found.scores.T])
        made = data.measures(scores, scores > 0, found.fold).auroc
        nested.append(made.value[0])
        held.append(made.low[0] <= 0.5 <= made.high[0])
        best.append(made.value[1:].max())
    assert np.mean(nested) == pytest.approx(0.5, abs=0.04)
    assert np.mean(held) >= 0.8
    assert np.mean(best) > 0.57


def test_scores_are_those_of_a_fit_without_the_fold():
    data = Data(signal={1: 1.0})
    folds = domain_folds(data.domains)
    found = data.fit()
    rows = data.population.rows
    for number, fold in enumerate(folds):
        train = rows[fold.train[rows]]
        for layer in (0, 1, 4):
            (fit,) = Ridge().fit(data.features[layer, train], data.labels[train], settings=[found.setting[number, layer]])
            false = fit.score(data.features[layer, train][~data.labels[train]])
            raw = fit.score(data.features[layer, fold.test])
            np.testing.assert_allclose(found.scores[layer, fold.test], (raw - false.mean()) / false.std(), atol=1e-4)
            assert (found.hard[layer, fold.test] == (raw > 0)).all()
            assert (found.fold[fold.test] == number).all()


def test_rows_left_out_have_no_say():
    data, other = Data(signal={2: 0.7}), Data(signal={2: 0.7})
    out = data.domains == 3
    other.features[:, out] = 50 * np.random.default_rng(9).standard_normal(other.features[:, out].shape)
    one, two = data.fit(), other.fit()
    for name in ("inner", "setting", "chosen"):
        np.testing.assert_array_equal(getattr(one, name)[3], getattr(two, name)[3])
    assert (one.inner[0] != two.inner[0]).any()


def test_what_a_group_alone_gives_is_chance_where_groups_are_whole_and_not_where_they_are_parted():
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(60), 4)
    labels = (rng.permutation(60) < 30)[groups]
    features = (5 * rng.standard_normal((60, 100))[groups] + 0.1 * rng.standard_normal((240, 100))).astype(np.float32)
    population = Population("any", np.arange(240), labels, np.full(240, -1))

    def auroc(units):
        folds = group_folds(units, np.zeros(240), 5)
        found = cross_fit(lambda _: features, [0], population, folds, units, Ridge((1.0,)))
        return measure(found.scores.T, found.hard.T, labels, groups, found.fold, draws=DRAWS).auroc

    whole, parted = auroc(groups), auroc(np.arange(240))
    assert whole.low[0] < 0.5 < whole.high[0]
    assert whole.value[0] < 0.7
    assert parted.value[0] > 0.95


def test_ties_go_to_the_first_setting_and_layer():
    data = Data(signal={0: 50.0, 1: 50.0})
    found = data.fit(Ridge((1e3, 1.0, 1e-3)))
    assert (found.inner[:, :2] == 1).all()
    assert (found.setting[:, :2] == 1e3).all()
    assert (found.chosen == 0).all()


def test_the_setting_with_the_better_inner_auroc_is_chosen():
    """One strong feature among many that are larger: the penalty that keeps it wins."""
    rng = np.random.default_rng(0)
    data = Data(n_layers=1, d=30)
    data.features[0] = 30 * rng.standard_normal(data.features[0].shape)
    data.features[0, :, 0] = 0.1 * (data.labels + 0.1 * rng.standard_normal(len(data.labels)))
    found = data.fit(Ridge((1e6, 1e-6)))
    assert (found.setting == 1e-6).all()


def test_shuffled_labels_take_the_choices_of_the_true_ones_and_give_chance():
    data = Data(signal={2: 3.0})
    real, estimator, shuffled = data.fit(), Ridge(), []
    for seed in range(10):
        labels = data.labels.copy()
        labels[data.judged] = shuffled_within_groups(data.population.labels, data.groups[data.judged], seed)
        made = data.fit(estimator, labels=labels[data.judged], like=real)
        assert (made.setting == real.setting).all()
        assert (made.chosen == real.chosen).all()
        assert np.isnan(made.inner).all()
        shuffled.append((made.nested_scores[:, None], labels))
    assert len(estimator.asked) == 10 * 5 * 5  # one fit a run, fold and layer
    assert {len(settings) for *_, settings in estimator.asked} == {1}
    more = {"judged": data.judged, "draws": DRAWS}
    controls = [measure(s, s > 0, labels, data.groups, real.fold, **more).auroc.value[0] for s, labels in shuffled]
    assert np.mean(controls) == pytest.approx(0.5, abs=0.08)
    scores = real.nested_scores[:, None]
    gain = selectivity(scores, data.labels, shuffled, data.groups, real.fold, **more)
    own = data.measures(scores, scores > 0, real.fold).auroc
    assert gain.value[0] == pytest.approx(own.value[0] - np.mean(controls))
    assert 0.3 < gain.low[0] < gain.value[0] < gain.high[0]
    nothing = selectivity(scores, data.labels, [(scores, data.labels)] * 2, data.groups, real.fold, **more)
    assert (nothing.value[0], nothing.low[0], nothing.high[0]) == (0, 0, 0)


def test_contrast_pairs_reach_the_estimator_whole_and_opposite():
    data, estimator = Data(), Ridge(needs_contrast=True)
    data.fit(estimator)
    assert len(estimator.asked) == 5 * 5 * 4
    for _, labels, contrast, _ in estimator.asked:
        pairs = contrast[contrast >= 0]
        assert len(pairs) == len(labels)
        assert all(sorted(labels[contrast == pair]) == [False, True] for pair in set(pairs))
    broken = data.population.labels.copy()
    broken[data.population.contrast == 7] = True
    estimator = Ridge(needs_contrast=True)
    data.fit(estimator, labels=broken)
    assert not any((contrast == 7).any() for _, _, contrast, _ in estimator.asked)


def test_folds_that_cannot_be_learned_from_are_noted_and_leave_no_scores():
    data = Data()
    folds = domain_folds(data.domains)
    lonely = folds[1].train & data.labels
    folds[1] = Fold("1", lonely, folds[1].test)
    found = data.fit(folds=folds)
    assert found.note == "fold 1 not used: its training rows lack a label"
    assert found.chosen[1] == -1
    assert np.isnan(found.scores[:, folds[1].test]).all()
    assert (found.fold[folds[1].test] == -1).all()
    assert not found.nested_hard[folds[1].test].any()
    assert np.isnan(found.nested_scores).sum() == folds[1].test.sum()
    assert not np.isnan(found.scores[:, ~folds[1].test]).any()
    nothing = data.fit(labels=np.zeros(80, bool))
    assert nothing.note.count("lack a label") == 5
    assert np.isnan(nothing.nested_scores).all()
    assert data.measures(nothing.scores.T, nothing.hard.T, nothing.fold).note == "not estimable (n=0)"
    one = np.arange(80) == 5  # of a group in domain 2
    assert "fold 0 not used: no inner split has both labels" in data.fit(labels=one).note
    like = data.fit(labels=one, like=found)
    assert like.note == "fold 1 not used: not used with true labels; fold 2 not used: its training rows lack a label"


def test_one_contrast_pair_is_too_few_and_stops_nothing():
    data = Data()
    data.population = replace(data.population, contrast=np.where(data.population.contrast == 7, 7, -1))
    found = data.fit(Lat())
    assert found.note.count("fewer than 2 contrast pairs") == 5
    assert (found.chosen < 0).all()


def test_rows_without_features():
    data = Data()
    data.features[:, 100] = np.nan
    found = data.fit()
    assert np.flatnonzero(found.fold < 0).tolist() == [100]
    assert np.isnan(found.nested_scores[100])
    data.features[:, [2, 4]] = np.nan
    with pytest.raises(KlbError, match="2 rows of 'honest: owed or not' have no features at layer 0"):
        data.fit()


def test_a_group_on_both_sides_is_refused():
    data = Data()
    with pytest.raises(KlbError, match="group 0 is on both sides of fold x"):
        data.fit(folds=[Fold("x", data.judged, ~data.judged)])


def test_everything_is_the_same_again():
    data = Data(signal={2: 0.5})
    first, again = data.fit(), data.fit()
    for name in ("scores", "hard", "fold", "inner", "setting", "chosen"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    one, two = (data.measures(first.scores.T, first.hard.T, first.fold) for _ in range(2))
    np.testing.assert_array_equal(one.recall.low, two.recall.low)
    assert (data.fit(seed=1).inner != first.inner).any()


@pytest.fixture
def rated():
    """Scores with ties, two columns, of 30 groups in three folds of different scale; 20 control rows that have no label."""
    rng = np.random.default_rng(3)
    groups = np.concatenate([np.repeat(np.arange(30), 4), np.arange(20)])
    fold = groups % 3
    labels = rng.random(140) < 0.4
    scores = np.round(rng.standard_normal((140, 2)) + labels[:, None] * [0.5, 1.5], 1) + fold[:, None]
    return scores, scores > 1, labels, groups, fold, np.arange(140) < 120


def brute(scores, hard, labels, unit, copy, controls):
    """AUROC, balanced accuracy and recall of one column, from their definitions.

    ``unit``: fold and group of each row; rows of one group are compared within the same ``copy`` only.
    """
    (fold, group), (up, down) = unit, (np.flatnonzero(labels), np.flatnonzero(~labels))
    alike = (group[up][:, None] == group[down]) & (copy[up][:, None] != copy[down])
    compared = (fold[up][:, None] == fold[down]) & ~alike
    area = np.heaviside(scores[up][:, None] - scores[down], 0.5)[compared].mean()
    threshold = next(value for value in np.sort(controls) if (controls > value).mean() <= 0.01)
    return area, balanced_accuracy_score(labels, hard), (scores[labels] > threshold).mean()


def test_auroc_is_that_of_the_folds_weighted_by_their_comparisons(rated):
    scores, hard, labels, groups, fold, judged = rated
    made = measure(scores, hard, labels, groups, fold, judged=judged, draws=DRAWS).auroc
    parts = [judged & (fold == one) for one in range(3)]
    weights = [labels[part].sum() * (~labels[part]).sum() for part in parts]
    for column in range(2):
        areas = [roc_auc_score(labels[part], scores[part, column]) for part in parts]
        assert made.value[column] == pytest.approx(np.average(areas, weights=weights))


@pytest.mark.parametrize("own_controls", [False, True])
def test_measures_and_their_intervals_are_those_of_repeated_groups(rated, own_controls):
    scores, hard, labels, groups, fold, judged = rated
    rest = ~judged if own_controls else judged & ~labels
    more = {"controls": rest} if own_controls else {}
    made = measure(scores, hard, labels, groups, fold, judged=judged, draws=40, seed=5, **more)
    assert (made.note, made.n, made.n_positive, made.n_groups) == ("", 120, labels[:120].sum(), 30)
    weights = Clusters(groups, fold, draws=40, seed=5).weights
    for column in range(2):
        drawn = []
        for weight in [np.ones(30), *weights]:
            times = weight[groups].astype(int)
            pick, copy = np.repeat(np.arange(140), times), np.concatenate([np.arange(n) for n in times])
            main, control = judged[pick], scores[pick[rest[pick]], column]
            pick, copy = pick[main], copy[main]
            unit = fold[pick], groups[pick]
            drawn.append(brute(scores[pick, column], hard[pick, column], labels[pick], unit, copy, control))
        low, high = np.quantile(drawn[1:], [0.025, 0.975], axis=0)
        for at, estimate in enumerate((made.auroc, made.balanced_accuracy, made.recall)):
            got = estimate.value[column], estimate.low[column], estimate.high[column]
            np.testing.assert_allclose(got, (drawn[0][at], low[at], high[at]), atol=1e-12)


def test_recall_with_many_controls_lets_one_percent_through():
    rng = np.random.default_rng(0)
    labels = np.arange(5200) < 200
    scores = rng.permutation(5200).astype(float)[:, None]
    made = measure(scores, scores > 0, labels, np.arange(5200) % 50, np.zeros(5200, int), draws=DRAWS)
    threshold = np.sort(scores[~labels, 0])[-51]  # fifty of five thousand are above it
    assert made.recall.value[0] == (scores[labels, 0] > threshold).mean()


def test_folds_are_not_compared_with_each_other():
    data = Data()
    scores = (data.labels + 100.0 * data.domains)[:, None]
    assert data.measures(scores, scores > 0, data.domains).auroc.value[0] == 1.0
    assert plain_auroc(scores[data.judged], data.population.labels)[0] == 0.6


def test_the_undefined_is_nan_with_a_reason():
    data = Data()
    scores = np.random.default_rng(0).standard_normal((160, 3))
    few = measure(scores, scores > 0, np.arange(160) < 4, data.groups, data.domains, draws=DRAWS)
    assert few.note == "not estimable (n=4)"
    for estimate in (few.auroc, few.balanced_accuracy, few.recall):
        assert np.isnan([estimate.value, estimate.low, estimate.high]).all()
    apart = measure(scores, scores > 0, data.domains < 2, data.groups, data.domains, draws=DRAWS)
    assert apart.note == "no fold was tested on both labels"
    assert np.isnan([apart.auroc.value, apart.auroc.low]).all()
    assert not np.isnan([apart.balanced_accuracy.value, apart.recall.low]).any()
    alone = data.measures(scores, scores > 0, data.domains, controls=np.zeros(160, bool))
    assert alone.note == "no control row to set a threshold"
    assert np.isnan(alone.recall.value).all()
    assert not np.isnan(alone.auroc.value).any()


@pytest.mark.parametrize("twins", [False, True])
def test_intervals_hold_the_expected_auroc_about_as_often_as_they_say(twins):
    """Rows of a group share a level. Twins: a row of either label, told apart better than rows of two groups are."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(64), 2)
    made = []
    for number in range(150):
        labels = np.arange(128) % 2 == 0 if twins else rng.random(128) < np.where(rng.random(64) < 0.5, 0.9, 0.1)[groups]
        scores = (rng.standard_normal(64)[groups] + 0.5 * rng.standard_normal(128) + labels)[:, None]
        found = measure(scores, scores > 0.5, labels, groups, groups % 8, draws=DRAWS, seed=number).auroc
        made.append((found.low[0], found.value[0], found.high[0]))
    low, value, high = np.array(made).T
    width = (high - low).mean()
    assert 0.89 < np.mean((low <= value.mean()) & (value.mean() <= high)) <= 1.0
    assert width == pytest.approx(2 * 1.96 * value.std(), rel=0.25)
    assert ((low + high) / 2 - value).mean() == pytest.approx(0, abs=0.05 * width)
