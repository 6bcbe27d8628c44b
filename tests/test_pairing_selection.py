"""The layer is chosen without looking at the rounds it is judged on, and chance is corrected for many layers."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from planted_signals import lied, rows, signals

from klb_probe.metrics.clusters import Clusters
from klb_probe.pairing.join import join
from klb_probe.pairing.selection import LAYER, NESTED, deal, max_p, nested, selection, units
from klb_probe.signals.statistics import plain_auroc


def noise(rng, n_layers=30, trajectories=20, each=5):
    """Labels and margins that have nothing to do with each other."""
    rounds = pd.DataFrame({"trajectory": np.repeat(np.arange(trajectories), each), "condition": "emergent"})
    lies = rng.random(len(rounds)) < 0.4
    return Clusters(rounds["trajectory"], rounds["condition"], draws=10), lies, rng.standard_normal((len(rounds), n_layers))


def test_nested_selection_of_noise_is_chance_and_the_naive_maximum_is_not():
    rng = np.random.default_rng(0)
    split, naive = [], []
    for number in range(60):
        clusters, lies, values = noise(rng)
        split.append(nested(values, lies, ~lies, clusters, seed=number).estimate.value[0])
        scores = plain_auroc(values, lies)
        naive.append(np.maximum(scores, 1 - scores).max())
    assert np.mean(split) == pytest.approx(0.5, abs=0.03)
    assert np.mean(naive) > 0.6


def test_a_planted_layer_is_found_in_its_direction():
    rng = np.random.default_rng(1)
    for sign in (-1, 1):
        clusters, lies, values = noise(rng)
        values[:, 17] += 4 * sign * lies
        found = nested(values, lies, ~lies, clusters)
        assert set(found.layers) == {17}
        assert set(found.low_is_lie) == {sign < 0}
        assert found.estimate.value[0] > 0.97


def test_folds_hold_whole_trajectories_and_share_out_the_lies():
    trajectory = np.repeat(np.arange(12), 4)
    lies = (np.arange(48) % 4 == 0) & (trajectory < 5)
    fold = deal(trajectory, lies, seed=3, folds=5)
    assert all(len(set(fold[trajectory == one])) == 1 for one in range(12))
    assert {int(lies[fold == number].sum()) for number in range(5)} == {1}
    assert set(np.bincount(fold) // 4) <= {2, 3}


def test_what_a_case_alone_gives_is_chance_and_not_worse():
    """Every case once with a lie and once without, margins alike: parted, the two would count against each other."""
    rng = np.random.default_rng(4)
    domain, condition, case = (part.reshape(-1) for part in np.indices((8, 2, 6)))
    rounds = pd.DataFrame({"trajectory": 2 * domain + condition, "domain": domain, "condition": "any"})
    values, lies = rng.standard_normal((48, 10))[6 * domain + case], condition == 1
    clusters = Clusters(rounds["trajectory"], rounds["condition"], draws=10)
    together = nested(values, lies, ~lies, clusters, units(rounds, lies, ~lies, clusters)).estimate.value[0]
    assert together == pytest.approx(0.5)
    assert nested(values, lies, ~lies, clusters).estimate.value[0] < 0.45
    alone = rounds[domain == 0]
    clusters = Clusters(alone["trajectory"], alone["condition"], draws=10)
    assert (units(alone, lies[domain == 0], ~lies[domain == 0], clusters) == [0] * 6 + [1] * 6).all()


def test_the_fold_left_out_has_no_say():
    rng = np.random.default_rng(2)
    clusters, lies, values = noise(rng)
    fold = deal(clusters.index, lies, seed=0, folds=5)
    before = nested(values, lies, ~lies, clusters).layers[2]
    values[fold == 2] = rng.standard_normal(values[fold == 2].shape) + 50 * lies[fold == 2][:, None]
    assert nested(values, lies, ~lies, clusters).layers[2] == before


def test_folds_are_not_compared_with_each_other():
    rng = np.random.default_rng(2)
    clusters, lies, values = noise(rng, n_layers=1)
    values = values - 20 * lies[:, None] + 100 * deal(clusters.index, lies, seed=0, folds=5)[:, None]
    assert nested(values, lies, ~lies, clusters).estimate.value[0] == 1.0


def test_no_more_folds_than_trajectories_with_lies():
    rng = np.random.default_rng(2)
    clusters, _, values = noise(rng)
    lies = np.isin(clusters.index, [2, 5, 9]) & (np.arange(100) % 5 < 3)
    values[:, 4] -= 5 * lies
    found = nested(values, lies, ~lies, clusters)
    assert found.layers == [4, 4, 4]
    assert found.estimate.n_clusters == 20


def test_no_split_where_lies_are_in_one_trajectory():
    rng = np.random.default_rng(2)
    clusters, _, values = noise(rng)
    lies = (clusters.index == 4) & (np.arange(100) % 2 == 0)
    assert nested(values, lies, ~lies, clusters) is None


def test_p_is_uniform_under_the_null_and_small_for_a_planted_layer():
    rng = np.random.default_rng(4)
    cases = np.tile(np.arange(10), 8)
    best = []
    for number in range(200):
        lies = rng.random(80) < 0.2 + 0.05 * cases  # cases differ, which permuting within them respects
        best.append(max_p(rng.standard_normal((80, 10)), lies, cases, permutations=99, seed=number).min())
    assert np.mean(best) == pytest.approx(0.5, abs=0.07)
    assert np.mean(np.array(best) <= 0.1) == pytest.approx(0.1, abs=0.06)
    values = rng.standard_normal((80, 10))
    values[:, 3] -= 2 * lies
    p = max_p(values, lies, cases, permutations=199)
    assert p[3] == pytest.approx(1 / 200)
    assert np.delete(p, 3).min() > 0.01


def test_differences_between_cases_neither_pass_for_evidence_nor_hide_it():
    rng = np.random.default_rng(5)
    cases = np.repeat(np.arange(10), 8)
    nothing = []
    for number in range(100):
        lies = rng.random(80) < cases * 0.1
        values = cases[:, None] + 0.01 * rng.standard_normal((80, 1))
        assert plain_auroc(values, lies)[0] > 0.7
        nothing.append(max_p(values, lies, cases, permutations=99, seed=number)[0])
    assert np.mean(nothing) == pytest.approx(0.5, abs=0.1)
    for sign in (-1, 1):  # toward 0.5 and away from it
        moved = values + sign * 0.05 * lies[:, None]
        assert max_p(moved, lies, cases, permutations=199)[0] == 1 / 200


def test_the_table():
    made = rows(n_samples=10)
    frame = signals(made, lambda one, _, layer: -2.0 * lied(one) * (layer == 2), lenses=("margin",), layers=4, noise=1.0)
    table = selection(join(frame, made).table, permutations=99, draws=200)
    first, *layers = table[table["condition"] == "all"].to_dict("records")
    assert (first["kind"], first["layer"], first["chosen"], first["low_is_lie"]) == (NESTED, 2, "2 2 2 2 2", "5 of 5")
    assert first["low"] < first["value"] < first["high"]
    assert [line["kind"] for line in layers] == [LAYER] * 4
    assert first["p"] == min(line["p"] for line in layers) == layers[2]["p"] == 0.01
    assert first["naive_layer"] == 2
    assert first["naive_auroc"] == pytest.approx(1 - layers[2]["value"])
    (control,) = table[table["condition"] == "control"].to_dict("records")
    assert control["note"] == "not estimable (n=0)"
    assert np.isnan(control["value"])


def test_the_private_note_is_no_evidence_within_conditions():
    made = rows(n_samples=12)
    frame = signals(made, lambda one, *_: 3.0 * (one["condition"] == "none"), lenses=("margin",), layers=1, noise=1.0)
    first = selection(join(frame, made).table, permutations=199, draws=50).iloc[0]
    assert first["p"] < 0.01
    assert first["p_within_condition"] > 0.05
