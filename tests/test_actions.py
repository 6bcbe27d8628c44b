"""The action parser reads every form models write, says which it was, and never raises."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from klb_probe.dialogue.actions import parse_action

REFUND = {"order_id": "A-17", "amount": 40}
CANONICAL = json.dumps({"thought": "She is owed it.", "action": {"tool": "issue_refund", "args": REFUND}})
HELLO = 'Hello, {you} said "no"?\nLet\'s see.'


def reply(**keys):
    return json.dumps(keys)


@pytest.mark.parametrize(
    ("raw", "how"),
    [
        (CANONICAL, "canonical"),
        (json.dumps(json.loads(CANONICAL), indent=2), "canonical"),
        (reply(Thought="She is owed it.", Action={"Tool": "issue_refund", "Args": REFUND}), "canonical"),
        (reply(thought="She is owed it.", action={"tool": "issue_refund", "args": json.dumps(REFUND)}), "canonical"),
        (reply(thought="She is owed it.", action={"tool": "issue_refund", **REFUND}), "canonical"),
        (reply(thought="She is owed it.", action={"tool": "issue_refund"}, args=REFUND), "canonical"),
        (reply(thought="She is owed it.", action={"name": "issue_refund", "arguments": REFUND}), "canonical"),
        (reply(thought="She is owed it.", action={"type": "issue_refund", "args": REFUND}), "canonical"),
        (reply(thought="She is owed it.", action=[{"tool": "issue_refund", "args": REFUND}, {"tool": "x"}]), "canonical"),
        (reply(thought="She is owed it.", action={"issue_refund": REFUND}), "tool_key"),
        (reply(thought="She is owed it.", action={"issue_refund": REFUND, "close": {}}), "tool_key"),
        (reply(thought="She is owed it.", issue_refund=REFUND), "top_level_key"),
        (reply(thought="She is owed it.", tool="issue_refund", args=REFUND), "top_level_tool"),
        (reply(thought="She is owed it.", tool="issue_refund", **REFUND), "top_level_tool"),
        (reply(thought="She is owed it.", type="function", name="issue_refund", parameters=REFUND), "top_level_tool"),
        (reply(thought="She is owed it.", action="issue_refund", args=REFUND), "action_string"),
        (reply(thought="She is owed it.", action="issue_refund", **REFUND), "action_string"),
        (f"```json\n{CANONICAL}\n```", "fenced+canonical"),
        (f"```\n{CANONICAL}", "fenced+canonical"),
        (f"Here is my action:\n```json\n{CANONICAL}\n```", "surrounded+canonical"),
        (f"{CANONICAL}\n\nI hope that helps!", "surrounded+canonical"),
        (f"I, {{agent}}, act: {CANONICAL}", "surrounded+canonical"),
        (f"{CANONICAL}\n{reply(thought='b', action={'tool': 'x'})}", "surrounded+canonical"),
        (f'{{"eligible": true}}\n{CANONICAL}', "surrounded+canonical"),
        (f"[{CANONICAL}]", "surrounded+canonical"),
        (CANONICAL[:-1], "repaired+canonical"),
        (CANONICAL[:-2], "repaired+canonical"),
        (CANONICAL.replace("}}}", ",}}}"), "repaired+canonical"),
        (CANONICAL.replace('"', "'"), "repaired+canonical"),
        (CANONICAL.replace('", "action', '" "action'), "repaired+canonical"),
        (f"```json\n{CANONICAL[:-1]}\n```", "repaired+canonical"),
        (CANONICAL.replace("args", "Args").replace("thought", "THOUGHT"), "canonical"),
    ],
)
def test_every_form_of_one_action_reads_the_same(raw, how):
    action = parse_action(raw)
    assert (action.thought, action.tool, action.args) == ("She is owed it.", "issue_refund", REFUND)
    assert (action.how, action.raw, action.message) == (how, raw, None)


@pytest.mark.parametrize(
    ("raw", "how"),
    [
        (reply(action={"tool": "send_message", "args": {"text": HELLO}}), "canonical"),
        (reply(action={"tool": "send_message", "args": {"message": HELLO, "to": 1}}), "canonical"),
        (reply(action={"tool": "send_message", "args": {"content": HELLO}}), "canonical"),
        (reply(action={"tool": "send_message", "args": {"reply": HELLO, "tone": "warm"}}), "canonical"),
        (reply(action={"tool": "send_message", "args": {"body": HELLO}}), "canonical"),
        (reply(action={"tool": "send_message", "args": HELLO}), "canonical"),
        (reply(action={"tool": "send_message", "text": HELLO}), "canonical"),
        (reply(action={"tool": "send_message"}, message=HELLO), "canonical"),
        ('{"action": {"tool": "send_message", "args": {"text": ' + json.dumps(HELLO).replace("\\n", "\n") + "}}}", "canonical"),
        (reply(action={"send_message": HELLO}), "tool_key"),
        (reply(action={"send_message": {"text": HELLO}}), "tool_key"),
        (reply(action={"reply": HELLO}), "tool_key"),
        (reply(send_message={"text": HELLO}), "top_level_key"),
        (reply(tool="send_message", args=HELLO), "top_level_tool"),
        (reply(action="send_message", text=HELLO), "action_string"),
        (reply(action=HELLO), "action_string"),
        (reply(thought="", message=HELLO), "top_level_message"),
        (reply(action=None, content=HELLO), "top_level_message"),
        (reply(name="Bob", message=HELLO), "top_level_message"),
        (HELLO, "plain_text"),
        (f"\n {HELLO} ", "plain_text"),
    ],
)
def test_a_message_is_found_wherever_it_is_put(raw, how):
    action = parse_action(raw)
    assert (action.tool, action.args, action.message, action.how) == ("send_message", {"text": HELLO}, HELLO, how)


@pytest.mark.parametrize(
    ("args", "read"),
    [(None, {}), ("", {}), (3, {}), ([1], {}), ("A-17", {"text": "A-17"}), ("{'a': 1", {"a": 1}), ({}, {})],
)
def test_arguments_that_are_no_object(args, read):
    assert parse_action(reply(action={"tool": "issue_refund", "args": args})).args == read
    assert parse_action(reply(action={"issue_refund": args})).args == read


@pytest.mark.parametrize("args", [{}, {"text": None}, {"a": "two", "b": "strings"}, {"n": 1}])
def test_a_message_without_words_is_empty(args):
    assert parse_action(reply(action={"tool": "send_message", "args": args})).message == ""


@pytest.mark.parametrize("name", ["no_such_tool", "issue refund", "Refund"])
def test_unknown_tools_keep_their_names(name):
    assert parse_action(reply(action={"tool": name, "args": {}})).tool == name


@pytest.mark.parametrize(
    "raw", [reply(thought="I shall deny."), reply(thought="I shall deny.", action={}), '{"thought": "I sh']
)
def test_a_thought_alone_is_never_told_to_the_customer(raw):
    action = parse_action(raw)
    assert action.message == ""
    assert action.how.endswith("no_action")
    assert action.thought.startswith("I sh")


@pytest.mark.parametrize(
    "raw",
    ["Use code {SAVE10} now.", "null", "[]", "{}", "{", '{"eligible": true}', '{"options": [{"tool": "x"}]}', "", "{{x}} ok"],
)
def test_json_and_braces_that_hold_no_action_are_words(raw):
    action = parse_action(raw)
    assert (action.message, action.how) == (raw, "plain_text")


def test_an_action_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_action(CANONICAL).tool = "other"


@pytest.mark.parametrize(
    "raw",
    [
        '{"a":' * 20000,
        "[" * 50000,
        "{" * 50000,
        '{"action":{"tool":' * 300,
        '{"a": ' + "9" * 10000 + "}",
        '{"action": {"tool": "send_message", "args": {"text": "\\ud83d"}}}',
        "\ud800{\x00\x85\u2028",
        '{"": {"": ""}}',
        '{"action": {"": {}}}',
        '{"action": {"tool": {"tool": "x"}}}',
        '{"action": NaN, "tool": Infinity}',
    ],
    ids=lambda raw: ascii(raw[:12]),
)
def test_hostile_text_is_read_without_raising(raw):
    action = parse_action(raw)
    assert isinstance(action.tool, str)
    assert isinstance(action.args, dict)


def test_nothing_a_model_could_write_makes_it_raise():
    rng = random.Random(0)
    pieces = [
        CANONICAL,
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        ":",
        ",",
        "\\",
        "\n",
        "```json",
        "```",
        "null",
        "true",
        "1e999",
        "é",
        "\ud83d",
    ]
    pieces += ['"action"', '"tool"', '"args"', '"thought"', '"send_message"', '"text"', " ", "// no", "“", "<think>"]
    for _ in range(1500):
        if rng.random() < 0.5:  # cut, drop and swap characters of a good reply
            characters = list(CANONICAL)
            for _ in range(rng.randint(1, 8)):
                position = rng.randrange(len(characters))
                characters[position : position + rng.randint(0, 9)] = rng.choice(pieces)
            raw = "".join(characters)
        else:
            raw = "".join(rng.choices(pieces, k=rng.randint(0, 30)))
        action = parse_action(raw)
        assert isinstance(action.tool, str)
        assert isinstance(action.args, dict)
        assert isinstance(action.thought, str)
        assert action.raw == raw
        if action.tool == "send_message":
            assert list(action.args) == ["text"]
            assert isinstance(action.message, str)
