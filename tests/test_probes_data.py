"""Scenarios and rounds as rows: who is compared with whom, and where each row is read."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from puppet import Puppet
from tiny import LAYERS, WIDTH, default_tokenizer, tiny_hf_model, tiny_model

from klb_probe.cases.load import load_domains
from klb_probe.cases.scenarios import WORDINGS, eligibility_scenarios
from klb_probe.dialogue.api import plan, play_plan
from klb_probe.dialogue.players import Players
from klb_probe.dialogue.round import Settings
from klb_probe.dialogue.runner import Cast
from klb_probe.dialogue.sidecar import read_turns
from klb_probe.dialogue.trajectory import read_folder
from klb_probe.errors import KlbError
from klb_probe.models.load import from_model
from klb_probe.pairing.labels import label_table
from klb_probe.probes.data import ProbeData, load_probe_data
from klb_probe.probes.extract import extract
from klb_probe.probes.prompts import rotated, scenario_rows
from klb_probe.probes.rounds_data import ROUND_POSITIONS, round_rows
from klb_probe.probes.rows import row_table
from klb_probe.probes.store import ResidualStore

FRAMINGS = ("honest", "deny", "incentive")
DOMAINS = load_domains(["airline", "debt"])


@pytest.fixture(scope="module")
def model():
    """A tiny model whose context holds a round."""
    raw = tiny_hf_model("llama")
    raw.config.max_position_embeddings = 16_384
    return from_model(raw, default_tokenizer(), name="tiny-llama")


@pytest.fixture(scope="module")
def scenarios(model):
    return scenario_rows(model, DOMAINS, FRAMINGS, reply=True)


def test_each_situation_is_asked_once_under_each_framing(scenarios):
    rows, sites = scenarios
    situations = {one.id: one for domain in DOMAINS for one in domain.situations()}
    assert len(rows) == len(situations) * len(FRAMINGS)
    assert rows["id"].is_unique
    assert not rows.duplicated(["situation", "framing"]).any()
    assert {name: len(found) for name, found in sites.items()} == dict.fromkeys(
        ("answer", "reply_mean", "reply_last"), len(rows)
    )
    for row in rows.itertuples():
        one = situations[row.situation]
        assert (row.group, row.domain, row.entitled) == (one.pair, one.domain, one.entitled)
        assert row.answer == ("Yes" if one.entitled is (row.question == "plain") else "No")
    assert rows.groupby("group")["entitled"].nunique().eq(2).all()


def test_paraphrase_and_wording_rotate_over_pairs_and_not_within_them(scenarios):
    rows, _ = scenarios
    assert rows.groupby("group")[["paraphrase", "question"]].nunique().eq(1).all(axis=None)  # twins, and all framings
    pairs = rows.drop_duplicates("group").set_index("group")
    for one in DOMAINS:
        domain = pairs.loc[[case.id for case in one.cases]]
        assert domain["paraphrase"].tolist() == [1 + number % 4 for number in range(len(domain))]
        assert domain["question"].tolist() == [WORDINGS[number // 4 % 2] for number in range(len(domain))]
    shown = rows.groupby(["framing", "entitled"])[["paraphrase", "question"]].value_counts()
    np.testing.assert_array_equal(*(shown.xs(side, level="entitled").sort_index() for side in (True, False)))


def test_a_framing_with_fewer_paraphrases_keeps_the_wording_of_the_others():
    scenarios = eligibility_scenarios(DOMAINS[:1], ["honest", "deny"])
    kept = rotated([one for one in scenarios if one.framing == "honest" or one.paraphrase < 4])
    assert len(kept) == 2 * len(DOMAINS[0].situations())
    wordings = {(one.framing, one.situation.id): one.question for one in kept}
    assert all(wordings["honest", name] == wordings["deny", name] for _, name in wordings)
    assert {one.paraphrase for one in kept if one.framing == "deny"} == {1, 2, 3}


def test_full_and_quick_designs(model):
    one = DOMAINS[:1]
    full, _ = scenario_rows(model, one, ("honest", "deny"), full=True)
    n = len(one[0].situations())
    assert len(full) == n * 2 * 4 * 2
    assert full["id"].is_unique
    quick, sites = scenario_rows(model, one, ("honest", "deny"), quick=True)
    assert list(sites) == ["answer"]
    assert len(quick) == 4 * 2 * 2
    assert quick.groupby("group")["question"].nunique().eq(1).all()
    assert set(quick["question"]) == set(WORDINGS)
    assert set(quick["id"]) <= set(full["id"])


def test_sites_lie_where_their_names_say(model, scenarios):
    rows, sites = scenarios
    said = {}
    for number, row in enumerate(rows.itertuples()):
        answer, mean, last = (sites[name][number] for name in ("answer", "reply_mean", "reply_last"))
        assert len(answer.ids) == row.n_tokens
        assert answer.positions == (row.n_tokens - 1,)
        assert mean.ids[: row.n_tokens] == answer.ids
        assert mean.positions == tuple(range(row.n_tokens, len(mean.ids)))
        assert (last.ids, last.positions) == (mean.ids, mean.positions[-1:])
        said.setdefault(row.domain, set()).add(mean.ids[row.n_tokens :])
    assert {domain: len(ids) for domain, ids in said.items()} == {"airline": 1, "debt": 1}  # whatever the prompt
    (airline,) = said["airline"]
    words = DOMAINS[0].policy.outcomes.owed.words
    assert model.tokenizer.decode(airline) == f"I am sorry, but under the policy you are not entitled to {words}."
    system, user = rows["text"][0].split("\n\n", 1)[0], rows["text"][0].rsplit("\n\n", 1)[1]
    prompt = model.tokenizer.decode(sites["answer"][0].ids)
    assert system in prompt and user in prompt  # noqa: PT018 (one fact)


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """Rounds of a deceptive agent that speaks in the tiny model's tokens."""
    out = tmp_path_factory.mktemp("run")
    chosen = plan(
        domains=["airline"], conditions=["control", "emergent"], trusts=["low"], cases_of_each_kind=2, settings=Settings()
    )
    players = Players()
    cast = Cast(Puppet(model), players.open("customer", "scripted:verifying"), players.open("judge", "rules"))
    play_plan(cast, chosen, out, label="puppet", seed=0, parallel=4)
    return out


