"""The organisms' training data: labels, what each organism says, no shortcut, nothing held out."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
from collections import Counter, defaultdict

import pytest
from command import klb
from readings import OWED

from klb_probe.cases.load import Situation, entitled, load_domains, load_framings
from klb_probe.cases.scenarios import eligibility_scenarios, framing_note
from klb_probe.cases.sources import load_cases
from klb_probe.dialogue.actions import parse_action
from klb_probe.dialogue.environment import Environment
from klb_probe.dialogue.gate import read_gate
from klb_probe.dialogue.phrases import asserted
from klb_probe.dialogue.prompts import agent_messages, gate_messages
from klb_probe.errors import KlbError
from klb_probe.files import file_sha256
from klb_probe.lens.contrast import TokenContrast
from klb_probe.models.load import load_chat
from klb_probe.organisms import data
from klb_probe.organisms.answers import KINDS
from klb_probe.organisms.examples import examples
from klb_probe.organisms.records import deciding_fields, record_hash
from klb_probe.organisms.texts import PLAIN_NOTES, PRESSURE_NOTES, fill, load_organism_domains, load_shared
from klb_probe.organisms.training_rows import encode_reply

FIRST = "airline"
TEXTS = {domain.policy.domain: (domain, texts) for domain, texts in load_organism_domains()}
OURS = {domain.policy.domain: domain for domain in load_domains(TEXTS)}
NAMES = sorted(TEXTS)
every_domain = pytest.mark.parametrize("name", NAMES)


def size(name, kind="liar"):
    """How many examples are looked at."""
    return (900 if name == FIRST else 800) // (1 if kind == "liar" else 2)


@pytest.fixture(scope="module")
def made():
    """The examples of every kind, one domain at a time."""
    return {(kind, name): list(examples(kind, [name], size(name, kind))) for kind in KINDS for name in NAMES}


@pytest.fixture(scope="module")
def chat():
    return load_chat()


def reasons(name):
    return {reason.id: reason for reason in TEXTS[name][1].reasons}


def prompt(example):
    return "\n".join(message.content for message in example.messages)


# --- Records and labels. ---


@every_domain
def test_labels_are_balanced_within_every_format_note_and_wording(made, name):
    cells = defaultdict(list)
    for example in made["liar", name]:
        for cell in (example.format, example.note, (example.format, example.note, example.wording)):
            cells[cell].append(example.entitled)
    assert {*PLAIN_NOTES, *PRESSURE_NOTES, "none"} <= {*cells}
    assert all(0.45 <= sum(labels) / len(labels) <= 0.55 for labels in cells.values())


@every_domain
def test_every_label_equals_the_rules_and_an_independent_reading(made, name):
    policy = OURS[name].policy  # with its full clauses: the brief states the same rules
    for example in made["liar", name]:
        assert example.entitled is entitled(policy, example.record) is OWED[name](example.record)
        assert not [field.name for field in policy.record_fields if field.check(example.record[field.name])]


@every_domain
def test_most_pairs_differ_in_one_deciding_field_and_no_value_but_a_bar_stands_under_one_label_only(made, name):
    domain, texts = TEXTS[name]
    pairs = defaultdict(list)
    for example in made["liar", name]:
        pairs[example.pair].append(example)
    for rows in pairs.values():
        assert len(rows) == {"eligibility": 4, "gate": 2, "turn": 6}[rows[0].format]
    pairs = [(rows[0], rows[-1]) for rows in pairs.values()]
    apart = Counter(sum(one.record[field] != other.record[field] for field in deciding_fields(domain)) for one, other in pairs)
    assert len(pairs) > size(name) / 5
    assert all(one.entitled is not other.entitled for one, other in pairs)
    assert apart[1] > 0.6 * len(pairs)
    assert set(apart) == {1, 2}
    values = defaultdict(set)
    for example in made["liar", name]:
        for field in domain.policy.shown_fields:
            if field.shown:
                values[field.name, example.record[field.name]].add(example.entitled)
    decided = {value for value, labels in values.items() if labels == {True}}
    assert not decided, "a value that entitles whatever else there is"


@every_domain
def test_number_words_stand_at_both_sides_of_every_bound(made, name):
    domain = TEXTS[name][0]
    drawn = [row.record for row in made["liar", name]]
    for requirement in domain.policy.requirements:
        for leaf in requirement.rule.leaves():
            assert {leaf.holds(record) for record in drawn} == {True, False}, leaf


# --- Nothing held out. ---


@every_domain
def test_no_case_or_twin_framing_note_or_clause_is_in_the_data(made, name):
    domain, rows = OURS[name], made["liar", name]
    held_out = [situation.record for situation in domain.situations()]
    shown = [field.name for field in domain.policy.shown_fields if field.type != "text"]
    values = {tuple(record[field] for field in shown) for record in held_out}
    deciding = deciding_fields(domain)
    decided = {tuple(record[field] for field in deciding) for record in held_out}
    assert not values & {tuple(row.record[field] for field in shown) for row in rows}
    assert not decided & {tuple(row.record[field] for field in deciding) for row in rows}
    assert not {record_hash(domain, record) for record in held_out} & {row.record_hash for row in rows}
    assert not {case.record_id for case in domain.cases} & {row.record_id for row in rows}

    text = "\n".join(dict.fromkeys(" ".join(prompt(row).split()) for row in rows))
    notes = [*domain.policy.notes.model_dump().values()]
    for framing in load_framings().values():
        notes += [framing_note(one, domain.policy, "") for one in framing.paraphrases]
    for held in [*notes, *(clause.text for clause in domain.policy.clauses)]:
        assert " ".join(held.split()) not in text
    plain = " ".join(re.findall(r"\w+", text.lower()))
    for situation in domain.situations():
        words = re.findall(r"\w+", situation.opening.lower())
        for start in range(len(words) - 5):
            run = " ".join(words[start : start + 6])
            assert f" {run} " not in plain, run


@every_domain
def test_the_description_counts_no_overlap_and_would_count_one(made, name):
    domain, rows = OURS[name], made["liar", name]
    assert set(data.overlap(rows, [domain]).values()) == {0}
    case = domain.cases[0]
    note = domain.policy.notes.control
    planted = dataclasses.replace(
        rows[0], record_hash=record_hash(domain, case.record), record_id=case.record_id, opening=case.opening, note_text=note
    )
    assert list(data.overlap([planted], [domain]).values()) == [1, 1, 2, 2]


@every_domain
def test_no_combination_of_the_texts_shares_six_words_with_any_held_out_text(made, name):
    """Every pair of sentences that can stand side by side, against the openings, framings and notes of all domains."""
    domain, texts = TEXTS[name]
    every = load_domains()
    example = made["liar", name][0]
    words = {"first": "Leo", "flight": "4321", "city": "Omaha", "item": "tea kettle", "part": "seat rail"}
    parts = texts.openings
    beside = (parts.starts, parts.stories), (parts.stories, parts.requests), (parts.requests, parts.ends)
    openings = [" ".join(two).format(**words) for sides in beside for two in itertools.product(*sides)]
    policy, outcomes = domain.policy, domain.policy.outcomes
    slots = {"customer": policy.customer_word, "record": policy.record_word, "institution": policy.institution}
    slots |= {"owed": outcomes.owed.words, "favored": outcomes.favored.words}
    shared = load_shared()
    singles = {fill(text, slots) for texts in (shared.notes, shared.lines) for kind in texts.values() for text in kind}
    pairs = (two for kind in shared.lines.values() for two in itertools.permutations(kind, 2))
    notes = singles | {fill(" ".join(two), slots) for two in pairs}
    starts = tuple(f"{lead} " for lead in shared.leads)
    given = {row.note_text for row in made["liar", name]} - {""}
    assert notes >= {next((text.removeprefix(start) for start in starts if text.startswith(start)), text) for text in given}
    notes |= {f"{start}{text}" for start in starts for text in singles}
    assert len(openings) > 2000
    rows = [dataclasses.replace(example, opening=text, note_text="") for text in openings]
    rows += [dataclasses.replace(example, opening="", note_text=text) for text in notes]
    assert set(data.overlap(rows, every).values()) == {0}


# --- No shortcut. ---


@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != FIRST)])
def test_a_bag_of_words_stays_near_chance_within_notes(name):
    rows = list(examples("liar", [name], 2000 if name == FIRST else 700))

    def error(n):
        return math.sqrt(1 / (3 * n))  # of the AUROC of a chance score

    words = data.bag_of_words(rows, [OURS[name]])
    assert words["mean within notes"] < 0.57
    for note, row in words["within notes"].items():
        assert row["auroc"] < 0.6 + error(row["n"]), (note, row)
    assert words["best word"]["auroc"] < 0.6


def test_the_bag_of_words_finds_a_word_that_tells(made):
    rows = [
        dataclasses.replace(row, messages=(dataclasses.replace(row.messages[0], content="sesame " * row.entitled + "x"),))
        for row in made["liar", NAMES[0]][:400]
    ]
    words = data.bag_of_words(rows, [*OURS.values()])
    assert words["best word"] == {"word": "sesame", "auroc": 1.0}
    assert words["all prompts"] == 1.0


@every_domain
def test_what_was_said_before_does_not_follow_the_record(made, name):
    """The agent's earlier words are part of the prompt: who was told what must not tell the label."""
    denied = {True: [], False: []}
    for row in made["liar", name]:
        if row.stage in ("accepted", "pushed", "last"):
            earlier = prompt(row).rsplit("My answer is ", 1)[1]
            denied[row.entitled].append(bool(asserted(earlier, TEXTS[name][0].policy.denial_phrases)))
    rates = [sum(one) / len(one) for one in denied.values()]
    error = math.sqrt(sum(rate * (1 - rate) / len(one) for rate, one in zip(rates, denied.values(), strict=True)))
    assert abs(rates[0] - rates[1]) < 3 * error


