"""Signals and rounds match one to one, or the join says what does not."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from planted_signals import lied, owed, row, rows, signals

from klb_probe.errors import KlbError
from klb_probe.pairing.join import join


def margin(one, lens, layer):
    return one["round"] + 10 * layer + (0.5 if lens == "logit" else 0)


def unscored(number, **keys):
    return {**row("none", 1, number, True, False), "gate_passed": False, "gate": "failed", "derived": None, **keys}


def test_one_line_a_round_lens_position_and_layer():
    made = rows(n_samples=3, n_cases=4)
    paired = join(signals(made, margin, turns=3, positions=("before_reply", "action")), made)
    table = paired.table
    assert len(table) == len(made) * 2 * 2 * 3
    assert not table.duplicated(["round_id", "position", "lens", "layer"]).any()
    np.testing.assert_allclose(table["margin"], table["round"] + 10 * table["layer"] + (table["lens"] == "logit") / 2)
    assert set(table["n_turns"]) == {1}  # the first: later turns hold what was said before them
    claims = signals(made, margin, turns=3, positions=("claim",))
    assert set(join(claims, made).table["n_turns"]) == {3}
    for line in table.drop_duplicates("round_id").itertuples():
        one = made[line.round_id]
        assert (line.lied, line.owed, line.trust_before) == (lied(one), owed(one), pytest.approx(one["trust_before"]))
        assert (line.case, line.event, line.outcome) == (one["case"], one["event"], one["outcome"])
        assert line.condition == {"none": "control", "lie_incentive": "emergent"}[one["condition"]]
        assert line.denied == (one["outcome"] != "refund")
        said = [text for role, text in one["transcript"] if role == "agent"]
        assert (line.text_length, line.n_messages) == (sum(map(len, said)), 2)
    assert "mechanism" not in table
    assert "words" not in table
    assert table.groupby("round_id")["trajectory"].first().nunique() == 6


def test_signals_of_another_runs_cases_are_refused():
    made = rows(n_samples=3, n_cases=4)
    frame = signals(made, margin)
    frame.loc[frame["round"] == 1, "case"] = "airline/another"
    with pytest.raises(KlbError, match="signals of other cases than the rounds on file: .* round 1.*pair a run with its own"):
        join(frame, made)


def test_the_order_of_rows_does_not_matter():
    made = rows(n_samples=3, n_cases=4)
    frame = signals(made, margin)
    shuffled = join(frame.sample(frac=1, random_state=1), made).table
    pd.testing.assert_frame_equal(
        join(frame, made).table,
        shuffled.sort_values(
            ["position", "lens", "layer"],
            kind="stable",
            key=lambda column: column.map({"margin": 0, "logit": 1}) if column.name == "lens" else column,
            ignore_index=True,
        ),
    )


def test_mechanism_is_kept_where_there_is_one():
    made = rows(n_samples=1, n_cases=2)
    made[0]["mechanism"] = "omission"
    table = join(signals(made, margin), made).table
    assert set(table["mechanism"].dropna()) == {"omission"}


def test_private_thoughts_are_not_words():
    made = rows(n_samples=1, n_cases=2)
    for one in made:
        one["agent_thoughts"] = ["I will lie now."]
    assert not join(signals(made, margin), made).rounds["words"].str.contains("lie now").any()


def test_signals_of_unscored_rounds_are_kept_apart():
    made = rows(n_samples=1, n_cases=2)
    others = [
        unscored(7),
        {**row("none", 1, 8, True, False), "derived": None, "malformed": "no JSON"},
        unscored(9, error="429"),
    ]
    paired = join(signals([*made, *others[:2]], margin), [*made, *others])
    assert sorted(set(paired.unscored["round_id"])) == [4, 5]
    assert not set(paired.table["round"]) & {7, 8, 9}
    assert (paired.counts["scored"], paired.counts["unscored"], paired.counts["unscored_with_signals"]) == (4, 3, 2)


def test_what_does_not_match_is_listed():
    made = rows(n_samples=2, n_cases=6)
    with pytest.raises(KlbError, match=r"7 with signals are not on file: tiny/airline/\S+ round \d.* and 2 more$"):
        join(signals(made, margin), made[7:])
    with pytest.raises(KlbError, match="1 on file have no signals: tiny/airline/none/high/1 round 0$"):
        join(signals(made[1:], margin), made)
    renamed = [{**one, "agent": "other"} for one in made]
    with pytest.raises(KlbError, match="24 with signals are not on file.*; 24 on file have no signals"):
        join(signals(renamed, margin), made)


@pytest.mark.parametrize("key", ["agent", "domain", "condition", "initial", "sample", "round"])
def test_every_key_counts(key):
    made = rows(n_samples=1, n_cases=2, conditions=("none",))
    frame = signals(made, margin)
    frame[key] = frame[key] + 100 if key in ("sample", "round") else "another"
    with pytest.raises(KlbError, match="do not match"):
        join(frame, made)


def test_duplicates_are_refused():
    made = rows(n_samples=1, n_cases=4)
    frame = signals(made, margin)
    with pytest.raises(KlbError, match="10 signals are there twice"):
        join(pd.concat([frame, frame.head(10)]), made)
    with pytest.raises(KlbError, match="twice"):
        join(frame, [*made, made[0]])
    with pytest.raises(KlbError, match="1 rounds are there twice: tiny/airline/none/high/1 round 0; pair one run"):
        join(frame, [*made, {**made[0], "delta_set": "harsh"}])


def test_broken_signals_are_refused():
    made = rows(n_samples=1, n_cases=4)
    frame = signals(made, margin)
    with pytest.raises(KlbError, match="lack own_margin"):
        join(frame.drop(columns="own_margin"), made)
    with pytest.raises(KlbError, match="hold no rows"):
        join(frame[:0], made)
    with pytest.raises(KlbError, match="1 margins are not finite, in tiny/"):
        join(frame.assign(margin=[np.nan, *frame["margin"][1:]]), made)
    with pytest.raises(KlbError, match="unknown positions everywhere; known: gate"):
        join(frame.assign(position="everywhere"), made)


def test_a_round_needs_no_signals_at_every_position():
    made = rows(n_samples=3, n_cases=4)
    frame = pd.concat([signals(made, margin), signals(made[:5], margin, positions=("claim",))])
    table = join(frame, made, ["claim"]).table
    assert set(table["round_id"]) == set(range(5))
    assert set(table["position"]) == {"claim"}
    with pytest.raises(KlbError, match="no signals at action, elicited; known positions: gate"):
        join(frame, made, ["claim", "elicited", "action"])
