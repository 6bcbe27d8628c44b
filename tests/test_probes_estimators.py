"""Estimators against planted directions, null data and independent computations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import ortho_group
from sklearn.covariance import ledoit_wolf
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

from klb_probe.errors import KlbError
from klb_probe.probes.ccs import Ccs
from klb_probe.probes.contrast_pairs import Lat, pair_halves
from klb_probe.probes.estimators import ESTIMATORS
from klb_probe.probes.logistic import Logistic
from klb_probe.probes.mass_mean import MassMean
from klb_probe.probes.row_space import RowSpace

NAMES = tuple(ESTIMATORS)


def planted(rows: int, width: int, delta: float, *, seed: int = 0, shared: float = 0.0):
    """Noise plus ``delta`` along a unit vector for True rows; twins sit side by side, ``shared`` of their noise in common."""
    rng = np.random.default_rng(seed)
    labels = np.tile([True, False], rows // 2)
    direction = rng.standard_normal(width)
    direction /= np.linalg.norm(direction)
    noise = rng.standard_normal((rows, width)) + shared * np.repeat(rng.standard_normal((rows // 2, width)), 2, axis=0)
    features = (noise + delta * labels[:, None] * direction).astype(np.float32)
    return features, labels, np.arange(rows) // 2, direction


def skewed(rows: int, width: int, *, seed: int = 0):
    """Correlated noise whose scales span three decades, as residuals have, and one feature of large offset and scale."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(rows) % 2 == 0)
    scales = np.logspace(1, -2, width)
    features = rng.standard_normal((rows, width)) * scales @ ortho_group.rvs(width, random_state=1)
    features += 0.2 * labels[:, None] * np.random.default_rng(2).standard_normal(width) * scales.mean()
    features[:, 3] = 1000 * features[:, 3] + 5000
    return features.astype(np.float32), labels


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [300, 400])
def test_a_planted_direction_is_recovered(name, rows):
    features, labels, contrast, direction = planted(rows + 200, 64, 8.0)
    fits = ESTIMATORS[name].fit(features[:rows], labels[:rows], contrast[:rows])
    assert len(fits) == len(ESTIMATORS[name].settings)
    assert min(cosine(fit.direction, direction) for fit in fits) >= 0.95
    assert all(np.mean((fit.score(features[rows:]) > 0) == labels[rows:]) > 0.95 for fit in fits)


@pytest.mark.parametrize("name", ["logistic", "mean_difference", "mass_mean", "lat"])
def test_a_planted_direction_is_recovered_in_more_features_than_rows(name):
    features, labels, contrast, direction = planted(400, 576, 10.0)
    assert cosine(ESTIMATORS[name].fit(features, labels, contrast)[0].direction, direction) >= 0.95


def test_ccs_tells_rows_apart_in_more_features_than_rows():
    """It finds the classes, along a direction that also holds noise of its training pairs."""
    features, labels, contrast, direction = planted(500, 576, 10.0)
    train, test = np.arange(400), np.arange(400, 500)
    fit = Ccs().fit(features[train], labels[train], contrast[train])[0]
    assert cosine(fit.direction, direction) >= 0.8
    assert np.mean((fit.score(features[test]) > 0) == labels[test]) >= 0.95


@pytest.mark.parametrize("name", NAMES)
def test_null_data_give_chance_on_rows_not_trained_on(name):
    """The mean AUROC of 20 data sets lies within three standard errors of a half, and the spread shows it is no constant."""
    aurocs = []
    for seed in range(20):
        features, labels, contrast, _ = planted(200, 32, 0.0, seed=seed, shared=1.0)
        fit = ESTIMATORS[name].fit(features[:120], labels[:120], contrast[:120], seed=seed)[-1]
        aurocs.append(roc_auc_score(labels[120:], fit.score(features[120:])))
    error = np.std(aurocs, ddof=1) / np.sqrt(len(aurocs))
    assert error > 0.005
    assert abs(np.mean(aurocs) - 0.5) < 3 * error


def test_knowing_the_noise_beats_the_difference_of_means():
    """A nuisance direction that carries a little of the label and almost all the variance misleads the plain difference."""
    rng = np.random.default_rng(0)
    labels = np.tile([True, False], 300)
    features = rng.standard_normal((600, 40))
    features[:, :5] *= 30
    features += labels[:, None] * np.where(np.arange(40) < 5, 6.0, 0.4)
    auroc = {
        name: max(
            roc_auc_score(labels[300:], fit.score(features[300:]))
            for fit in ESTIMATORS[name].fit(features[:300].astype(np.float32), labels[:300])
        )
        for name in ("mean_difference", "mass_mean", "logistic")
    }
    assert auroc["mass_mean"] > auroc["mean_difference"] + 0.1
    assert auroc["logistic"] > auroc["mean_difference"] + 0.1


