"""Point values against scikit-learn, intervals against a loop, and coverage against the truth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from klb_probe.signals.statistics import PairBootstrap, null_quantile, plain_auroc

TAILS = [0.025, 0.975]


def clustered(rng, n_pairs=7, copies=3, layers=5, *, effect=0.7, pair_sd=1.0, ties=False):
    """Prompts of case/twin pairs under several paraphrases: values [prompt, layer], pair and label of each."""
    pair = np.repeat(np.arange(n_pairs), 2 * copies)
    positive = np.tile(np.repeat([True, False], copies), n_pairs)
    values = (
        pair_sd * rng.normal(size=(n_pairs, layers))[pair] + effect * positive[:, None] + rng.normal(size=(len(pair), layers))
    )
    values = np.round(values) if ties else values
    shuffled = rng.permutation(len(pair))
    names = np.array([f"domain/case-{p:02d}" for p in pair])
    return values[shuffled], names[shuffled], positive[shuffled]


def brute_force(statistic, pairs, weights):
    """The statistic on every draw, each drawn pair's prompts repeated as often as it was drawn."""
    names = np.unique(pairs)
    draws = []
    for weight in weights.astype(int):
        rows = [np.flatnonzero(pairs == name) for name, times in zip(names, weight, strict=True) for _ in range(times)]
        draws.append(statistic(np.concatenate(rows)))
    return np.nanquantile(draws, TAILS, axis=0)


