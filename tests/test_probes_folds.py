"""Groups stay whole in every kind of split, and what would leak from one side to the other is refused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from klb_probe.errors import KlbError
from klb_probe.probes.folds import (
    Fold,
    check_duplicates,
    check_folds,
    check_groups,
    group_folds,
    make_folds,
    paraphrase_folds,
    shuffled_within_groups,
)


def table(n_groups=42, n_domains=6, paraphrases=3, *, every=False):
    """Two twins a group under two framings, one paraphrase a group (or every one), and a round of each group without any."""
    lines = [
        {"group": f"case {group:02}", "domain": f"domain {group % n_domains}", "paraphrase": paraphrase}
        for group in range(n_groups)
        for paraphrase in (range(1, paraphrases + 1) if every else [1 + group // n_domains % paraphrases])
        for _ in range(4)
    ]
    rounds = [{**line, "paraphrase": 0} for line in lines[::4]]
    return pd.DataFrame(lines + rounds)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("kind", ["domain", "paraphrase", "pair"])
def test_no_group_is_on_both_sides_and_every_group_is_tested_once(kind, every):
    rows = table(every=every)
    folds, used = make_folds(kind, rows, seed=1)
    assert used == kind
    assert len(folds) == {"domain": 6, "paraphrase": 3, "pair": 5}[kind]
    tested = []
    for fold in folds:
        train, test = set(rows["group"][fold.train]), set(rows["group"][fold.test])
        assert train
        assert test
        assert not train & test
        tested += test
    assert sorted(tested) == sorted(set(rows["group"]))


def test_domain_and_pair_leave_out_every_row_once_and_use_the_rest():
    rows = table()
    for kind in ("domain", "pair"):
        folds, _ = make_folds(kind, rows)
        assert (sum(fold.test.astype(int) for fold in folds) == 1).all()
        assert all((fold.train != fold.test).all() for fold in folds)
    assert {fold.name for fold in make_folds("domain", rows)[0]} == set(rows["domain"])


def test_paraphrases_are_new_on_the_test_side_and_rounds_are_on_neither():
    for every in (False, True):
        rows = table(every=every)
        for number, fold in enumerate(make_folds("paraphrase", rows)[0], 1):
            assert set(rows["paraphrase"][fold.test]) == {number}
            assert set(rows["paraphrase"][fold.train]) == {1, 2, 3} - {number}


def test_single_paraphrases_are_the_folds():
    rows = table()
    for number, fold in enumerate(make_folds("paraphrase", rows)[0], 1):
        assert (fold.test == (rows["paraphrase"] == number)).all()


def test_domains_are_spread_over_folds_of_groups():
    rows = table(n_groups=60)
    for fold in group_folds(rows["group"].to_numpy(), rows["domain"].to_numpy(), 5, seed=3):
        groups = rows[fold.test].drop_duplicates("group")
        assert list(groups["domain"].value_counts()) == [2] * 6


def test_dealing_depends_on_the_seed_alone():
    rows = table(every=True)
    for kind in ("paraphrase", "pair"):
        first, again, other = (make_folds(kind, rows, seed)[0] for seed in (0, 0, 1))
        assert all((a.test == b.test).all() and (a.train == b.train).all() for a, b in zip(first, again, strict=True))
        assert any((a.test != b.test).any() for a, b in zip(first, other, strict=True))


def test_two_domains_are_split_by_pair():
    folds, used = make_folds("domain", table(n_domains=2))
    assert (used, len(folds)) == ("pair", 5)


def test_one_paraphrase_cannot_be_held_out():
    with pytest.raises(KlbError, match="1 paraphrases; holding one out needs at least 2"):
        paraphrase_folds(np.arange(20), np.ones(20, int))


def test_few_groups_are_refused():
    check_groups(np.repeat(np.arange(10), 3))
    with pytest.raises(KlbError, match="9 groups; a probe needs at least 10"):
        check_groups(np.repeat(np.arange(9), 30))
    with pytest.raises(KlbError, match="9 groups"):
        make_folds("domain", table(n_groups=9))


def test_a_group_on_both_sides_is_refused_by_name():
    groups = np.array(["a", "b", "b", "c"])
    with pytest.raises(KlbError, match="group b is on both sides of fold one"):
        check_folds([Fold("one", np.array([1, 1, 0, 0], bool), np.array([0, 0, 1, 1], bool))], groups)
    rows = table()
    rows.loc[rows["group"] == "case 05", "domain"] = [f"domain {number}" for number in range(5)]
    with pytest.raises(KlbError, match="group case 05 is on both sides"):
        make_folds("domain", rows)


def test_copies_in_another_group_are_refused_and_counted():
    features = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)
    groups = np.repeat(np.arange(20), 2)
    check_duplicates(features, groups)
    same = features.copy()
    same[1::2] = same[::2]
    check_duplicates(same, groups)
    same = features.copy()
    same[30:] = features[:10]
    with pytest.raises(KlbError, match=r"10 rows have the same features .* \(rows 0 and 30, groups 0 and 15\)"):
        check_duplicates(same, groups)
    same[30:] = np.nan  # rows without a residual are no copies of each other
    check_duplicates(same, groups)


def test_shuffled_labels_keep_the_counts_of_each_group_and_are_shuffled():
    groups = np.random.default_rng(0).permutation(np.repeat(np.arange(200), 2))
    labels = np.zeros(400, bool)
    labels[[np.flatnonzero(groups == group)[group % 2] for group in range(200)]] = True
    made = [shuffled_within_groups(labels, groups, seed) for seed in range(20)]
    for one in made:
        assert (np.bincount(groups, weights=one) == 1).all()
    assert np.mean([(one == labels).mean() for one in made]) == pytest.approx(0.5, abs=0.03)
    assert (made[3] == shuffled_within_groups(labels, groups, 3)).all()
    assert (made[3] != made[4]).any()


def test_groups_with_one_label_exchange_it_as_wholes():
    groups = np.repeat(np.arange(200), 3)
    labels = groups % 4 == 0
    labels[groups >= 160] = np.arange(120) % 3 == 0  # the last forty have both
    made = [shuffled_within_groups(labels, groups, seed) for seed in range(20)]
    agreement = []
    for one in made:
        counts = np.bincount(groups, weights=one)
        assert set(counts[:160]) == {0, 3}
        assert (counts[:160] == 3).sum() == 40
        assert (counts[160:] == 1).all()
        agreement.append((one == labels)[:480].mean())
    assert np.mean(agreement) == pytest.approx(0.25**2 + 0.75**2, abs=0.03)
