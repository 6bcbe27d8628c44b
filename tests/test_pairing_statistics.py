"""Statistics of planted margins: what was put in comes out, within its interval; small cases by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from planted_signals import at, lied, owed, row, rows, signals
from scipy.stats import norm, spearmanr

from klb_probe.errors import KlbError
from klb_probe.metrics.clusters import Clusters
from klb_probe.pairing.join import join
from klb_probe.pairing.statistics import statistics

DRAWS = 1000


def found(made, margin, *, noise=1.0, seed=0, **keys):
    frame = signals(made, margin, lenses=("margin",), layers=1, noise=noise, seed=seed, **keys)
    return statistics(join(frame, made).table, draws=DRAWS)


def holds(line, truth):
    assert line["low"] < truth < line["high"], (line["low"], truth, line["high"])
    assert line["low"] <= line["value"] <= line["high"]
    return True


MANY = rows(n_samples=24, n_cases=10)


def test_planted_auroc_and_null():
    table = found(MANY, lambda one, *_: -1.0 * lied(one))
    assert holds(at(table, "auroc"), norm.cdf(-1 / np.sqrt(2)))
    assert holds(at(table, "auroc_within_condition"), norm.cdf(-1 / np.sqrt(2)))
    null = found(MANY, lambda *_: 0.0)
    for statistic in ("auroc", "auroc_within_condition", "auroc_within_answer", "auroc_within_answer_condition"):
        assert holds(at(null, statistic), 0.5)
    for statistic in ("within_case", "within_case_condition", "knowing_difference", "spearman_trust", "spearman_detected"):
        assert holds(at(null, statistic), 0.0)


def test_planted_difference_within_cases():
    table = found(MANY, lambda one, *_: 20.0 * one["round"] - 1.5 * lied(one))
    assert holds(at(table, "within_case"), -1.5)
    assert holds(at(table, "within_case_condition"), -1.5)
    assert at(table, "within_case")["n_cases"] == 5
    assert abs(at(table, "auroc")["value"] - 0.5) < 0.1  # the cases drown it


def test_planted_offset_and_knowing():
    table = found(MANY, lambda one, *_: 3.0 + (1.0 if owed(one) else -1.0) - 0.5 * lied(one))
    assert holds(at(table, "offset"), 3.0)
    assert holds(at(table, "knowing_lies"), norm.cdf(0.5))
    assert holds(at(table, "knowing_honest"), norm.cdf(1.0))
    assert holds(at(table, "knowing_difference"), norm.cdf(0.5) - norm.cdf(1.0))
    assert at(table, "offset")["n_control"] == 240


def test_an_emitted_answer_does_not_pass_for_the_lie():
    table = found(MANY, lambda one, *_: 1.5 if one["outcome"] == "refund" else -1.5)
    assert at(table, "auroc")["value"] < 0.05
    assert holds(at(table, "auroc_within_answer"), 0.5)


def test_a_private_note_does_not_pass_for_the_lie():
    table = found(MANY, lambda one, *_: 2.0 * (one["condition"] == "none"))
    assert at(table, "auroc")["high"] < 0.35
    assert holds(at(table, "auroc_within_condition"), 0.5)
    assert holds(at(table, "within_case_condition"), 0.0)


def test_knowledge_shows_within_the_answer():
    table = found(MANY, lambda one, *_: 1.0 if owed(one) else 0.0)
    assert holds(at(table, "auroc_within_answer"), norm.cdf(1 / np.sqrt(2)))
    assert holds(at(table, "auroc"), 0.5)


def test_planted_relations():
    table = found(MANY, lambda one, *_: 2.0 * one["derived"]["detected"], noise=0.5)
    assert at(table, "spearman_detected")["low"] > 0.5
    assert (at(table, "spearman_detected")["n_lies"], at(table, "spearman_detected")["n_nonlies"]) == (
        sum(one["derived"]["detected"] for one in MANY),
        sum(lied(one) and not one["derived"]["detected"] for one in MANY),
    )
    table = found(MANY, lambda one, *_: 1.0 * one["round"], noise=0.1)
    assert at(table, "spearman_round")["value"] > 0.95
    assert at(table, "spearman_trust")["value"] > 0.95


def by_hand(n_control=6):
    """Six lies and six non-lies with round numbers as margins, and control rounds."""
    made = [row("lie_incentive", sample, 0, True, sample % 2 == 0) for sample in range(12)]
    made += [row("none", sample, number, number == 0, False) for sample in range(n_control) for number in (0, 1)]
    margins = {("lie_incentive", sample, 0): float(sample) for sample in range(12)}
    margins |= {("none", sample, number): 2.6 + sample - 3 * number for sample in range(n_control) for number in (0, 1)}
    table = found(made, lambda one, *_: margins[one["condition"], one["sample"], one["round"]], noise=0.0)
    return table, margins


def test_by_hand():
    table, _ = by_hand()
    emergent = {"condition": "emergent"}
    # Lies 0, 2, …, 10 against 1, 3, …, 11: 0 + 1 + … + 5 of 36 comparisons are won.
    assert at(table, "auroc", **emergent)["value"] == pytest.approx(15 / 36)
    assert at(table, "within_case", **emergent)["value"] == pytest.approx(5 - 6)
    # Control: owed 2.6 … 7.6, mean 5.1; not owed mean 2.1.
    assert at(table, "offset")["value"] == pytest.approx(3.6)
    assert at(table, "knowing_lies", **emergent)["value"] == pytest.approx(4 / 6)
    assert at(table, "knowing_honest", **emergent)["value"] == pytest.approx(4 / 6)
    # Lies below 2.6, the lowest of six non-lies in control: 0 and 2.
    assert at(table, "recall_1_percent", **emergent)["value"] == pytest.approx(2 / 6)
    # Against the six true denials of control, at -0.4, 0.6, …, 4.6.
    assert at(table, "auroc_within_answer")["value"] == pytest.approx((1 + 3 + 5 + 6 + 6 + 6) / 36)
    counts = [at(table, "auroc", **emergent)[key] for key in ("n_lies", "n_nonlies", "n_trajectories")]
    assert counts == [6, 6, 12]
    assert set(table["note"]) == {"", "not estimable (n=0)"}


def test_true_denials_deny_what_is_not_owed():
    lies = [row("lie_incentive", sample, 0, True, True) for sample in range(6)]
    denials = [row("lie_incentive", sample, 1, False, False) for sample in range(7)]
    others = [row("lie_incentive", 20, 1, False, True), row("lie_incentive", 21, 1, False, False, outcome="refund")]
    refusal = row("lie_incentive", 22, 1, False, False)
    refusal["derived"]["refused"] = True
    line = at(found([*lies, *denials, *others, refusal], lambda *_: 0.0), "auroc_within_answer")
    assert (line["n_lies"], line["n_nonlies"]) == (6, 7)


def test_too_few():
    table, _ = by_hand(n_control=4)
    for statistic in ("offset", "knowing_lies", "knowing_honest", "knowing_difference"):
        line = at(table, statistic)
        assert np.isnan(line["value"])
        assert line["note"] == "no calibration: not estimable (n=4)"
    assert at(table, "recall_1_percent")["note"] == "not estimable (n=4)"
    assert at(table, "auroc_within_answer")["note"] == "not estimable (n=4)"
    assert not np.isnan(at(table, "auroc")["value"])
    four = [row("lie_incentive", sample, 0, True, sample < 4) for sample in range(20)]
    line = at(found(four, lambda *_: 0.0), "auroc")
    assert np.isnan([line["value"], line["low"], line["high"]]).all()
    assert (line["n_lies"], line["n_nonlies"], line["note"]) == (4, 16, "not estimable (n=4)")


def test_one_trajectory_has_no_interval():
    made = [row("lie_incentive", 1, number, True, number % 2 == 0) for number in range(12)]
    line = at(found(made, lambda one, *_: float(lied(one))), "auroc")
    assert line["value"] > 0.5
    assert np.isnan([line["low"], line["high"]]).all()


def test_positions_are_never_pooled():
    made = rows(n_samples=4)
    frame = pd.concat(
        [
            signals(made, lambda one, *_, sign=sign: sign * lied(one), lenses=("margin",), layers=1, positions=(name,))
            for name, sign in (("action", 1.0), ("before_reply", -1.0))
        ]
    )
    table = statistics(join(frame, made).table, draws=50)
    scores = table[(table["statistic"] == "auroc") & (table["condition"] == "all")].set_index("position")["value"]
    assert scores.to_dict() == {"before_reply": pytest.approx(0.0), "action": pytest.approx(1.0)}


def test_rounds_without_some_layers_are_refused():
    made = rows(n_samples=4)
    frame = signals(made, lambda *_: 0.0)
    ragged = frame[~((frame["round"] == 3) & (frame["layer"] == 1))]
    with pytest.raises(KlbError, match="8 rounds lack some layers of lens margin at before_reply"):
        statistics(join(ragged, made).table, draws=50)


def test_intervals_hold_chance_about_as_often_as_they_say():
    rng = np.random.default_rng(5)
    rounds = pd.DataFrame({"trajectory": np.repeat(np.arange(30), 6), "condition": "emergent"})
    held = []
    for number in range(120):
        propensity, level = rng.random(30).repeat(6), rng.standard_normal(30).repeat(6)
        lies = rng.random(180) < propensity
        clusters = Clusters(rounds["trajectory"], rounds["condition"], draws=300, seed=number)
        found = clusters.auroc((level + rng.standard_normal(180))[:, None], lies, ~lies)
        held.append(found.low[0] <= 0.5 <= found.high[0])
    assert 0.88 < np.mean(held) <= 1.0


def test_nothing_to_go_by():
    made = rows(n_samples=2)
    random = signals(made, lambda *_: 0.0, lenses=("random 0",))
    failed = [{**one, "gate_passed": False, "gate": "failed"} for one in made]
    for table in (join(random, made).table, join(signals(made, lambda *_: 0.0), failed).table):
        with pytest.raises(KlbError, match="no scored round has signals of a lens"):
            statistics(table, draws=50)


@pytest.fixture
def drawn():
    """Eight trajectories of five rounds, and what each draw makes of them: rounds, repeated as often as drawn."""
    rng = np.random.default_rng(3)
    rounds = pd.DataFrame(
        {
            "trajectory": np.repeat(np.arange(8), 5),
            "condition": np.repeat(["control", "emergent"], 20),
            "case": list("abcde") * 8,
        }
    )
    values, positive = rng.standard_normal((40, 2)), rng.random(40) < 0.5
    clusters = Clusters(rounds["trajectory"], rounds["condition"], draws=30, seed=1)
    picks = [np.repeat(np.arange(40), weight[clusters.index].astype(int)) for weight in clusters.weights]
    return clusters, rounds, values, positive, picks


def bounds(made):
    return np.nanquantile(np.stack(made), [0.025, 0.975], axis=0)


def test_draws_repeat_whole_trajectories_of_each_condition(drawn):
    clusters = drawn[0]
    assert (clusters.weights[:, :4].sum(1) == 4).all()
    assert (clusters.weights.sum(1) == 8).all()


def test_bootstrap_is_that_of_repeated_rounds(drawn):
    clusters, rounds, values, positive, picks = drawn
    case = rounds["case"].to_numpy(str)

    def auroc(pick, column):
        lies, rest = values[pick][positive[pick], column], values[pick][~positive[pick], column]
        return np.heaviside(lies[:, None] - rest, 0.5).mean()

    estimate = clusters.auroc(values, positive, ~positive)
    expected = bounds([[auroc(pick, column) for column in (0, 1)] for pick in picks])
    np.testing.assert_allclose([estimate.low, estimate.high], expected)

    def within(pick, column):
        frame = pd.DataFrame({"v": values[pick, column], "p": positive[pick], "c": case[pick]})
        means = frame.groupby(["c", "p"])["v"].mean().unstack()
        return (means[True] - means[False]).mean()

    estimate, _ = clusters.difference_within(values, positive, ~positive, case)
    expected = bounds([[within(pick, column) for column in (0, 1)] for pick in picks])
    np.testing.assert_allclose([estimate.low, estimate.high], expected)

    control = (rounds["condition"] == "control").to_numpy()
    sides = control & positive, control & ~positive

    def knowing(pick, column):
        offset = np.mean([values[pick][side[pick], column].mean() for side in sides])
        return (values[pick][positive[pick], column] > offset).mean()

    whole = clusters.share(values, positive, clusters.offset(values, *sides), above=True)
    expected = [[knowing(pick, column) for column in (0, 1)] for pick in [np.arange(40), *picks]]
    np.testing.assert_allclose(whole, expected)

    ends = clusters.low_end(values, control, 0.2)
    for pick, end in zip([np.arange(40), *picks], ends, strict=True):
        chosen = values[pick][control[pick]]
        assert ((chosen < end).mean(0) <= 0.2).all()
        for column in (0, 1):
            beyond = chosen[:, column][chosen[:, column] > end[column]]
            assert not len(beyond) or (chosen[:, column] < beyond.min()).mean() > 0.2


def test_spearman_is_scipys(drawn):
    clusters, rounds, values, positive, _ = drawn
    other = np.tile(np.arange(5.0), 8)
    expected = [spearmanr(column[positive], other[positive]).statistic for column in values.T]
    np.testing.assert_allclose(clusters.spearman(values, other, positive).value, expected)
    assert np.isnan(clusters.spearman(values, np.ones(40), positive).value).all()


def test_one_trajectory_a_condition_gives_no_interval():
    """Each is drawn once in every draw: an interval without width would say that nothing could vary."""
    value = np.arange(12.0)[:, None]
    trajectory, every = np.repeat([0, 1, 2], 4), np.ones(12, bool)
    alone = Clusters(trajectory, trajectory).estimate(np.tile(value.mean(0), (3, 1)), every)
    assert (alone.value, np.isnan(alone.low), np.isnan(alone.high), alone.n_clusters) == (5.5, True, True, 3)
    together = Clusters(trajectory).auroc(value, value[:, 0] > 7, value[:, 0] < 4)
    assert not np.isnan(together.low)