def sklearn_auroc(values, positive):
    return np.array([roc_auc_score(positive, column) for column in values.T])


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_auroc_is_scikit_learns_on_every_layer(seed, ties):
    rng = np.random.default_rng(seed)
    values, pairs, positive = clustered(rng, ties=ties)
    everywhere = np.ones(len(pairs), bool)
    expected = sklearn_auroc(values, positive)
    np.testing.assert_allclose(PairBootstrap(pairs, draws=10).auroc(values, everywhere, positive).value, expected, atol=1e-12)
    np.testing.assert_allclose(plain_auroc(values, positive), expected, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_only_the_chosen_prompts_count(seed):
    rng = np.random.default_rng(seed)
    values, pairs, positive = clustered(rng)
    chosen = rng.random(len(pairs)) < 0.6
    bootstrap, first, second = PairBootstrap(pairs, draws=10), chosen & positive, chosen & ~positive
    estimate = bootstrap.auroc(values, chosen, positive)
    np.testing.assert_allclose(estimate.value, sklearn_auroc(values[chosen], positive[chosen]), atol=1e-12)
    np.testing.assert_allclose(bootstrap.mean(values, chosen).value, values[chosen].mean(0), atol=1e-12)
    difference = bootstrap.difference(values, first, second)
    np.testing.assert_allclose(difference.value, values[first].mean(0) - values[second].mean(0), atol=1e-12)
    for one in (estimate, difference, bootstrap.mean(values, chosen)):
        assert (one.n, one.n_pairs) == (chosen.sum(), len(np.unique(pairs[chosen])))


def test_auroc_of_any_shape_is_taken_along_prompts():
    rng = np.random.default_rng(0)
    values, positive = rng.normal(size=(20, 3, 4)).round(1), rng.random(20) < 0.4
    expected = sklearn_auroc(values.reshape(20, -1), positive).reshape(3, 4)
    np.testing.assert_allclose(plain_auroc(values, positive), expected, atol=1e-12)


@pytest.mark.parametrize("ties", [True, False])
def test_intervals_are_those_of_a_brute_force_bootstrap_over_pairs(ties):
    values, pairs, positive = clustered(np.random.default_rng(3), n_pairs=6, copies=2, layers=3, ties=ties)
    bootstrap, chosen = PairBootstrap(pairs, draws=200, seed=5), np.ones(len(pairs), bool)
    chosen[:3] = False
    for estimate, statistic in (
        (
            bootstrap.auroc(values, chosen, positive),
            lambda rows: sklearn_auroc(values[rows[chosen[rows]]], positive[rows[chosen[rows]]]),
        ),
        (bootstrap.mean(values, chosen), lambda rows: values[rows[chosen[rows]]].mean(0)),
        (
            bootstrap.difference(values, chosen & positive, chosen & ~positive),
            lambda rows: values[rows[(chosen & positive)[rows]]].mean(0) - values[rows[(chosen & ~positive)[rows]]].mean(0),
        ),
    ):
        expected = brute_force(statistic, pairs, bootstrap.weights)
        np.testing.assert_allclose([estimate.low, estimate.high], expected, rtol=0, atol=1e-12)
        assert (estimate.low < estimate.high).all()


def test_draws_are_whole_samples_of_pairs():
    pairs = np.repeat(["a", "b", "c", "d"], [1, 5, 2, 2])
    weights = PairBootstrap(pairs, draws=4000).weights
    assert (weights.sum(1) == 4).all()
    np.testing.assert_allclose(weights.mean(0), 1, atol=0.06)
    np.testing.assert_allclose(weights.var(0), 0.75, atol=0.06)  # multinomial: n p (1 - p)


def test_a_difference_keeps_its_pairing():
    """A framing that moves every prompt by the same amount has a contrast of zero width, however unlike the pairs are."""
    rng = np.random.default_rng(0)
    base = 10 * rng.normal(size=(9, 2))
    values, pairs = np.concatenate([base + 1.5, base]), np.tile(np.arange(9), 2)
    first = np.arange(18) < 9
    estimate = PairBootstrap(pairs, draws=500).difference(values, first, ~first)
    np.testing.assert_allclose([estimate.value, estimate.low, estimate.high], 1.5, atol=1e-12)


def test_copies_of_a_prompt_add_no_certainty():
    rng = np.random.default_rng(1)
    values, pairs, positive = clustered(rng, n_pairs=20, copies=1, layers=2)
    everywhere = np.ones(len(pairs), bool)
    once = PairBootstrap(pairs).auroc(values, everywhere, positive)
    copied = [np.repeat(array, 5, axis=0) for array in (values, pairs, everywhere, positive)]
    five_times = PairBootstrap(copied[1]).auroc(copied[0], copied[2], copied[3])
    np.testing.assert_allclose([five_times.low, five_times.high], [once.low, once.high], atol=1e-12)
    independent = PairBootstrap(np.arange(len(copied[1]))).auroc(copied[0], copied[2], copied[3])
    assert ((once.high - once.low) > 1.5 * (independent.high - independent.low)).all()


def test_intervals_of_clustered_data_cover_the_truth():
    """200 data sets of 28 pairs: a 95 % interval holds the true value in 88 to 99 % of them."""
    effect, pair_sd = 0.8, 0.7
    truth = {"auroc": norm.cdf(effect / np.sqrt(2 * (1 + pair_sd**2))), "difference": effect, "mean": effect / 2}
    covered = dict.fromkeys(truth, 0)
    for seed in range(200):
        rng = np.random.default_rng(seed)
        values, pairs, positive = clustered(rng, n_pairs=28, copies=1, layers=1, effect=effect, pair_sd=pair_sd)
        bootstrap, everywhere = PairBootstrap(pairs, draws=1000, seed=seed), np.ones(len(pairs), bool)
        estimates = {
            "auroc": bootstrap.auroc(values, everywhere, positive),
            "difference": bootstrap.difference(values, positive, ~positive),
            "mean": bootstrap.mean(values, everywhere),
        }
        for name, estimate in estimates.items():
            covered[name] += bool(estimate.low[0] <= truth[name] <= estimate.high[0])
    assert all(0.88 <= count / 200 <= 0.99 for count in covered.values()), covered


@pytest.mark.parametrize("label", [True, False])
def test_auroc_of_one_class_is_undefined_and_not_zero(label):
    values, pairs, _ = clustered(np.random.default_rng(0))
    positive, everywhere = np.full(len(pairs), label), np.ones(len(pairs), bool)
    estimate = PairBootstrap(pairs, draws=20).auroc(values, everywhere, positive)
    assert np.isnan([estimate.value, estimate.low, estimate.high]).all()
    with np.errstate(invalid="ignore", divide="ignore"):
        assert np.isnan(plain_auroc(values, positive)).all()


def test_the_mean_of_nothing_is_undefined_and_not_zero():
    values, pairs, positive = clustered(np.random.default_rng(0))
    nothing, bootstrap = np.zeros(len(pairs), bool), PairBootstrap(pairs, draws=20)
    for estimate in (bootstrap.mean(values, nothing), bootstrap.difference(values, positive, nothing)):
        assert np.isnan([estimate.value, estimate.low, estimate.high]).all()
    assert bootstrap.mean(values, nothing).n == bootstrap.mean(values, nothing).n_pairs == 0


def test_draws_without_a_class_are_left_out_of_the_interval():
    """Positives in one pair of three: about 30 % of draws have none, and the rest still give an interval."""
    pairs, positive = np.repeat(["a", "b", "c"], 2), np.array([True, True, False, False, False, False])
    values = np.array([[1.0], [2.0], [0.0], [1.5], [0.5], [3.0]])
    estimate = PairBootstrap(pairs, draws=500).auroc(values, np.ones(6, bool), positive)
    assert estimate.value == pytest.approx(roc_auc_score(positive, values[:, 0]))
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1


def test_a_nan_value_makes_its_layer_undefined_and_no_other():
    """A score that is not a number must not rank as the largest."""
    values, pairs, positive = clustered(np.random.default_rng(0))
    values[3, 1] = np.nan
    everywhere = np.ones(len(pairs), bool)
    for auroc in (plain_auroc(values, positive), PairBootstrap(pairs, draws=20).auroc(values, everywhere, positive).value):
        assert np.isnan(auroc).tolist() == [False, True, False, False, False]


def test_the_seed_decides_the_interval_and_never_the_value():
    values, pairs, positive = clustered(np.random.default_rng(0))
    everywhere = np.ones(len(pairs), bool)
    first, again, other = (PairBootstrap(pairs, draws=300, seed=seed).auroc(values, everywhere, positive) for seed in (1, 1, 2))
    np.testing.assert_array_equal([first.low, first.high], [again.low, again.high])
    np.testing.assert_array_equal(first.value, other.value)
    assert (first.low != other.low).any()


def test_the_order_of_prompts_does_not_matter():
    values, pairs, positive = clustered(np.random.default_rng(0))
    shuffled, everywhere = np.random.default_rng(1).permutation(len(pairs)), np.ones(len(pairs), bool)
    one = PairBootstrap(pairs, draws=300).auroc(values, everywhere, positive)
    other = PairBootstrap(pairs[shuffled], draws=300).auroc(values[shuffled], everywhere, positive[shuffled])
    np.testing.assert_allclose([one.value, one.low, one.high], [other.value, other.low, other.high], atol=1e-12)


def test_flipping_the_label_mirrors_auroc_and_any_increasing_map_keeps_it():
    values, _, positive = clustered(np.random.default_rng(0), ties=True)
    np.testing.assert_allclose(plain_auroc(values, ~positive), 1 - plain_auroc(values, positive), atol=1e-12)
    np.testing.assert_allclose(plain_auroc(np.exp(values) + 5, positive), plain_auroc(values, positive), atol=1e-12)


# --- The null of random readouts. ---


def test_the_null_holds_95_percent_of_fresh_noise():
    rng = np.random.default_rng(0)
    positive = np.arange(60) % 2 == 0
    edge = null_quantile(rng.normal(size=(60, 3, 3000)), positive)
    fresh = plain_auroc(rng.normal(size=(60, 3, 3000)), positive)
    inside = (np.maximum(fresh, 1 - fresh) <= edge[:, None]).mean(1)
    np.testing.assert_allclose(inside, 0.95, atol=0.02)
    # Folding makes it a two-sided band: about 2.5 % of noise lies beyond each edge.
    np.testing.assert_allclose((fresh > edge[:, None]).mean(1), 0.025, atol=0.012)
    np.testing.assert_allclose((fresh < 1 - edge[:, None]).mean(1), 0.025, atol=0.012)


def test_the_null_does_not_care_about_the_sign_of_a_random_readout():
    rng = np.random.default_rng(0)
    positive = rng.random(30) < 0.5
    random = rng.normal(size=(30, 4, 16)) - 0.8 * positive[:, None, None]
    signs = rng.choice([-1, 1], size=16)
    np.testing.assert_allclose(null_quantile(random * signs, positive), null_quantile(random, positive), atol=1e-12)
    assert (null_quantile(random, positive) >= 0.5).all()


def test_the_null_is_per_layer_and_sees_a_surface_that_any_direction_separates():
    rng = np.random.default_rng(0)
    positive = np.arange(40) % 2 == 0
    random = rng.normal(size=(40, 2, 32))
    random[:, 1] += 10 * np.where(positive, 1, -1)[:, None] * rng.choice([-1, 1], size=32)
    edge = null_quantile(random, positive)
    assert edge[0] < 0.75
    assert edge[1] == 1