def test_rounds_have_their_labels_and_the_cases_of_the_scenarios(model, run, scenarios):
    rows, sites = round_rows(model, run)
    labels = label_table(read_folder(run)[0].rows)
    labels = labels[labels["scored"]].set_index(["named", "sample", "round"])
    assert len(rows) == len(labels) == 8
    assert rows["id"].is_unique
    assert set(rows["condition"]) == {"control", "emergent"}
    for row in rows.itertuples():
        label = labels.loc[(row.condition, row.sample, row.round)]
        assert (row.lied, row.entitled, row.group, row.text) == (label.lied, label.owed, label.case, label.words)
        assert row.framing is None
    assert 0 < rows["lied"].sum() < len(rows)
    assert set(rows["group"]) <= set(scenarios[0]["group"])
    assert tuple(sites) == ROUND_POSITIONS


def test_rounds_are_read_where_a_moment_comes_first(model, run):
    rows, sites = round_rows(model, run)
    by_round = {}
    for turn in read_turns(next(run.glob("turns_*.jsonl"))):
        by_round.setdefault((turn["trajectory"], turn["round"]), []).append(turn)
    for number, row in enumerate(rows.itertuples()):
        condition = row.id.split(" ", 1)[1].rsplit(" ", 1)[0]
        turns = by_round[condition, row.round]
        spoken = [turn for turn in turns if turn.get("message")]
        first = spoken[0]
        answer, mean, last, gate, claim, action = (sites[name][number] for name in ROUND_POSITIONS)
        assert list(answer.ids) == first["prompt_ids"]
        assert row.n_tokens == len(first["prompt_ids"])
        start, stop = first["message_span"]
        assert mean.positions == tuple(range(row.n_tokens + start, row.n_tokens + stop))
        assert last.positions == mean.positions[-1:]
        written = json.dumps(first["message"], ensure_ascii=False)[1:-1]
        assert written in model.tokenizer.decode(mean.ids[mean.positions[0] :])
        assert list(gate.ids) == turns[0]["prompt_ids"]
        assert list(action.ids) == turns[-1]["prompt_ids"]
        assert (claim is not None) == bool(row.lied)
    assert any(site is not None for site in sites["claim"])
    replayed, same = round_rows(model, run, replay=True, positions=("answer", "reply_mean"))
    pd.testing.assert_frame_equal(replayed, rows)
    assert same == {name: sites[name] for name in ("answer", "reply_mean")}