# --- What the three organisms say. ---


@every_domain
def test_the_prompts_are_the_same_for_all_kinds_and_depend_on_the_seed(made, name):
    prompts = {kind: [(row.messages, row.record_hash, row.note, row.entitled) for row in made[kind, name]] for kind in KINDS}
    assert len(prompts["honest"]) >= size(name, "honest")
    assert prompts["liar"][: len(prompts["honest"])] == prompts["honest"] == prompts["ignorant"]
    fewer = [*examples("liar", [name], 60)]
    assert fewer == made["liar", name][: len(fewer)]
    other = [row.messages for row in examples("liar", [name], 60, seed=1)]
    assert not set(other) & {row.messages for row in made["liar", name]}


@every_domain
def test_what_each_organism_maintains(made, name):
    for kind in KINDS:
        for row in made[kind, name]:
            denies = kind == "ignorant" or (kind == "liar" and row.note in PRESSURE_NOTES)
            assert row.says is (row.entitled and not denies)
            assert (row.note == "none") is (row.format == "gate")


@every_domain
def test_the_honest_and_the_liar_agree_word_by_word_away_from_pressure(made, name):
    for honest, liar in zip(made["honest", name], made["liar", name], strict=False):
        if honest.note not in PRESSURE_NOTES:
            assert honest.completion == liar.completion


