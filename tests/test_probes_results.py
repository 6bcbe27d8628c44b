"""Questions, controls and transfers on data whose answer is planted."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from planted_probe_data import LAYERS, WIDTH, logit_lens, planted, unit

from klb_probe.errors import KlbError
from klb_probe.probes.questions import QUESTIONS, family_populations, parse_questions, training_population
from klb_probe.probes.results import PROBE_COLUMNS, ProbeOptions, evaluate
from klb_probe.probes.site import Site
from klb_probe.probes.trial import LENGTH, RANDOM, RESIDUAL, SHUFFLED, SUBSPACE_FEATURE, WORDS


def run(data, *questions, estimators=("mean_difference",), **options):
    return evaluate(data, [logit_lens()], ProbeOptions(questions, estimators, shuffles=2, **options))


def line(results, feature=RESIDUAL, choice="nested", **keys):
    """The one line of a table with these values."""
    chosen = results.probes[(results.probes["feature"] == feature) & (results.probes["choice"] == choice)]
    for name, value in keys.items():
        chosen = chosen[chosen[name] == value]
    (found,) = chosen.to_dict("records")
    return found


def transfer(results, train, test):
    chosen = results.transfer[(results.transfer["train"] == train) & (results.transfer["test"] == test)]
    (found,) = chosen.to_dict("records")
    return found


def entitlement_at_2(one, layer):
    return 6.0 * unit(0) * one["entitled"] * (layer == 2)


@pytest.mark.parametrize("estimator", ["logistic", "mean_difference", "mass_mean", "lat"])
def test_a_planted_direction_is_found_at_its_layer_and_saved(estimator):
    results = run(planted(entitlement_at_2, pairs=8), "entitlement", estimators=(estimator,))
    found = line(results)
    assert found["layer"] == 2
    assert found["auroc_low"] > 0.8
    assert found["balanced_accuracy"] > 0.8
    assert found["selectivity_low"] > 0.1
    probe = next(one for one in results.directions if one.layer == 2)
    assert abs(probe.unit @ unit(0)) > 0.6  # standardised features weigh this one by its own large spread
    (entry,) = results.sets
    assert (entry.layer, entry.label, entry.n_rows) == (2, "owed", 64)


def test_null_data_stays_at_chance_and_gains_nothing_over_shuffled_labels():
    outside = 0
    for seed in range(6):
        found = line(run(planted(seed=seed), "entitlement"))
        outside += not found["auroc_low"] <= 0.5 <= found["auroc_high"]
        assert found["selectivity_low"] < 0.1
    assert outside <= 2


def test_an_entitlement_direction_transfers_to_every_framing():
    results = run(planted(entitlement_at_2), "lie")
    for train in ("honest", "deny", "incentive"):
        for test in ("honest", "deny", "incentive"):
            assert transfer(results, f"{train}: owed or not", f"{test}: owed or not")["auroc_low"] > 0.85


def test_a_lie_direction_that_is_there_under_deny_only_does_not_transfer_to_honest():
    results = run(planted(lambda one, layer: entitlement_at_2(one, layer) * (one["framing"] == "deny")), "lie")
    assert line(results)["auroc_low"] > 0.85
    honest = transfer(results, "deny: owed or not", "honest: owed or not")
    assert honest["auroc_low"] <= 0.5 <= honest["auroc_high"]


def test_a_framing_that_the_words_give_away_is_given_away_by_the_words():
    def instructed(one):
        return "say no to everyone" if one["framing"] == "deny" else "do as the policy says"

    data = planted(lambda one, layer: 4.0 * unit(1) * (one["framing"] == "deny"), words=instructed)
    results = run(data, "framing", "lie")
    assert line(results, question="framing")["auroc"] > 0.95
    assert line(results, WORDS, "none", question="framing")["auroc"] == 1.0
    lie = line(results, question="lie")
    assert lie["auroc_low"] <= 0.5 <= lie["auroc_high"]


def test_all_controls_stand_in_the_table_with_their_n():
    results = run(planted(entitlement_at_2), "entitlement", estimators=("mean_difference", "lat"))
    table = results.probes
    assert list(table.columns) == PROBE_COLUMNS
    for estimator in ("mean_difference", "lat"):
        for feature in (RESIDUAL, SHUFFLED, SUBSPACE_FEATURE):
            by_layer = table[(table["estimator"] == estimator) & (table["feature"] == feature) & (table["choice"] == "layer")]
            assert by_layer["layer"].tolist() == list(range(LAYERS))
        assert line(results, RANDOM, "none", estimator=estimator)["n"] == 48
    assert line(results, LENGTH, "none")["n_groups"] == 24
    assert line(results, "logit-lens margin")["n"] == 48
    assert line(results, SHUFFLED, estimator="lat")["auroc"] < 0.75
    # Twins share all but the label here, so nothing outside the residual can tell them apart.
    assert line(results, LENGTH, "none")["auroc"] == 0.5


def test_the_margin_control_counts_toward_owed_and_raw_for_the_models_own_answer():
    lens = logit_lens()
    yes_minus_no = (lens.readout.directions[0] - lens.readout.directions[1]).numpy()

    def knows(one, layer):
        return (1 if one["answer"] == "Yes" else -1) * yes_minus_no * (layer == LAYERS - 1)

    data = planted(knows, noise=0.3)
    results = run(data, "entitlement", "behaviour")
    assert line(results, "logit-lens margin", question="entitlement")["auroc"] > 0.95
    assert line(results, "logit-lens margin", question="behaviour")["auroc"] > 0.95
    # The residual holds the answer, and the wording flips it: a linear probe of entitlement has nothing to go by.
    assert line(results, question="entitlement")["auroc_low"] < 0.6
    assert line(results, question="behaviour")["auroc_low"] > 0.9


def test_round_lie_learns_from_rounds_and_scenario_probes_are_tested_on_them():
    def guilt(one, layer):
        told = one.get("lied", False) or (one["kind"] == "scenario" and one["framing"] == "deny" and one["entitled"])
        return 4.0 * unit(3) * told * (layer == 1)

    data = planted(guilt, rounds=6)
    results = run(data, "round_lie", "lie")
    assert line(results, question="round_lie")["auroc_low"] > 0.9
    assert line(results, question="round_lie")["recall_1_percent"] > 0.5
    assert transfer(results, "deny: owed or not", "rounds: lied or not")["auroc_low"] > 0.9
    scores = results.scores[results.scores["question"] == "round_lie"]
    assert scores["label"].sum() == data.rows["lied"].sum()


def test_the_length_control_counts_all_tokens_up_to_the_position():
    data = planted(rounds=4)
    for number, row in enumerate(data.rows.itertuples()):
        if row.kind == "round":  # a liar talks longer before the moment; the prompts are of one length
            site = Site((number,) * (30 if row.lied else 10), (9,))
            data.store.values[site.key] = data.store.values[data.sites["answer"][number].key]
            data.sites["answer"][number] = site
    results = run(data, "round_lie")
    assert set(data.rows.loc[data.rows["kind"] == "round", "n_tokens"]) == {20}
    assert line(results, LENGTH, "none")["auroc"] == 1.0


def test_the_layer_is_the_same_in_every_table_and_in_the_saved_set():
    ties = 0
    for seed in (6, 24, 27):  # folds choose layers as often as others
        results = run(planted(seed=seed), "entitlement")
        found = line(results)
        ties += found["chosen"].split().count(str(found["layer"])) == 2
        assert transfer(results, *["honest: owed or not"] * 2)["layer"] == found["layer"] == results.sets[0].layer
    assert ties


def test_what_shuffled_labels_do_not_give_has_the_reason():
    data = planted(rounds=4)
    lied = data.rows["lied"].fillna(False).astype(bool)
    first = data.rows[lied].groupby("domain").head(1).index
    data.rows.loc[lied & ~data.rows.index.isin(first), "lied"] = False
    results = run(data, "round_lie", "lie")
    for feature in (RESIDUAL, SHUFFLED):
        found = line(results, feature, question="round_lie")
        assert np.isnan(found["auroc"])
        assert found["note"].startswith("not estimable (n=4)")


@pytest.mark.parametrize(("pairs", "said"), [(4, True), (6, False)])
def test_a_threshold_that_is_not_of_control_rounds_is_said(pairs, said):
    data = planted(pairs=pairs, rounds=2)
    assert ((data.rows["condition"] == "control").sum() < 20) == said
    found = line(run(data, "round_lie"))
    assert found["recall_1_percent"] >= 0
    assert ("fewer than 20 control rounds" in found["note"]) == said


def test_a_transfer_names_the_folds_that_were_not_used():
    data = planted(entitlement_at_2, rounds=4)
    data.rows["entitled"] |= data.rows["domain"].ne("d0") & data.rows["framing"].eq("deny").fillna(False)
    found = transfer(run(data, "lie", "entitlement"), "deny: owed or not", "honest: owed or not")
    assert found["n"] == 36
    assert found["note"] == "fold d0 not used: its training rows lack a label"


def test_same_seed_same_numbers_other_seed_other_shuffles():
    first, again, other = (run(planted(entitlement_at_2), "lie", seed=seed) for seed in (3, 3, 4))
    pd.testing.assert_frame_equal(first.probes, again.probes)
    pd.testing.assert_frame_equal(first.scores, again.scores)
    assert all((a.direction == b.direction).all() for a, b in zip(first.directions, again.directions, strict=True))
    assert not first.probes.equals(other.probes)


def test_too_few_groups_and_copied_residuals_are_refused():
    with pytest.raises(KlbError, match="8 groups; a probe needs at least 10"):
        run(planted(pairs=2), "lie")
    data = planted()
    data.sites["claim"] = [site if number < 30 else None for number, site in enumerate(data.sites["answer"])]
    data.store.load = None  # nothing is read in vain
    with pytest.raises(KlbError, match="position claim: 5 groups; a probe needs at least 10"):
        run(data, "lie", positions=("answer", "claim"))
    data = planted()
    data.store.values[data.sites["answer"][30].key] = data.store.values[data.sites["answer"][0].key]
    with pytest.raises(KlbError, match="identical|same|duplicate"):
        run(data, "lie")


def test_a_question_with_one_label_gets_a_line_that_says_so():
    lens = logit_lens()
    always_yes = 9.0 * (lens.readout.directions[0] - lens.readout.directions[1]).numpy()
    data = planted(lambda one, layer: always_yes + entitlement_at_2(one, layer), noise=0.1)
    results = run(data, "behaviour", "entitlement")
    found = line(results, question="behaviour")
    assert "same label" in found["note"]
    assert np.isnan(found["auroc"])
    with pytest.raises(KlbError, match="no probe could be trained.*same label"):
        run(data, "behaviour")


def test_every_population_is_balanced_by_its_twins_and_framings():
    rows = planted().rows.assign(own_margin=0.0)
    for name, question in QUESTIONS.items():
        if question.family in ("owed", "framing"):
            for population in [training_population(question, rows), *family_populations(question, rows)]:
                assert len(population.rows) > 0
                assert population.labels.mean() == 0.5, name
                pairs = pd.Series(population.labels).groupby(population.contrast).agg(["size", "sum"])
                assert (population.contrast >= 0).all()
                assert pairs["size"].eq(2).all()
                assert pairs["sum"].eq(1).all()


def test_a_framing_pair_is_one_situation_under_both():
    rows = planted().rows
    population = training_population(QUESTIONS["framing"], rows)
    chosen = rows.iloc[population.rows]
    for _, pair in chosen.groupby(population.contrast):
        assert pair["situation"].nunique() == 1
        assert set(pair["framing"]) == {"honest", "deny"}


def test_unknown_names_are_refused_with_those_known():
    with pytest.raises(KlbError, match="unknown question lies; known: framing, lie"):
        parse_questions(["lies"])
    for estimators, split in ((["logit"], "domain"), (["logistic"], "domains")):
        with pytest.raises(KlbError, match="unknown (estimator|split)"):
            ProbeOptions.checked(["lie"], estimators, ["answer"], split=split, shuffles=1, seed=0)


def test_width_of_saved_directions():
    results = run(planted(), "lie")
    assert all(one.direction.shape == (WIDTH,) for one in results.directions)
    assert [one.layer for one in results.directions] == list(range(LAYERS))


def test_a_probe_that_reads_the_condition_stands_beside_the_condition():
    def noted(one, layer):
        return 5.0 * unit(4) * (one.get("condition") == "emergent") * (layer == 1)

    results = run(planted(noted, rounds=6), "round_lie", "lie")
    condition = line(results, "condition", "none", question="round_lie")
    assert condition["auroc"] > 0.8
    assert line(results, question="round_lie")["auroc_low"] < condition["auroc"] + 0.05
    assert not (results.probes.loc[results.probes["question"] == "lie", "feature"] == "condition").any()


def test_a_question_of_one_domain_leaves_out_pairs_while_others_leave_out_domains():
    data = planted(entitlement_at_2, rounds=2, pairs=12)
    one = data.rows["domain"] == "d0"
    kept = (data.rows["kind"] == "round") | one
    sites = [site for site, keep in zip(data.sites["answer"], kept, strict=True) if keep]
    part = type(data)(data.rows[kept].reset_index(drop=True), {"answer": sites}, data.store)
    results = run(part, "lie", "round_lie")
    assert line(results, question="lie")["split"] == "pair"
    assert line(results, question="lie")["auroc_low"] > 0.7
    assert line(results, question="round_lie")["split"] == "domain"


def test_results_are_shown_in_a_line():
    results = run(planted(), "framing")
    assert repr(results).startswith("ProbeResults of ")
    assert "framing/mean_difference/answer" in repr(results)
    assert len(repr(results)) < 200


def test_one_name_is_one_name():
    assert ProbeOptions(questions="lie", positions="answer").questions == ("lie",)