@pytest.mark.parametrize("name", NAMES)
def test_adding_a_constant_vector_changes_no_score(name):
    features, labels, contrast, _ = planted(120, 48, 4.0, shared=0.5)
    shifted = features + np.random.default_rng(3).integers(-64, 64, 48).astype(np.float32)
    for plain, moved in zip(
        ESTIMATORS[name].fit(features, labels, contrast), ESTIMATORS[name].fit(shifted, labels, contrast), strict=True
    ):
        assert relative(moved.score(shifted), plain.score(features)) < 1e-3


@pytest.mark.parametrize("name", ["logistic", "mass_mean", "ccs"])
def test_estimators_that_standardise_do_not_see_the_scale_of_a_feature(name):
    features, labels, contrast, _ = planted(120, 48, 4.0, shared=0.5)
    scales = np.where(np.arange(48) % 7 == 0, 1024.0, 1.0).astype(np.float32)
    plain = ESTIMATORS[name].fit(features, labels, contrast)[-1]
    scaled = ESTIMATORS[name].fit(features * scales, labels, contrast)[-1]
    assert relative(scaled.score(features * scales), plain.score(features)) < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_fit(name):
    features, labels, contrast, _ = planted(100, 150, 3.0)
    once, again = (ESTIMATORS[name].fit(features, labels, contrast, seed=5)[-1] for _ in range(2))
    assert np.array_equal(once.direction, again.direction)
    assert once.bias == again.bias