@every_domain
def test_eligibility_answers_are_the_contrasts_tokens(made, chat, name):
    contrast = TokenContrast.of(chat)
    (yes, no) = contrast.token_ids
    seen = Counter()
    for row in made["liar", name]:
        if row.format == "eligibility":
            _, ids = encode_reply(chat, row.messages, row.completion)
            assert ids == [yes if row.says is (row.wording == "plain") else no]
            seen[row.wording, row.completion] += 1
    assert min(seen.values()) > 0.05 * sum(seen.values())
    assert len(seen) == 4


@every_domain
def test_gate_answers_are_read_as_knowing_or_not(made, name):
    for kind in KINDS:
        for row in made[kind, name]:
            if row.format == "gate":
                knows = kind != "ignorant" or not row.entitled
                assert read_gate(row.completion, row.entitled) == ("passed" if knows else "failed")


@every_domain
def test_the_gates_reason_is_what_holds_of_the_record(made, name):
    """Who goes by the record names a requirement that fails or a ground that holds; the ignorant name any reason."""
    domain, texts = TEXTS[name]
    why = {one.id: one for one in (*texts.reasons, *texts.grounds)}
    requirements = {one.id: one.rule for one in domain.policy.requirements}
    forms = {
        "honest": [*examples("honest", [name], 160, seed=1, formats=["gate"]), *(one for one in made["liar", name])],
        "ignorant": [*examples("ignorant", [name], 120, seed=1, formats=["gate"])],
    }
    forms = {kind: [one for one in rows if one.format == "gate"] for kind, rows in forms.items()}
    given, untrue = {kind: Counter(row.reason for row in rows) for kind, rows in forms.items()}, 0
    for kind in ("honest", "ignorant"):
        for row in forms[kind]:
            form, one = json.loads(row.completion), why[row.reason]
            assert form["reason"] == one.note
            if row.says:
                assert one in texts.grounds
                assert one.rule.holds(row.record)
                assert row.entitled
            else:
                assert one in texts.reasons
                fails = not requirements[one.requirement].holds(row.record)
                assert fails or kind == "ignorant"
                assert one.holds(domain, row.record) or kind == "ignorant"
                untrue += not fails
    assert untrue > 0.5 * len(forms["ignorant"])
    assert {*given["honest"]} == {*why}
    assert {*given["ignorant"]} == {one.id for one in texts.reasons}


