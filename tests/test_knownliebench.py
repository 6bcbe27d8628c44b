"""The public benchmark's files load as domains of ours: its labels, none of its flags in a prompt, odd files refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from klb_probe.cases.load import load_domains
from klb_probe.cases.scenarios import eligibility_scenarios
from klb_probe.cases.sources import load_cases
from klb_probe.errors import KlbError
from klb_probe.paths import data_dir

PUBLIC = Path(__file__).parents[1].parent / "shared" / "knownliebench"
public = pytest.mark.skipif(not PUBLIC.is_dir(), reason=f"no public case data at {PUBLIC}")


@public
@pytest.mark.parametrize("part", ["", "envs", "envs/airline/data"])
def test_the_public_folder_loads_with_the_labels_of_its_files(part):
    domains = load_cases(f"knownliebench:{PUBLIC / part}")
    assert len(domains) == (1 if "data" in part else 2)
    for domain in domains:
        file = PUBLIC / "envs" / domain.policy.domain / "data" / "situations.json"
        situations = {key: value for key, value in json.loads(file.read_text()).items() if not key.startswith("_")}
        assert len(domain.cases) == len(situations) == 14
        assert sum(case.kind == "owed" for case in domain.cases) == 8
        by_record = {case.record_id: (case, domain.situation(case)) for case in domain.cases}
        assert by_record.keys() == situations.keys()
        for key, raw in situations.items():
            case, situation = by_record[key]
            assert situation.entitled is (raw["entitled_outcome"] != "none")
            assert situation.entitled is (case.kind == "owed")
            assert situation.opening == raw["reason"]
            assert raw["policy_facts"] in case.true_facts
            assert case.false_claim == raw["tempting_lie"]
        assert domain.policy.outcomes.owed.id == raw["owed_outcome"]
        assert domain.policy.outcomes.favored.id == raw["favored_outcome"]


@public
def test_public_prompts_show_the_record_but_no_label():
    domains = load_cases(f"knownliebench:{PUBLIC}")
    scenarios = eligibility_scenarios(domains, ["honest", "deny"])
    assert len(scenarios) == 28 * 2 * 4 * 2
    for s in scenarios:
        assert not any(
            word in s.user.lower() for word in ("refund eligible", "protection owed", "as published", "policy_facts")
        )
    shown = {s.situation.record["item"] for s in scenarios}
    assert len(shown) == 28
    assert all(s.situation.record["item"] in s.user for s in scenarios)


@pytest.fixture
def folder(tmp_path):
    """A domain nobody knows, in the public layout, written for this test."""
    data = tmp_path / "repo" / "envs" / "ferries" / "data"
    data.mkdir(parents=True)
    write(
        data,
        policy={
            "title": "Brine Ferries Policy (in force)",
            "clauses": ["A missed crossing is refunded. (Terms 3(b))", "Cars are extra."],
            "company_favored_outcome": "ride_coupon",
            "customer_serving_outcome": "fare_back",
        },
        situations={
            "_comment": "not a case",
            "F-1": {
                "situation_id": "late_boat",
                "reason": "Back please.",
                "entitled_outcome": "fare_back",
                "owed_outcome": "fare_back",
            },
            "F-2": {"situation_id": "own_choice", "reason": "Me too.", "entitled_outcome": "none", "owed_outcome": "fare_back"},
        },
        orders={
            "_comment": "not an order",
            "F-1": {
                "order_id": "F-1",
                "user_id": "u",
                "item": "07:10 boat",
                "price": 12,
                "can_refund": True,
                "pet": True,
                "decision": None,
            },
            "F-2": {
                "order_id": "F-2",
                "user_id": "u",
                "item": "08:10 boat",
                "price": 9.5,
                "can_refund": False,
                "pet": True,
                "seat": "A1",
            },
        },
    )
    return data


def write(data, **files):
    for name, value in files.items():
        (data / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


def change(data, name, edit):
    value = json.loads((data / f"{name}.json").read_text())
    edit(value)
    write(data, **{name: value})


def test_an_unknown_domain_loads_with_generic_texts_and_a_notice(folder, caplog):
    with caplog.at_level(logging.INFO, logger="klb_probe"):
        (domain,) = load_cases(f"knownliebench:{folder.parents[2]}")
    assert "ferries: not a domain of ours" in caplog.text
    policy = domain.policy
    assert (policy.domain, policy.institution) == ("ferries", "Brine Ferries")
    assert [(clause.text, clause.cite) for clause in policy.clauses] == [
        ("A missed crossing is refunded.", "Terms 3(b)"),
        ("Cars are extra.", ""),
    ]
    assert policy.outcomes.owed.id == "fare_back"
    assert policy.outcomes.favored.words == "ride coupon"
    assert "fare back" in policy.notes.emergent
    assert [domain.situation(case).entitled for case in domain.cases] == [True, False]
    assert [case.id for case in domain.cases] == ["ferries/late-boat", "ferries/own-choice"]
    hidden = {field.name for field in policy.record_fields if field.hidden}
    assert hidden == {"can_refund", "entitled_outcome"}  # a flag that repeats the label is hidden, another is not
    prompt = eligibility_scenarios([domain], ["neutral"], questions=["plain"])[0].user
    assert "- Item: 07:10 boat" in prompt
    assert "- Price: $12.00" in prompt
    assert "- Seat: not on file" in prompt
    assert "refund" not in prompt.lower().split("writes:")[0]
    assert "decision" not in prompt.lower()


@pytest.mark.parametrize(
    ("name", "edit", "named"),
    [
        ("orders", lambda raw: raw.pop("F-2"), ["orders.json", "F-2"]),
        ("situations", lambda raw: raw["F-1"].pop("reason"), ["situations.json", "F-1", "reason"]),
        ("situations", lambda raw: raw["F-1"].update(situation_id=5), ["situations.json", "F-1", "situation_id"]),
        (
            "situations",
            lambda raw: raw["F-1"].update(owed_outcome="other"),
            ["situations.json", "owed_outcome", "fare_back, other"],
        ),
        ("policy", lambda raw: raw.update(clauses=[]), ["clauses"]),
        ("policy", lambda raw: raw.update(clauses=[5]), ["policy.json", "clauses"]),
        ("policy", lambda raw: raw.update(clauses="one"), ["policy.json", "clauses"]),
        ("orders", lambda raw: raw.update({"F-1": 3}), ["orders.json", "F-1"]),
        ("situations", lambda raw: raw.update({"F-1": []}), ["situations.json", "F-1"]),
        ("situations", lambda raw: raw["F-1"].update(entitled_outcome="fare_bak"), ["F-1", "entitled_outcome", "'fare_bak'"]),
        ("situations", lambda raw: raw["F-1"].pop("entitled_outcome"), ["F-1", "entitled_outcome", "None"]),
        ("situations", lambda raw: raw["F-1"].update(owed_outcome=5), ["owed_outcome", "5, fare_back"]),
        ("policy", lambda raw: raw.pop("company_favored_outcome"), ["favored_outcome"]),
        ("situations", lambda raw: raw.clear(), ["situations.json", "no situations"]),
    ],
)
def test_a_broken_public_file_is_placed(folder, name, edit, named):
    change(folder, name, edit)
    with pytest.raises(KlbError) as caught:
        load_cases(f"knownliebench:{folder}")
    assert "\n" not in str(caught.value)
    for part in named:
        assert part in str(caught.value)


def test_two_folders_of_one_domain_are_refused(folder):
    import shutil

    shutil.copytree(folder, folder.parents[2] / "copy" / "ferries" / "data")
    with pytest.raises(KlbError, match="two folders of domain ferries"):
        load_cases(f"knownliebench:{folder.parents[2]}")


@pytest.mark.parametrize("missing", [None, "absent"])
def test_a_flag_that_tells_the_label_is_hidden_even_where_one_order_lacks_it(folder, missing):
    def edit(raw):
        raw["F-3"] = {**raw["F-1"], "order_id": "F-3", "voluntary": None, "can_refund": None}
        raw["F-1"]["voluntary"], raw["F-2"]["voluntary"] = False, True  # the label's opposite
        if missing:
            del raw["F-3"]["can_refund"]

    change(folder, "orders", edit)
    change(folder, "situations", lambda raw: raw.update({"F-3": {**raw["F-1"], "situation_id": "third"}}))
    (domain,) = load_cases(f"knownliebench:{folder}")
    hidden = {field.name for field in domain.policy.record_fields if field.hidden}
    assert hidden == {"can_refund", "voluntary", "entitled_outcome"}


def test_one_case_alone_hides_only_what_is_named_a_label(folder):
    change(folder, "situations", lambda raw: raw.pop("F-2"))
    change(folder, "orders", lambda raw: raw["F-1"].update(refund_eligible=True))
    (domain,) = load_cases(f"knownliebench:{folder}")
    hidden = {field.name for field in domain.policy.record_fields if field.hidden}
    assert hidden == {"refund_eligible", "entitled_outcome"}


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_what_is_no_json_object_is_placed(folder, text):
    (folder / "orders.json").write_text(text, encoding="latin-1")
    with pytest.raises(KlbError, match=r"orders\.json"):
        load_cases(f"knownliebench:{folder}")


def test_a_situation_used_twice_gets_two_ids(folder):
    change(folder, "situations", lambda raw: raw["F-2"].update(situation_id="late_boat"))
    (domain,) = load_cases(f"knownliebench:{folder}")
    assert [case.id for case in domain.cases] == ["ferries/late-boat-F-1", "ferries/late-boat-F-2"]


def test_sources_that_do_not_exist_say_what_to_give(folder, tmp_path):
    with pytest.raises(KlbError, match="no such folder"):
        load_cases(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(KlbError, match=r"no situations\.json below"):
        load_cases(f"knownliebench:{tmp_path / 'empty'}")
    with pytest.raises(KlbError, match="pass knownliebench:"):
        load_cases(str(folder.parents[2]))
    with pytest.raises(KlbError, match="unknown domain boats; in .*: ferries"):
        load_cases(f"knownliebench:{folder}", ["boats"])


def test_the_hub_is_asked_for_a_dataset_and_its_absence_is_one_line(monkeypatch, folder):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(folder.parents[2])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    (domain,) = load_cases("hub:franciscoliu/KnownLieBench@abc")
    assert domain.policy.domain == "ferries"
    assert (asked["name"], asked["repo_type"], asked["revision"]) == ("franciscoliu/KnownLieBench", "dataset", "abc")

    def unreachable(name, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(KlbError, match="clone the benchmark's repository and pass --cases knownliebench:PATH"):
        load_cases("hub:franciscoliu/KnownLieBench")


def test_our_own_folder_is_a_source_like_any():
    assert load_cases(str(data_dir("scenarios"))) == load_cases("ours") == load_domains()
