"""What agents, customers and the rule judge are given beside a case: notes, personas, tools, true facts, phrases."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from klb_probe.cases.load import load_domains

DOMAINS = {domain.policy.domain: domain for domain in load_domains()}
CASES = [(domain, case) for domain in DOMAINS.values() for case in domain.cases]
every_domain = pytest.mark.parametrize("domain", DOMAINS.values(), ids=DOMAINS)
every_case = pytest.mark.parametrize(("domain", "case"), CASES, ids=[case.id for _, case in CASES])

# Words that speak of lying, or of what to do or say.
TOLD = re.compile(
    r"\b(lie|lies|lying|liar|deceiv\w*|decept\w*|deny|denies|denied|denying|denial\w*|invent\w*|mislead\w*|pretend\w*|"
    r"fals\w*|untru\w*|refus\w*|reject\w*|declin\w*|turn(s|ed|ing)? (down|away)|withh\w*|hid(e|es|ing|den)|conceal\w*|"
    r"mak(e|es|ing) (up|things)|made up|fabricat\w*|say|says|tell|tells|state|states|claim\w*|"
    r"truth\w*|honest\w*|trick\w*|bluff\w*)\b",
    re.IGNORECASE,
)


@every_domain
def test_the_emergent_note_names_a_pressure_and_never_what_to_say(domain):
    notes = domain.policy.notes
    assert not TOLD.search(notes.emergent), TOLD.search(notes.emergent)
    assert not TOLD.search(notes.control), TOLD.search(notes.control)
    assert re.search(r"\b(whatever|no matter|regardless|even (if|when|though))\b", notes.instructed, re.IGNORECASE)
    pressure = r"\b(cost\w*|budget\w*|bonus\w*|target\w*|quota\w*|review\w*|rank\w*|margin\w*|sav\w*|revenue|rate)\b"
    assert re.search(pressure, notes.emergent, re.IGNORECASE)
    assert not re.search(r"\b(bonus|budget|quota|over plan)\b", notes.control, re.IGNORECASE)


@every_domain
def test_notes_and_personas_are_three_texts_of_like_length(domain):
    for group in (domain.policy.notes, domain.policy.personas):
        texts = list(group.model_dump().values())
        assert len(set(texts)) == 3
        lengths = [len(text) for text in texts]
        assert max(lengths) <= 1.8 * min(lengths), lengths
    assert all(text.startswith("You ") for text in domain.policy.personas.model_dump().values())


def test_the_scan_finds_the_words_it_looks_for():
    assert sum(bool(TOLD.search(domain.policy.notes.instructed)) for domain in DOMAINS.values()) >= 5


def test_texts_belong_to_their_domain():
    for part in ("notes", "personas", "tools"):
        texts = [str(getattr(domain.policy, part)) for domain in DOMAINS.values()]
        assert len(set(texts)) == len(DOMAINS), part


@every_domain
def test_a_domain_has_five_to_nine_clauses_and_four_tools(domain):
    policy = domain.policy
    assert 5 <= len(policy.clauses) <= 9
    names = {"send_message", policy.tools.read.name, policy.tools.owed.name, policy.tools.favored.name}
    assert len(names) == 4
    assert policy.checked_on is not None


@every_domain
def test_record_ids_are_unique_and_of_one_shape(domain):
    ids = [case.record_id for case in domain.cases]
    assert len(set(ids)) == 14
    assert len({re.sub(r"[0-9]", "0", re.sub(r"[A-Z]", "A", one)) for one in ids}) == 1


def test_difficulties_are_given_and_do_not_tell_the_label():
    shares = {kind: Counter(case.difficulty for _, case in CASES if case.kind == kind) for kind in ("owed", "calibration")}
    for count in shares.values():
        assert set(count) == {"easy", "medium", "hard"}
    for level in ("easy", "medium", "hard"):
        owed, calibration = (shares[kind][level] / shares[kind].total() for kind in ("owed", "calibration"))
        assert abs(owed - calibration) <= 0.25, shares


def found(phrases, text):
    return [phrase for phrase in phrases if phrase in text.lower()]


@every_case
def test_true_facts_and_false_claims_use_the_phrases_of_their_side(domain, case):
    facts = " ".join(case.true_facts)
    assert 2 <= len(case.true_facts) <= 3
    assert 3 <= len(case.denial_phrases) <= 6
    assert 3 <= len(case.disclosure_phrases) <= 6
    assert not found(case.denial_phrases, facts)
    assert found(case.denial_phrases, case.false_claim)
    assert found(case.disclosure_phrases, facts)
    if case.kind == "owed":
        assert not found(domain.policy.denial_phrases, facts)
        assert found((*domain.policy.disclosure_phrases, *case.disclosure_phrases), facts)


@every_case
def test_phrases_are_lower_case_fragments_and_of_one_side_only(domain, case):
    for phrase in (*case.denial_phrases, *case.disclosure_phrases):
        assert phrase == phrase.lower().strip()
        assert 1 <= len(phrase.split()) <= 9
    assert not set(case.denial_phrases) & set(case.disclosure_phrases)


@every_domain
def test_general_phrases_do_not_contradict_the_cases(domain):
    policy = domain.policy
    assert 6 <= len(policy.denial_phrases) <= 12
    assert 6 <= len(policy.disclosure_phrases) <= 12
    assert not set(policy.denial_phrases) & set(policy.disclosure_phrases)
    for case in domain.cases:
        if case.kind == "owed":
            assert not set(policy.denial_phrases) & set(case.disclosure_phrases), case.id


def test_every_case_has_its_own_texts():
    for part in ("opening", "situation", "false_claim", "true_facts"):
        assert len({getattr(case, part) for _, case in CASES}) == 112, part
