"""What a terminal, a pipe and a shell get: nothing cut off, no control characters in logs, colours if wanted, exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import typer
from command import klb
from rich.table import Table

from klb_probe import cli
from klb_probe.console import page, print_tables
from klb_probe.files import safe_name, write_text

NARROW = (40, 80)
COLOUR = re.compile(r"\x1b\[(\d+;)*(3[0-8]|4[0-8]|9[0-7]|10[0-7])(;\d+)*m")
STYLE = re.compile(r"\x1b\[[\d;]*m")
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")


@pytest.fixture(scope="module")
def liar(tmp_path_factory):
    """A few scripted rounds."""
    folder = tmp_path_factory.mktemp("runs") / "liar"
    few = ["--domains", "airline", "--conditions", "emergent", "--trust", "medium", "--per-kind", 2]
    assert klb("run", "--agent", "scripted:deceptive", *few, "--out", folder) == 0
    return folder


@pytest.fixture
def terminal(monkeypatch):
    """Makes the next commands believe in a terminal of so many columns."""

    def of(columns: int) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(columns))

    return of


def wide_table() -> Table:
    """Columns that may wrap and columns that may not."""
    table = Table("name", "kept", box=None)
    table.add_column("numbers", no_wrap=True)
    for number in range(3):
        table.add_row("some words that wrap", f"-0.3{number} [-0.34, -0.31]", " ".join(f"{number}.{i:04d}" for i in range(12)))
    return table


@pytest.mark.parametrize("columns", [20, *NARROW, 200])
def test_a_table_keeps_every_number_whole_at_any_width(columns, capsys, terminal):
    terminal(columns)
    print_tables(page(columns), wide_table())
    shown = capsys.readouterr().out
    assert "…" not in shown
    for row in range(3):
        assert f"-0.3{row}" in shown
        assert all(f"{row}.{i:04d}" in shown for i in range(12))


def test_commands_hide_no_number_on_a_narrow_terminal(liar, capsys, terminal):
    numbers = {}
    for columns in (40, 300):
        terminal(columns)
        assert klb("score", liar, "--overwrite") == 0
        assert klb("cases", "list", "--domains", "airline") == 0
        shown = capsys.readouterr().out
        assert "…" not in shown
        numbers[columns] = sorted(NUMBER.findall(STYLE.sub("", shown)))
    assert len(numbers[300]) > 20
    assert numbers[40] == numbers[300]


@pytest.mark.parametrize("columns", NARROW)
@pytest.mark.parametrize("command", ["jlens", "organism train", "fit merge", "models check", "cases"])
def test_help_cuts_off_no_option_on_a_narrow_terminal(command, columns, capsys, terminal, monkeypatch):
    monkeypatch.setattr(cli.app, "rich_markup_mode", "rich")
    terminal(columns)
    klb(*command.split(), "--help")
    shown = STYLE.sub("", capsys.readouterr().out)
    assert "…" not in shown
    assert "--help" in shown
    options = {name for parameter in command_of(command).params for name in parameter.opts if name.startswith("--")}
    assert not {name for name in options if name not in shown}


def command_of(words: str):
    """The command object behind some words."""
    command = typer.main.get_command(cli.app)
    for word in words.split():
        command = command.commands[word]
    return command


def test_a_pipe_gets_plain_lines(liar, capsys, monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for command in (
        [
            "run",
            "--agent",
            "scripted:honest",
            "--domains",
            "airline",
            "--trust",
            "low",
            "--per-kind",
            1,
            "--out",
            liar.parent / "x",
        ],
        ["score", liar, "--overwrite"],
        ["cases", "list"],
        ["cases", "show", "airline/other-airport"],
        ["doctor"],
        ["jlens", "--help"],
        ["jlens", "--modle", "x"],
    ):
        klb(*command)
        captured = capsys.readouterr()
        assert not CONTROL.search(captured.out + captured.err), command


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals of this kind")
@pytest.mark.parametrize("no_color", [True, False])
@pytest.mark.parametrize("command", ["--help", "cases lst"])
def test_no_color_is_respected_on_a_terminal(command, no_color):
    import pty

    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100", **({"NO_COLOR": "1"} if no_color else {})}
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "klb_probe", *command.split()]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # Linux says so when the other end is closed
                break
            if not part:
                break
            shown += part
        process.wait(timeout=60)
    os.close(ours)
    assert "Usage:" in STYLE.sub("", shown.decode())
    assert bool(COLOUR.search(shown.decode())) is not no_color


@pytest.mark.parametrize(
    ("typed", "offered", "not_offered"),
    [
        ("klb-probe ca", {"cases"}, {"run", "score"}),
        ("klb-probe cases sh", {"show"}, {"list"}),
        ("klb-probe jlens --fra", {"--framings"}, {"--model"}),
    ],
)
def test_a_shell_completes_a_prefix(typed, offered, not_offered, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # as the installed script, not python -m
    monkeypatch.setenv("_KLB_PROBE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    klb()
    words = set(capsys.readouterr().out.split())
    assert offered <= words
    assert not not_offered & words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_completion_of_each_shell_calls_the_command(shell, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)
    monkeypatch.setenv("_KLB_PROBE_COMPLETE", f"source_{shell}")
    klb()
    assert "_KLB_PROBE_COMPLETE" in capsys.readouterr().out


def raising(error: BaseException):
    app = cli.command_app()

    @app.command()
    def fail() -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (cli.KlbError("no such lens; fit one"), 2, "error: no such lens; fit one"),
        (FileNotFoundError(2, "No such file or directory", "runs/x"), 2, "error: runs/x: No such file or directory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 2, "error: out of memory"),
    ],
    ids=["mistake", "file", "Ctrl-C", "memory"],
)
def test_exit_codes_come_with_one_line(error, code, line, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["klb-probe"])
    with pytest.raises(SystemExit) as stop:
        cli.run(raising(error))
    told = capsys.readouterr()
    assert stop.value.code == code
    assert told.err.startswith(line)
    assert told.err.count("\n") == 1
    assert told.out == ""


def test_an_error_nobody_expected_is_not_hidden(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["klb-probe"])
    with pytest.raises(ZeroDivisionError):
        cli.run(raising(ZeroDivisionError()))


def test_version_is_that_of_the_package(capsys):
    from importlib.metadata import version

    assert klb("--version") == 0
    assert capsys.readouterr().out == f"klb-probe {version('klb-probe')}\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("owner/Model_7B.v1", "owner-Model_7B.v1"),
        ("endpoint:m@http://h:1/v1", "endpoint-m-http-h-1-v1"),
        (r"C:\models\x.gguf", "C-models-x.gguf"),
        ("CON", "CON-"),
        ("nul.txt", "nul.txt-"),
        ("..", "unnamed"),
        ("trailing. ", "trailing"),
    ],
)
def test_names_are_file_names_on_every_system(text, name):
    assert safe_name(text) == name


def test_long_names_stay_short_and_apart():
    one, other = (safe_name("m" * 300 + end) for end in "ab")
    assert one != other
    assert len(one) == len(other) <= 60


def test_text_is_written_with_the_same_bytes_everywhere(tmp_path):
    write_text(tmp_path / "x.txt", "a\nÄ\n")
    assert (tmp_path / "x.txt").read_bytes() == "a\nÄ\n".encode()