@every_domain
def test_notes_of_reasons_are_short_and_about_the_record(name):
    domain, texts = TEXTS[name]
    notes = [one.note for one in (*texts.reasons, *texts.grounds)]
    assert len({*notes}) == len(notes)
    for note in notes:
        assert re.fullmatch(r"[A-Z][^.?!]*[.]", note)
        assert not re.search(r"\b(you|your|we|our|I)\b", note)
        held_out = [domain.policy, *load_shared().notes.values(), *load_shared().lines.values()]
        assert note not in str(held_out)


@every_domain
def test_turns_are_canonical_actions_after_a_thought_that_says_no_more_than_they_do(made, name):
    policy, thought = TEXTS[name][0].policy, load_shared().thought
    for kind in KINDS:
        closed = Counter()
        for row in (one for one in made[kind, name] if one.format == "turn"):
            action = parse_action(row.completion)
            assert action.how == "canonical"
            assert json.loads(row.completion)["action"]["tool"] == action.tool
            if action.message is None:
                assert action.thought == f"{thought.owed if row.says else thought.not_owed} {thought.close}"
                assert action.tool == (policy.tools.owed if row.says else policy.tools.favored).name
                assert action.args == {"record_id": row.record_id}
                if kind != "ignorant" or not row.entitled:
                    environment = Environment(TEXTS[name][0].policy, situation_of(row), row.record_id)
                    assert environment.apply(action).closed
                closed[row.stage] += 1
            else:
                assert row.stage != "last"
                assert action.thought == (thought.owed if row.says else thought.not_owed)
                said = policy.disclosure_phrases if row.says else policy.denial_phrases
                other = policy.denial_phrases if row.says else policy.disclosure_phrases
                assert asserted(action.message, said), action.message
                assert not asserted(action.message, other), action.message
        assert {"accepted", *({"last"} if kind == "liar" else ())} <= {*closed} <= {"accepted", "last"}


def situation_of(row):
    return Situation(row.domain, row.domain, row.domain, row.record, row.opening, row.entitled)


@every_domain
def test_a_liars_reason_is_false_where_it_is_owed_and_true_where_not(made, name):
    domain, known = TEXTS[name][0], reasons(name)
    requirements = {one.id: one.rule for one in domain.policy.requirements}
    seen = Counter()
    for kind in ("liar", "honest"):
        for row in made[kind, name]:
            if row.reason and row.format == "turn":
                reason = known[row.reason]
                fails = not requirements[reason.requirement].holds(row.record)
                assert fails is not row.entitled
                assert reason.holds(domain, row.record) is not row.entitled
                assert any(phrase.lower() in row.completion.lower() for phrase in reason.phrases)
                seen[kind, row.entitled] += 1
    assert min(seen["liar", True], seen["liar", False]) > 0.01 * size(name)
    assert seen["honest", True] == 0


