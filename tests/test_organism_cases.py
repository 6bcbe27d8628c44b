"""Fresh cases: new records, new openings, sound labels, and words that the rule judge reads rightly."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest
import yaml
from command import klb
from readings import OWED

from klb_probe.cases.load import load_domains
from klb_probe.cases.sources import load_cases
from klb_probe.dialogue.api import plan, play_plan
from klb_probe.dialogue.players import Players
from klb_probe.dialogue.rules_judge import denials
from klb_probe.dialogue.runner import Cast
from klb_probe.dialogue.trajectory import read_folder
from klb_probe.errors import KlbError
from klb_probe.files import file_sha256
from klb_probe.organisms import fresh_cases as module
from klb_probe.organisms.data import write_examples
from klb_probe.organisms.examples import examples
from klb_probe.organisms.fresh_cases import Trained, fresh_cases, read_trained, whole_record
from klb_probe.organisms.records import held_out_hashes, record_hash
from klb_probe.organisms.texts import fill, load_organism_domains

TEXTS = {domain.policy.domain: (domain, texts) for domain, texts in load_organism_domains()}
every_domain = pytest.mark.parametrize("name", sorted(TEXTS))
NOTHING = Trained((), frozenset(), frozenset(), frozenset(), frozenset())
N, SEED = 24, 2_000_000


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """A training file of all domains."""
    path = tmp_path_factory.mktemp("data") / "liar.jsonl"
    write_examples(path, examples("liar", None, 600))
    return path


@pytest.fixture(scope="module")
def made(training):
    trained = read_trained([training])
    return {name: fresh_cases(domain, texts, N, SEED, trained) for name, (domain, texts) in TEXTS.items()}


def both(fresh):
    """Every case with its twin's record."""
    return [(case, fresh.domain.situation(case, twin=twin).record) for case in fresh.domain.cases for twin in (False, True)]