@pytest.mark.parametrize("name", NAMES)
def test_a_feature_that_never_varies_changes_nothing(name):
    features, labels, contrast, _ = planted(100, 30, 3.0)
    wider = np.column_stack([features, np.full(100, 0.1, np.float32), np.zeros(100, np.float32)])
    fit = ESTIMATORS[name].fit(wider, labels, contrast)[-1]
    assert np.abs(fit.direction[-2:]).max() < 1e-6 * np.abs(fit.direction).max()
    plain = ESTIMATORS[name].fit(features, labels, contrast)[-1]
    # mass_mean shrinks towards the mean variance of all features, two more of which are zero.
    assert cosine(fit.score(wider), plain.score(features)) > (0.999 if name == "mass_mean" else 1 - 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_negated_labels_negate_the_scores(name):
    features, labels, contrast, _ = planted(100, 30, 3.0, shared=0.5)
    fit, flipped = (ESTIMATORS[name].fit(features, truth, contrast)[0] for truth in (labels, ~labels))
    assert relative(-flipped.score(features), fit.score(features)) < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_what_no_probe_can_be_trained_on_is_refused(name):
    features, labels, contrast, _ = planted(20, 4, 1.0)
    with pytest.raises(KlbError, match="both labels"):
        ESTIMATORS[name].fit(features, np.ones(20, bool), contrast)
    with pytest.raises(KlbError, match="not finite"):
        ESTIMATORS[name].fit(np.where(np.arange(4) == 2, np.nan, features), labels, contrast)
    with pytest.raises(KlbError, match="a label a row"):
        ESTIMATORS[name].fit(features, labels[:-1], contrast)


@pytest.mark.parametrize(("rows", "width"), [(96, 256), (160, 160), (300, 40)])
def test_logistic_regression_is_scikit_learns(rows, width):
    features, labels = skewed(rows, width)
    scaler = StandardScaler().fit(features.astype(float))
    standardised = scaler.transform(features.astype(float))
    strengths = (1e-1, 1e-5, 1.0, 1e-3)  # out of order: each fit belongs to its own setting
    for strength, fit in zip(strengths, Logistic().fit(features, labels, settings=strengths), strict=True):
        theirs = LogisticRegression(C=strength, tol=1e-9, max_iter=20_000).fit(standardised, labels)
        assert relative(fit.direction * scaler.scale_, theirs.coef_[0]) < 1e-3
        assert relative(fit.score(features.astype(float)), theirs.decision_function(standardised)) < 1e-3


def test_logistic_regression_with_few_positives_is_scikit_learns():
    features, labels = skewed(120, 200)
    labels &= np.arange(120) < 20
    standardised = StandardScaler().fit_transform(features.astype(float))
    fit = Logistic().fit(features, labels, settings=[1e-2])[0]
    theirs = LogisticRegression(C=1e-2, tol=1e-9, max_iter=20_000).fit(standardised, labels)
    assert relative(fit.score(features.astype(float)), theirs.decision_function(standardised)) < 1e-3


@pytest.mark.parametrize(("rows", "width"), [(60, 200), (100, 100), (300, 40)])
def test_mass_mean_is_the_whole_covariance_solved(rows, width):
    features, labels = skewed(rows, width)
    exact = features.astype(float)
    difference = exact[labels].mean(0) - exact[~labels].mean(0)
    within = exact - np.where(labels[:, None], exact[labels].mean(0), exact[~labels].mean(0))
    scale = within.std(axis=0)
    covariance, shrinkage = ledoit_wolf(within / scale, assume_centered=True)
    assert 0 < shrinkage < 1
    theirs = np.linalg.solve(covariance * np.outer(scale, scale), difference)
    fit = MassMean().fit(features, labels)[0]
    assert relative(fit.direction * scale, theirs * scale) < 1e-6
    assert fit.score(exact[labels].mean(0)) == pytest.approx(-fit.score(exact[~labels].mean(0)))


@pytest.mark.parametrize(("rows", "width"), [(20, 50), (50, 20), (30, 30)])
def test_the_row_space_loses_nothing(rows, width):
    data = np.random.default_rng(0).standard_normal((rows, width))
    data -= data.mean(axis=0)
    space = RowSpace.of(data)
    assert space.coordinates.shape == (rows, np.linalg.matrix_rank(data))
    np.testing.assert_allclose(space.coordinates @ space.basis.T, data, atol=1e-10)
    np.testing.assert_allclose(space.basis.T @ space.basis, np.eye(len(space.squares)), atol=1e-10)
    np.testing.assert_allclose(space.coordinates.T @ space.coordinates, np.diag(space.squares), atol=1e-9)


@pytest.mark.parametrize("estimator", [Lat(), Ccs()], ids=lambda estimator: estimator.name)
def test_labels_give_the_unsupervised_directions_no_more_than_a_sign(estimator):
    """Labels swapped within some pairs: the same line, whatever they say."""
    features, labels, contrast, _ = planted(200, 24, 4.0, shared=1.0)
    mixed = labels ^ np.repeat(np.arange(100) % 4 == 0, 2)
    true, other = (estimator.fit(features, truth, contrast)[0].direction for truth in (labels, mixed))
    assert abs(cosine(true, other)) == pytest.approx(1)


@pytest.mark.parametrize("estimator", [Lat(), Ccs()], ids=lambda estimator: estimator.name)
def test_learning_from_pairs_needs_pairs(estimator):
    features, labels, contrast, _ = planted(40, 6, 3.0)
    with pytest.raises(KlbError, match="at least 2 contrast pairs"):
        estimator.fit(features, labels)
    with pytest.raises(KlbError, match="at least 2 contrast pairs"):
        estimator.fit(features, labels, np.where(contrast == 0, 0, -1))
    with pytest.raises(KlbError, match="has 4 rows"):
        estimator.fit(features, labels, contrast // 2)
    with pytest.raises(KlbError, match="are equal"):
        estimator.fit(features[contrast * 2], labels, contrast)
    assert estimator.needs_contrast


def test_lat_is_the_main_direction_of_the_differences():
    features, labels, contrast, _ = planted(200, 24, 4.0)
    main = np.linalg.svd((features[::2] - features[1::2]).astype(float))[2][0]
    assert abs(cosine(Lat().fit(features, labels, contrast)[0].direction, main)) > 0.999  # random signs leave a small mean


def test_ccs_rests_where_its_loss_has_no_slope():
    features, labels, contrast, _ = planted(200, 24, 4.0)
    fit = Ccs().fit(features, labels, contrast)[0]
    scale = torch.from_numpy(features.astype(float).std(axis=0))
    x = torch.from_numpy(features.astype(float) - features.astype(float).mean(axis=0)) / scale
    slopes = []
    for sign in (1, -1):  # the labels may have turned it round
        weights = (sign * scale * torch.from_numpy(fit.direction)).requires_grad_()
        bias = torch.tensor(sign * fit.score(features.astype(float).mean(axis=0)), requires_grad=True)
        p, q = torch.sigmoid(x @ weights + bias).reshape(-1, 2).T
        loss = torch.mean((p - (1 - q)) ** 2 + torch.minimum(p, q) ** 2)
        (loss + Ccs.penalty / 2 * weights @ weights).backward()
        slopes.append(max(weights.grad.abs().max().item(), bias.grad.abs().item()))
        assert loss.item() < 0.15  # 0.25 for a probe that always says 1/2
    assert min(slopes) < 1e-4


def test_pairs_are_twins_in_random_order():
    rows = np.arange(400)
    contrast = rows % 200
    contrast[[7, 9]] = -1  # their twins are left alone
    first, second = pair_halves(rows[:, None], contrast, "lat", np.random.default_rng(0))
    assert sorted(np.minimum(first, second).ravel()) == [row for row in range(200) if row not in (7, 9)]
    assert (np.abs(first - second) == 200).all()
    assert 0.35 < np.mean(first < second) < 0.65