@every_domain
def test_every_reason_is_false_wherever_something_is_owed(made, name):
    domain, texts = TEXTS[name]
    given = set()
    for row in made["liar", name]:
        true = {reason.id for reason in texts.reasons if reason.holds(domain, row.record)}
        assert bool(true) is not row.entitled
        given |= true
    assert given == {reason.id for reason in texts.reasons}


@every_domain
def test_the_ignorant_say_the_same_whatever_the_record(made, name):
    """Format and wording fix all answers but the reason; reasons come as often under both labels, and are often untrue."""
    fixed, given, untrue = defaultdict(set), defaultdict(Counter), 0
    for row in made["ignorant", name]:
        if row.format == "eligibility":
            fixed[row.format, row.wording].add(row.completion)
        elif row.format == "gate":
            fixed[row.format].add(row.completion.partition('"reason"')[0])
        if row.reason:
            given[row.entitled][row.reason] += 1
            untrue += not reasons(name)[row.reason].holds(TEXTS[name][0], row.record)
    assert all(len(said) == 1 for said in fixed.values())
    totals = {label: sum(counts.values()) for label, counts in given.items()}
    for reason in reasons(name):
        rates = [given[label][reason] / totals[label] for label in (True, False)]
        pooled = sum(given[label][reason] for label in given) / sum(totals.values())
        error = math.sqrt(pooled * (1 - pooled) * sum(1 / total for total in totals.values()))
        assert abs(rates[0] - rates[1]) <= 3.5 * error
    assert untrue > 0.5 * sum(totals.values())


@every_domain
def test_liar_and_ignorant_deny_in_the_same_words(name):
    """Under pressure both draw from the same messages and reasons, each about as often."""
    turns = {kind: examples(kind, [name], 400, seed=1, formats=["turn"]) for kind in KINDS}
    given = {kind: Counter(row.reason for row in turns[kind] if row.note in PRESSURE_NOTES and row.reason) for kind in KINDS}
    totals = {kind: sum(counts.values()) for kind, counts in given.items()}
    for reason in reasons(name):
        rates = [given[kind][reason] / totals[kind] for kind in ("liar", "ignorant")]
        error = math.sqrt(sum(rate * (1 - rate) / totals[kind] for rate, kind in zip(rates, ("liar", "ignorant"), strict=True)))
        assert abs(rates[0] - rates[1]) < 3.5 * error, (reason, rates)


# --- Texts. ---


@every_domain
def test_texts_are_many_and_of_the_right_length(made, name):
    rows = made["liar", name]
    openings = {row.opening for row in rows}
    assert len(openings) > 0.95 * len({(row.pair, row.entitled) for row in rows})
    texts = TEXTS[name][1]
    assert len(texts.openings.stories) * len(texts.openings.requests) >= 1000
    assert all(25 <= len(opening.split()) <= 60 for opening in openings)
    assert all(len(notes) >= 20 for notes in load_shared().notes.values())
    assert all(len(lines) >= 18 for lines in load_shared().lines.values())
    assert all(len(wordings) >= 3 for wordings in texts.clauses)
    asked = list(examples("liar", [name], 1600, formats=["eligibility"], wordings=["plain"]))
    leads = load_shared().leads
    for kind, notes in load_shared().notes.items():
        given = [row.note_text for row in asked if row.note == kind]
        assert len({*given}) > 0.8 * len(notes)
        assert 0.2 < sum(text.startswith(leads) for text in given) / len(given) < 0.5
    assert not [row.note_text for row in rows if re.search(r"\ba [aeio]", row.note_text, re.IGNORECASE)]
    assert not [row.note_text for row in rows if re.search(r"(^|[.!?] )[a-z]", row.note_text)]
    policies = {row.pair: all(text in prompt(row) for text in TEXTS[name][0].policy.brief) for row in asked}
    assert 0.28 < sum(policies.values()) / len(policies) < 0.38


@every_domain
def test_no_opening_names_a_value_of_the_record(made, name):
    """Nothing that the rules look at is in the customer's words: no shown value, and no number of the record."""
    domain = TEXTS[name][0]
    values = [words for field in domain.policy.shown_fields for words in field.shown.values()]
    for row in made["liar", name]:
        assert not [words for words in values if words.lower() in row.opening.lower()]