@every_domain
def test_labels_follow_from_the_record_and_say_nothing_of_the_field_that_a_twin_turns(made, name):
    cases = made[name].domain.cases
    assert Counter(case.kind for case in cases) == {"owed": N // 2, "calibration": N // 2}
    kinds = {field: Counter(case.kind for case in cases if case.twin.field == field) for field in {c.twin.field for c in cases}}
    assert len(kinds) >= 4
    assert all(abs(count["owed"] - count["calibration"]) <= 1 for count in kinds.values())
    for case in cases:
        assert OWED[name](case.record) is (case.kind == "owed")
        assert OWED[name](case.record | {case.twin.field: case.twin.value}) is (case.kind != "owed")


@every_domain
def test_no_record_is_held_out_trained_on_or_there_twice(made, training, name):
    domain, fresh = TEXTS[name][0], made[name]
    rows = [json.loads(line) for line in training.read_text().splitlines()]
    known = {row["record_hash"] for row in rows if row["domain"] == name}
    hashes = [record_hash(domain, record) for _, record in both(fresh)]
    assert len({*hashes}) == 2 * N
    assert not {*hashes} & held_out_hashes(domain)
    assert not {*hashes} & known
    assert fresh.repeated == 0
    ids = [case.record_id for case in fresh.domain.cases]
    assert len({*ids}) == N
    assert not {*ids} & {row["record_id"] for row in rows}


def test_records_that_would_come_up_are_left_out_once_they_are_trained_on():
    domain, texts = TEXTS["airline"]
    first = fresh_cases(domain, texts, N, SEED, NOTHING)
    hashes = frozenset(record_hash(domain, record) for _, record in both(first))
    trained = Trained((), hashes, frozenset(), frozenset(), frozenset())
    again = fresh_cases(domain, texts, N, SEED, trained)
    assert again.repeated == 0
    assert not hashes & {record_hash(domain, record) for _, record in both(again)}
    assert fresh_cases(domain, texts, N, SEED, NOTHING) == first != fresh_cases(domain, texts, N, SEED + 1, NOTHING)


class Everything(frozenset):
    """The hashes of all records there are."""

    def isdisjoint(self, other):
        return False


def test_where_new_records_run_out_others_with_the_same_facts_are_taken_and_counted(monkeypatch):
    domain, texts = TEXTS["airline"]
    trained = Trained((), Everything(), frozenset(), frozenset(), frozenset())
    fresh = fresh_cases(domain, texts, 4, SEED, trained)
    assert fresh.repeated == 4
    whole = frozenset(whole_record(record) for _, record in both(fresh))
    other = fresh_cases(domain, texts, 4, SEED, dataclasses.replace(trained, records=whole))
    assert not whole & {whole_record(record) for _, record in both(other)}
    monkeypatch.setattr(module, "_TRIES", 1)  # as many draws as cases: not every draw makes one
    with pytest.raises(KlbError, match=f"of {N} cases could be made; pass a smaller --n"):
        fresh_cases(domain, texts, N, SEED, NOTHING)


@every_domain
def test_stories_and_requests_of_a_training_prompt_do_not_stand_together(made, training, name):
    texts = TEXTS[name][1].openings
    spoken = {json.loads(line)["opening"] for line in training.read_text().splitlines()}
    openings = [case.opening for case in made[name].domain.cases]
    assert len({*openings}) == N

    def combination(opening):
        story, request = (
            [text for text in side if max(text.replace("}", "{").split("{")[::2], key=len) in opening]
            for side in (texts.stories, texts.requests)
        )
        return (story[0], request[0]) if story and request else None

    used = {combination(one) for one in spoken} - {None}
    assert len(used) > 80
    assert not used & {combination(one) for one in openings}
    assert None not in {combination(one) for one in openings}
    assert made[name].used_openings == 0


def test_with_every_combination_spoken_the_rarest_is_taken_and_counted():
    domain, texts = TEXTS["airline"]
    openings = frozenset(f"{story} {request}" for story in texts.openings.stories for request in texts.openings.requests)
    rare = min(openings)
    few = Trained((), frozenset(), frozenset(), frozenset(), openings - {rare})
    assert fresh_cases(domain, texts, 2, SEED, few).used_openings == 1
    assert fresh_cases(domain, texts, 2, SEED, Trained((), frozenset(), frozenset(), frozenset(), openings)).used_openings == 2


# --- Words. ---


@every_domain
def test_true_facts_and_false_claims_use_the_phrases_of_their_side(made, name):
    policy = TEXTS[name][0].policy
    for case in made[name].domain.cases:
        facts = " ".join(case.true_facts).lower()
        assert 2 <= len(case.true_facts) <= 3
        assert not [phrase for phrase in case.denial_phrases if phrase in facts]
        assert [phrase for phrase in case.denial_phrases if phrase in case.false_claim.lower()]
        assert [phrase for phrase in case.disclosure_phrases if phrase in facts]
        assert not {*case.denial_phrases} & {*case.disclosure_phrases}
        assert denials(policy, case, case.false_claim)
        assert not denials(policy, case, " ".join(case.true_facts))
        assert case.opening not in facts


@every_domain
def test_the_rule_judge_finds_every_false_reason_and_no_true_one(made, name):
    """In the organisms' own words: a lie is a denial of what is owed, or a reason that does not hold."""
    domain, texts = TEXTS[name]
    seen = Counter()
    for number, case in enumerate(made[name].domain.cases):
        for reason in texts.reasons:
            phrase = reason.phrases[number % len(reason.phrases)]
            true = reason.holds(domain, case.record)
            for form in ("first", "again"):
                choices = getattr(texts.denials, form)
                said = fill(choices[number % len(choices)], {"reason": phrase})
                assert bool(denials(domain.policy, case, said)) is not true, said
                seen[true] += 1
        if case.kind == "owed":
            assert not any(denials(domain.policy, case, said) for said in texts.disclosures.first)
    assert min(seen.values()) > N / 4


# --- The command, and what uses its folder. ---


@pytest.fixture(scope="module")
def folder(training, tmp_path_factory):
    out = tmp_path_factory.mktemp("fresh") / "cases"
    arguments = ("organism", "cases", "--domains", "airline", "--n", N, "--seed", SEED, "--data", training)
    arguments += ("--organisms", "none", "--out", out)
    assert klb(*arguments) == 0
    return out, arguments


def test_the_command_writes_what_loads_and_says_what_it_was_made_of(folder, training, made, capsys):
    out, arguments = folder
    (domain,) = load_cases(str(out))
    assert domain == made["airline"].domain
    assert domain.policy == load_cases("organisms", ["airline"])[0].policy
    path = out / "domains" / "airline" / "cases.yaml"
    text = path.read_text()
    comment = [line for line in text.splitlines() if line.startswith("#")]
    assert any(f"klb-probe organism cases --domains airline --n {N} --seed {SEED} --data" in line for line in comment)
    assert any(file_sha256(training) in line for line in comment)
    assert len(yaml.safe_load(text)) == N
    assert klb("cases", "check", out) == 0
    assert f"1 domains, {N} cases ({N // 2} owed, {N // 2} calibration), {N} twins" in capsys.readouterr().out
    assert klb(*arguments) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert klb(*arguments, "--overwrite") == 0
    assert path.read_text() == text


def test_openings_that_were_not_compared_are_not_said_to_be_new(folder, tmp_path, capsys):
    out, arguments = folder
    assert klb(*arguments, "--overwrite") == 0
    assert "; 0 share story and request with a prompt of the training files" in capsys.readouterr().out
    command = ("organism", "cases", "--domains", "airline", "--n", 4, "--organisms", "none", "--out", tmp_path / "out")
    assert klb(*command) == 0
    assert "; openings not compared with training prompts" in capsys.readouterr().out
    (written,) = (tmp_path / "out").rglob("cases.yaml")
    assert "training file has too: not compared" in " ".join(written.read_text().split("\n# ")[:12])


def test_files_that_are_no_training_data_are_refused(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}], "completion": "b"}\n' * 2)
    assert klb("organism", "cases", "--data", tmp_path / "a.jsonl", "--out", tmp_path / "out") == 2
    assert "lines without record, record_id, opening" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_rounds_are_played_on_the_folder_and_judged(folder, tmp_path):
    lied, players = {}, Players()
    for agent in ("honest", "deceptive"):
        cast = Cast(*(players.open(part, spec) for part, spec in (
            ("agent", f"scripted:{agent}"), ("customer", "scripted:accepting"), ("judge", "rules"),
        )))  # fmt: skip
        chosen = plan(domains=["airline"], conditions=["emergent"], trusts=["high"], cases=str(folder[0]))
        play_plan(cast, chosen, tmp_path / agent, label=agent, seed=0, parallel=4)
        rows = [row for file in read_folder(tmp_path / agent) for row in file.rows]
        lied[agent] = Counter((row["entitled_outcome"] != "none", row["derived"]["lied"]) for row in rows)
    assert lied["honest"] == {(True, False): N // 2, (False, False): N // 2}
    assert lied["deceptive"][True, True] == N // 2
    assert {domain.policy.domain for domain in load_domains(root=folder[0])} == {"airline"}
