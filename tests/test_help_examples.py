"""Help: every command has an example, it can be typed, and those that need no model run in the order of the reference."""

from __future__ import annotations

import pytest
from command import klb
from doc_commands import hook, parse, words_of

MODULE = hook()
COMMANDS = dict(MODULE.commands())
# Beginnings of examples that need no model.
CHEAP = ("cases", "score", "merge", "organism cases", "run --agent scripted:", "models check smollm2-135m --no-weights")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_can_be_typed(name):
    examples = MODULE.examples(COMMANDS[name])
    assert examples, f"{name} --help has no example"
    for line in examples:
        parse(line)
    group = name.removeprefix("klb-probe").strip()
    own = [line for line in examples if " ".join(words_of(line)).startswith(group)]
    assert own, f"{name}: its example is of another command"


def test_examples_without_a_model_run_as_typed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = dict.fromkeys(line for command in COMMANDS.values() for line in MODULE.examples(command))
    cheap = [line for line in lines if " ".join(words_of(line)).startswith(CHEAP)]
    assert len(cheap) >= 8
    # A merge's example makes its own shards; score reads what the example of run wrote.
    for line in cheap:
        assert klb(*words_of(line)) == 0, f"{line}\n{capsys.readouterr().err}"


def test_the_page_of_commands_is_made_of_the_help():
    reference = MODULE.reference()
    for name, command in COMMANDS.items():
        assert f"## {name}\n" in reference
        for option in command.params:
            if option.param_type_name == "option" and "completion" not in option.name:
                assert option.opts[0] in reference
    assert MODULE.on_page_markdown(f"a\n{MODULE.MARKER}\n").startswith("a\n## klb-probe\n")
    assert MODULE.on_page_markdown("no marker") == "no marker"