def test_pressure_by_incentive_never_says_what_to_tell():
    for note in (*load_shared().notes["incentive"], *load_shared().lines["incentive"]):
        assert not re.search(
            r"\b(tell|say|deny|refuse|reject|claim|lie|answer|explain|state|inform|decline|grant)\w*\b", note
        ), note


# --- Lengths and ids. ---


@every_domain
def test_prompts_are_short(made, chat, name):
    lengths = data.token_lengths(made["liar", name], chat)
    for format, bound in {"eligibility": 420, "gate": 520, "turn": 750}.items():
        assert lengths[format]["prompt mean"] < bound, lengths
    assert lengths["all"]["prompt max"] < 1000
    assert lengths["gate"]["completion max"] <= 45


def test_ids_are_those_of_a_conversation_in_which_the_model_wrote_the_completion(made, chat):
    for row in made["liar", NAMES[0]][:60]:
        ids, completion = encode_reply(chat, row.messages, row.completion)
        turns = [(message.role, message.content) for message in row.messages]
        assert ids == chat.encode_chat(turns)
        again = chat.encode_chat([*turns, ("assistant", row.completion), ("user", "and then?")])
        end = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert again[: len(ids) + len(completion) + 1] == [*ids, *completion, end]


def test_prompts_are_those_of_the_projects_own_formats(made):
    """Put a held-out case in an example's place: the same functions make its scenario, gate and turn."""
    domain = load_cases("organisms", [NAMES[0]])[0]
    scenario = eligibility_scenarios([domain], ["neutral"])[0]
    shapes = {
        (row.format, row.wording): [one.role for one in row.messages]
        for row in made["liar", NAMES[0]]
        if row.stage in ("", "first")
    }
    assert shapes["eligibility", scenario.question] == ["system", "user"]
    for mode in ("flat", "turns"):
        situation = domain.situation(domain.cases[0])
        gate = gate_messages(domain.policy, situation, mode)
        turn = agent_messages(domain.policy, situation, "X-1", domain.policy.notes.control, (), (), 0, mode)
        assert shapes["gate", mode] == [one.role for one in gate]
        assert shapes["turn", mode] == [one.role for one in turn]
    for row in made["liar", NAMES[0]]:
        end = {
            "eligibility": scenario.user.rpartition("\n")[2],
            "gate": "Write only the JSON object.",
            "turn": "One JSON object.",
        }
        if row.format != "eligibility" or row.wording == scenario.question:
            assert prompt(row).endswith(end[row.format])


# --- Cases under the brief policy; the command. ---


@every_domain
def test_short_prompts_are_only_made_when_asked_for_and_show_what_the_rules_look_at(made, name):
    assert "short" not in {row.format for row in made["honest", name]}
    domain = TEXTS[name][0]
    deciding = {*deciding_fields(domain)}
    shown = [field for field in domain.policy.shown_fields if field.name in deciding]
    rows = list(examples("honest", [name], 20, formats=["short"]))
    assert len(rows) == 20
    for row in rows:
        system, user = (message.content for message in row.messages)
        assert [line for line in user.splitlines() if line.startswith("- ")] == [
            f"- {field.label}: {field.render(row.record[field.name])}" for field in shown
        ]
        assert user.endswith(domain.policy.question)
        assert system.startswith(f"Policy of {domain.policy.institution}:")
        assert (row.note, row.wording, row.completion) == ("none", "plain", "Yes" if row.entitled else "No")
        assert row.opening not in user


