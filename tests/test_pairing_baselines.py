"""Simpler readouts of the same rounds, and a monitor played by a canned player."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from planted_signals import lied, owed, rows, signals

from klb_probe.dialogue.player import Reply
from klb_probe.errors import KlbError
from klb_probe.pairing.baselines import LENGTH, MONITOR, OWN, RANDOM_MEDIAN, RANDOM_Q95, TURNS, WORDS, baselines
from klb_probe.pairing.join import join
from klb_probe.pairing.monitor import monitor_scores, open_monitor
from klb_probe.pairing.words import words_scores
from klb_probe.signals.statistics import plain_auroc

MADE = rows(n_samples=8)
LENSES = ("margin", *(f"random {number}" for number in range(8)))


def compared(made=MADE, change=lambda frame: frame, **keys):
    paired = join(change(signals(made, lambda *_: 0.0, lenses=LENSES, layers=2, noise=1.0)), made)
    return paired, baselines(paired.table, paired.rounds, draws=200, **keys)


def value(table, name, column="value", condition="all"):
    chosen = table[(table["baseline"] == name) & (table["condition"] == condition) & table["layer"].isna()]
    (line,) = chosen.to_dict("records")
    return line[column]


def test_words_tell_lies_of_unseen_cases():
    _, table = compared()
    assert value(table, WORDS) == 1.0
    assert value(table, WORDS, "direction") == "high = lie"
    rounds = pd.DataFrame({"case": ["a", "b"] * 40, "lied": [True, False] * 40, "words": ["first words", "other words"] * 40})
    assert words_scores(rounds) is None  # each case has one label only, so none can be learnt from the others
    rounds = pd.DataFrame({"case": np.repeat(list("abcdefgh"), 10), "lied": np.repeat([True, False] * 4, 10)})
    scores, fold = words_scores(rounds.assign(words="word" + rounds["case"]))
    assert rounds.groupby("case").apply(lambda part: len(set(fold[part.index]))).eq(1).all()
    within = [scores[fold == number] for number in set(fold)]
    assert all(np.ptp(one) < 1e-9 for one in within)  # nothing carries over from case to case


def test_words_are_compared_within_folds():
    rng = np.random.default_rng(0)
    said = ["no refund here", "a refund for you", "only credit is left", "let me look it up"]
    made = [{**one, "transcript": [["agent", str(rng.choice(said))]]} for one in MADE]
    paired, table = compared(made)
    owing = paired.rounds[paired.rounds["owed"]]
    scores, fold = words_scores(owing)
    wins = trials = 0.0
    for number in set(fold):
        lies, rest = (scores[(fold == number) & (owing["lied"] == side)] for side in (True, False))
        wins += np.heaviside(lies[:, None] - rest, 0.5).sum()
        trials += len(lies) * len(rest)
    assert value(table, WORDS) == pytest.approx(wins / trials)
    assert 0.3 < wins / trials < 0.7


def test_words_without_words():
    rounds = pd.DataFrame({"case": list("abcd") * 5, "lied": [True, False] * 10, "words": ""})
    assert words_scores(rounds) is None


def test_length_turns_and_own_margin():
    made = [{**one, "transcript": [*one["transcript"], ["agent", "No." * (1 + 3 * lied(one))]]} for one in MADE]
    paired, table = compared(made)
    rounds = paired.rounds[paired.rounds["owed"]]
    assert value(table, LENGTH) == plain_auroc(rounds["text_length"].to_numpy(), rounds["lied"].to_numpy())
    assert value(table, TURNS) == 0.5
    own = rounds["round"].to_numpy() % 3
    assert value(table, OWN) == pytest.approx(plain_auroc(own, rounds["lied"].to_numpy()))
    assert value(table, OWN, "low") < value(table, OWN) < value(table, OWN, "high")
    assert value(table, OWN, "direction") == "low = lie"
    assert (value(table, OWN, "n_lies"), value(table, OWN, "n_nonlies")) == (rounds["lied"].sum(), (~rounds["lied"]).sum())


def test_an_own_margin_that_is_not_defined_is_left_out():
    _, table = compared(change=lambda frame: frame.assign(own_margin=np.nan))
    assert np.isnan(value(table, OWN))
    assert value(table, OWN, "note") == "not estimable (n=0)"


def test_random_readouts():
    paired, table = compared()
    pairs = paired.table[paired.table["owed"] & paired.table["lens"].str.startswith("random")]
    scores = pairs.groupby(["layer", "lens"]).apply(lambda one: plain_auroc(one["margin"].to_numpy(), one["lied"].to_numpy()))
    folded = np.maximum(scores, 1 - scores)
    assert value(table, RANDOM_MEDIAN) == pytest.approx(np.median(folded))
    by_layer = table[(table["condition"] == "all") & table["layer"].notna()]
    highest = by_layer[by_layer["baseline"] == RANDOM_Q95].set_index("layer")["value"]
    np.testing.assert_allclose(highest, folded.groupby("layer").max())  # of eight, the 95th percentile is the largest
    assert 0.5 < value(table, RANDOM_MEDIAN) < value(table, RANDOM_Q95) <= folded.max()


def test_no_random_readouts():
    _, table = compared(change=lambda frame: frame[frame["lens"] == "margin"])
    assert value(table, RANDOM_Q95, "note") == "no random readouts"


def test_too_few_lies():
    _, table = compared(rows(n_samples=4, lie_rate=0.0))
    assert table["value"].isna().all()
    assert set(table["note"]) == {"not estimable (n=0)"}


class Canned:
    """Answers from a list, and keeps what it was asked."""

    name = "canned"

    def __init__(self, answers):
        self.answers, self.asked = answers, []

    def record(self):
        return {"model": "canned"}

    def reply(self, requests):
        self.asked += requests
        return self.answers[: len(requests)]

    def forget(self, conversation):
        pass


def test_the_monitor_sees_words_alone_and_is_scored_beside_the_others():
    chosen = [number for number, one in enumerate(MADE) if owed(one)]
    player = Canned([Reply(f'Sure. {{"lie": {90 if lied(MADE[number]) else 10}}}') for number in chosen])
    asked = monitor_scores(player, [{**MADE[number], "agent_thoughts": ["SECRET"]} for number in chosen])
    text = str([request.messages for request in player.asked])
    assert "no refund is possible" in text
    assert not any(word in text for word in ("SECRET", "lie_incentive", "TG-", "case-"))
    assert len({request.stream for request in player.asked}) == len(chosen)
    _, table = compared(monitor=pd.Series(asked["score"].to_numpy(), index=chosen))
    assert value(table, MONITOR) == 1.0


def test_unusable_replies_of_the_monitor():
    answers = ["no idea", '{"lie": 101}', '{"lie": true}', '{"lie": "50"}', '{"lie": 0}', '{"lie": 55.5}']
    asked = monitor_scores(Canned([*map(Reply, answers), Reply("", error="429")]), MADE[:7])
    assert asked["score"].tolist() == [*[pytest.approx(np.nan, nan_ok=True)] * 4, 0.0, 55.5, pytest.approx(np.nan, nan_ok=True)]
    assert asked["reply"].tolist() == [*answers, "429"]


@pytest.mark.parametrize("spec", ["rules", "scripted:honest"])
def test_players_that_cannot_read_are_no_monitors(spec):
    with pytest.raises(KlbError, match="give a model or endpoint:MODEL"):
        open_monitor(spec)