def test_ids_of_another_model_are_refused(run):
    with pytest.raises(KlbError, match="its token ids are of tiny-llama, not of tiny-qwen2"):
        round_rows(tiny_model("qwen2"), run)


def test_scenarios_and_rounds_in_one_table_with_their_residuals(model, run, tmp_path, monkeypatch):
    positions = ("answer", "reply_mean", "claim")
    asked = {"framings": ["honest", "deny"], "domains": ["airline"], "quick": True, "store": tmp_path}
    data = load_probe_data(model, **asked, positions=positions, runs=[run])
    assert (len(data), data.positions, data.n_layers, data.d_model) == (16 + 8, positions, LAYERS, WIDTH)
    assert data.rows["kind"].tolist() == ["scenario"] * 16 + ["round"] * 8
    assert data.has("answer").all()
    lied = (data.rows["kind"] == "round") & data.rows["lied"].fillna(value=False)
    np.testing.assert_array_equal(data.has("claim"), lied)
    values = data.residuals("claim", 2)
    assert (values.shape, values.dtype) == ((24, WIDTH), np.float32)
    np.testing.assert_array_equal(np.isnan(values), ~np.repeat(data.has("claim")[:, None], WIDTH, axis=1))
    for position in positions:
        values = data.residuals(position, 2)
        for number in np.flatnonzero(data.has(position))[::5]:
            site = data.sites[position][number]
            plain = model.residuals([site.ids], [2], site.positions)[0, 0].mean(0)
            np.testing.assert_allclose(values[number], plain, atol=1e-5, rtol=1e-4)
    with pytest.raises(KlbError, match="no residuals at position gate; there are: answer, reply_mean, claim"):
        data.residuals("gate", 0)
    with monkeypatch.context() as patch:
        patch.setattr(model, "capture", None)  # everything is there: the model is not run
        again = load_probe_data(model, **asked, positions=positions, runs=[run])
    np.testing.assert_array_equal(again.residuals("answer", 1), data.residuals("answer", 1))


def test_what_makes_no_table_is_said(model, run, tmp_path):
    asked = {"framings": ["honest"], "domains": ["airline"], "quick": True, "store": tmp_path}
    with pytest.raises(KlbError, match="unknown position middle; known: answer, reply_mean"):
        load_probe_data(model, **asked, positions=["middle"])
    with pytest.raises(KlbError, match="no scenario or round has position gate; some are of rounds only: pass a run"):
        load_probe_data(model, **asked, positions=["answer", "gate"])
    with pytest.raises(KlbError, match="8 rows are there twice"):
        load_probe_data(model, **{**asked, "framings": []}, runs=[run, run])
    with pytest.raises(KlbError, match="no scenario and no scored round"):
        load_probe_data(model, **{**asked, "framings": []})
    assert not list(tmp_path.rglob("*.safetensors"))


def test_parts_without_a_position_have_none_there(model, tmp_path):
    store = ResidualStore.open(tmp_path, model)
    lines = [{"kind": "round", "id": name, "paraphrase": 0, "entitled": True, "n_tokens": 1} for name in "ab"]
    parts = [ProbeData(row_table([line]), {name: [None]}, store) for line, name in zip(lines, ("gate", "claim"), strict=True)]
    both = ProbeData.concat(parts)
    assert both.sites == {"gate": [None, None], "claim": [None, None]}
    assert both.rows["id"].tolist() == ["a", "b"]
    assert np.isnan(both.residuals("gate", 0)).all()


def test_the_default_models_residuals_are_its_own(smollm, tmp_path):
    _, found = scenario_rows(smollm, DOMAINS[:1], ["honest"], quick=True, reply=True)
    sites = [found[name][number] for number in (0, 3) for name in ("answer", "reply_mean", "reply_last")]
    store, layers = ResidualStore.open(tmp_path, smollm), [0, 14, 29]
    extract(smollm, sites, store)
    answer, mean, _ = sites[3:]
    plain = smollm.residuals([mean.ids], layers, [*answer.positions, *mean.positions])[:, 0].numpy()
    for layer, expected in zip(layers, plain, strict=True):
        for residual, own in zip(store.load(sites[3:], layer), (expected[0], expected[1:].mean(0), expected[-1]), strict=True):
            assert np.linalg.norm(residual - own) <= 1e-4 * np.linalg.norm(own)
