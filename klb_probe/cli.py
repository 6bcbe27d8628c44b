"""The ``klb-probe`` command. Nothing here imports torch before a command runs."""

from __future__ import annotations

import logging
import shutil
import sys
from typing import Annotated, Any

import typer

from klb_probe.cases_command import cases_app
from klb_probe.contest_command import CONTEST_EXAMPLE, contest
from klb_probe.doctor_command import DOCTOR_EXAMPLE, doctor
from klb_probe.errors import KlbError
from klb_probe.fit import fit_app
from klb_probe.jlens import EXAMPLE, jlens
from klb_probe.lens_command import lens_app
from klb_probe.merge_command import MERGE_EXAMPLE, merge
from klb_probe.models_command import models_app
from klb_probe.organism_command import organism_app
from klb_probe.pair_command import PAIR_EXAMPLE, pair
from klb_probe.probe_command import PROBE_EXAMPLE, probe
from klb_probe.report_command import REPORT_EXAMPLE, report
from klb_probe.rounds_command import ROUNDS_EXAMPLE, rounds
from klb_probe.run_command import EXAMPLE as RUN_EXAMPLE
from klb_probe.run_command import run_dialogues_command
from klb_probe.score_command import SCORE_EXAMPLE, score
from klb_probe.steer_command import STEER_EXAMPLE, steer

# Columns; on a narrower terminal typer's frames cut names off, so that help and errors are plain there.
_FRAMED = 80


def command_app(**settings: Any) -> typer.Typer:
    """A typer app with this project's settings."""
    return typer.Typer(
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,
    )


app = command_app(name="klb-probe", no_args_is_help=True, epilog="Example: klb-probe cases show airline/other-airport")


def _say_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"klb-probe {version('klb-probe')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Look inside open-weight models that know, or do not know, what a customer is owed.

    Exit codes: 0 done, 1 a check failed or an error nobody expected, 2 a mistake that one line explains, 130 Ctrl-C. With
    --debug, after any command, a mistake shows its traceback.
    """


app.command("jlens", epilog=EXAMPLE)(jlens)
app.command("run", epilog=RUN_EXAMPLE)(run_dialogues_command)
app.command("rounds", epilog=ROUNDS_EXAMPLE)(rounds)
app.command("merge", epilog=MERGE_EXAMPLE)(merge)
app.command("score", epilog=SCORE_EXAMPLE)(score)
app.command("pair", epilog=PAIR_EXAMPLE)(pair)
app.command("probe", epilog=PROBE_EXAMPLE)(probe)
app.command("steer", epilog=STEER_EXAMPLE)(steer)
app.command("contest", epilog=CONTEST_EXAMPLE)(contest)
app.command("report", epilog=REPORT_EXAMPLE)(report)
app.command("doctor", epilog=DOCTOR_EXAMPLE)(doctor)
app.add_typer(cases_app, name="cases")
app.add_typer(fit_app, name="fit")
app.add_typer(lens_app, name="lens")
app.add_typer(models_app, name="models")
app.add_typer(organism_app, name="organism")


def main() -> None:
    """Entry point of ``klb-probe``."""
    run(app)


def _told(stop: BaseException) -> bool:
    """Whether the Ctrl-C behind an exit carries a message, which the command has then shown."""
    error: BaseException | None = stop
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None and bool(str(error))


def run(command: typer.Typer) -> None:
    """Run a typer app: a user's mistake is one line on stderr and exit code 2."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("klb_probe").setLevel(logging.INFO)
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    if shutil.get_terminal_size().columns < _FRAMED:
        command.rich_markup_mode = None
    try:
        command()
    except KlbError as error:
        if debug:
            raise
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == 130 and not _told(stop):  # typer's own answer to Ctrl-C, without a word
            typer.echo("interrupted", err=True)
        raise
    except OSError as error:
        if debug:
            raise
        typer.echo(f"error: {error.filename or 'a file'}: {error.strerror or error}", err=True)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        from klb_probe.models.batch_size import is_out_of_memory

        if debug or not is_out_of_memory(error):
            raise
        typer.echo(
            "error: out of memory: lower --batch, pass --dtype bfloat16 or --quantise 4bit, or take a smaller model", err=True
        )
        sys.exit(2)