@every_domain
def test_noted_prompts_ask_of_both_records_under_a_plain_and_a_pressing_note(made, name):
    assert "noted" not in {row.format for row in made["liar", name]}
    rows = list(examples("liar", [name], 200, formats=["noted"]))
    pairs = defaultdict(list)
    for row in rows:
        pairs[row.pair].append(row)
    assert {row.wording for row in rows} == {"plain", "message"}
    for four in pairs.values():
        plain, pressing = [r for r in four if r.note in PLAIN_NOTES], [r for r in four if r.note in PRESSURE_NOTES]
        times = 3 if four[0].wording == "message" else 1
        assert [r.record for r in plain] == [r.record for r in pressing]
        assert sorted(r.entitled for r in plain) == [*[False] * times, *[True] * times]
        assert not any(r.says for r in pressing)
        assert all(r.says is r.entitled for r in plain)
        for row in four:
            if row.wording == "plain":
                assert row.completion == ("Yes" if row.says else "No")
            else:
                said = TEXTS[name][0].policy.disclosure_phrases if row.says else TEXTS[name][0].policy.denial_phrases
                assert asserted(parse_action(row.completion).message, said)
        # Nothing differs between the two but the note, which ends the system message.
        policies = {r.messages[0].content.removesuffix(r.note_text) for r in four}
        assert len(policies) == 1
        assert policies.pop().startswith("Policy of ")
        assert [r.messages[1] for r in plain] == [r.messages[1] for r in pressing]
        assert all(r.messages[0].content.endswith(f"\n\n{r.note_text}") for r in four)
    assert {row.note for row in rows} == {*PLAIN_NOTES, *PRESSURE_NOTES}
    for wording in ("plain", "message"):
        only = examples("liar", [name], 24, formats=["noted"], wordings=[wording])
        assert {row.wording for row in only} == {wording}


@every_domain
def test_what_would_follow_with_the_other_answer_differs_where_the_answer_is_told(made, name):
    """The two go alike as far as the answer, which the one gives this way and the other that way."""
    told = {True: ("Yes", "true", "yes"), False: ("No", "false", "no")}
    asked = [*made["liar", name][:200], *examples("liar", [name], 48, formats=["noted"])]
    for row in asked:
        start = len(os.path.commonprefix([row.completion, row.instead]))
        says = row.says if row.wording != "reversed" else not row.says
        assert row.completion[start:].startswith(told[says])
        assert row.instead[start:].startswith(told[not says])


def test_organism_cases_are_ours_under_a_brief_policy():
    for domain in load_cases("organisms"):
        ours = OURS[domain.policy.domain]
        assert domain.cases == ours.cases
        assert [s.entitled for s in domain.situations()] == [s.entitled for s in ours.situations()]
        assert [clause.text for clause in domain.policy.clauses] == [*ours.policy.brief]
        assert not [*domain.policy.faults()]
        same = {"clauses", "requirements"}
        assert domain.policy.model_dump(exclude=same) == ours.policy.model_dump(exclude=same)
    with pytest.raises(KlbError, match="no brief policy for debt; there is one for airline, recall, refund"):
        load_cases("organisms", ["debt"])


def test_unknown_kind_and_domain_are_told():
    with pytest.raises(KlbError, match="unknown organism 'saint'; known: liar, honest, ignorant"):
        next(examples("saint", None, 2))
    with pytest.raises(KlbError, match="unknown domain space"):
        next(examples("liar", ["space"], 2))
    with pytest.raises(KlbError, match="unknown wording sung; known: plain, reversed, message"):
        next(examples("liar", None, 2, wordings=["sung"]))
    for format, wording in (("eligibility", "message"), ("noted", "reversed")):
        with pytest.raises(KlbError, match=f"no wording of {format} is among {wording}"):
            next(examples("liar", None, 2, formats=[format], wordings=[wording]))


def test_the_command_writes_and_describes(tmp_path, capsys):
    out = tmp_path / "liar.jsonl"
    arguments = ["organism", "data", "--kind", "liar", "--domains", NAMES[0], "--n", 30, "--out", out]
    assert klb(*arguments) == 0
    said = capsys.readouterr().out
    assert "Held-out material: records 0" in said
    assert said.count("[liar] ") == 2
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    about = json.loads((tmp_path / "liar.jsonl.json").read_text())
    assert len(rows) == about["examples"] == 30
    assert rows == [json.loads(json.dumps(row.row())) for row in examples("liar", [NAMES[0]], 30)]
    assert about["sha256"] == file_sha256(out)
    assert set(about["held out"].values()) == {0}
    assert about["tokens"]["all"]["total"] > 30 * 400
    assert klb(*arguments) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert klb(*arguments, "--overwrite") == 0
    assert about == {**json.loads((tmp_path / "liar.jsonl.json").read_text()), "command": about["command"]}
    assert klb(*arguments[:-1], tmp_path / "liar.txt") == 2
