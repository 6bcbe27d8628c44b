"""Reading the rounds of a run's files: turns from the sidecars, checked to be the model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from klb_probe.cases.load import Domain
from klb_probe.dialogue.sidecar import read_turns, sidecar_path
from klb_probe.dialogue.trajectory import Row, Trajectories
from klb_probe.dialogue.walk import trajectory_of
from klb_probe.errors import KlbError
from klb_probe.lens.margin import Lens
from klb_probe.models.residual_model import ResidualModel
from klb_probe.signals.replay import replay_rounds
from klb_probe.signals.rounds import prefixes_for, round_signals
from klb_probe.signals.signals_file import SignalsWriter

Turns = list[dict[str, Any]]


def closing_tools(domain: Domain) -> tuple[str, str]:
    """Names of the tools that end a case of the domain."""
    return domain.policy.tools.owed.name, domain.policy.tools.favored.name


def check_same_model(file: Trajectories, model: ResidualModel) -> None:
    """Raise KlbError unless the run's agent was this very model: its ids mean nothing to another."""
    player = (file.run_meta.get("agent") or {}).get("player") or {}
    if player.get("fingerprint") != model.fingerprint:
        name = (file.run_meta.get("agent") or {}).get("model")
        raise KlbError(f"{file.path}: its token ids are of {name}, not of {model.name}; pass that --model, or --replay")


def sidecar_rounds(file: Trajectories) -> Iterator[tuple[Row, Turns]]:
    """Every round of a file with its turns, in the sidecar's order.

    Raises KlbError if there is no sidecar, or if its rounds are not the file's.
    """
    path = sidecar_path(file.path)
    if not path.exists():
        raise KlbError(f"{path}: no such file: the agent had no token ids (endpoint or scripted); pass --replay")
    rows = {(trajectory_of(row), row["round"]): row for row in file.rows}
    for key, turns in groupby(read_turns(path), key=lambda turn: (turn["trajectory"], turn["round"])):
        if key not in rows:
            raise KlbError(f"{path}: round {key[1]} of {key[0]} is not in {file.path.name}")
        yield rows.pop(key), list(turns)
    left = [row for row in rows.values() if not row.get("error")]
    if left:
        raise KlbError(f"{path} lacks {len(left)} rounds, the first: {left[0]['case']} of {trajectory_of(left[0])}")


def replayed_rounds(
    file: Trajectories, domain: Domain, model: ResidualModel, writer: SignalsWriter
) -> Iterator[tuple[Row, Turns]]:
    """Every round of a file that can be rebuilt, with its turns; the others are told to the writer."""
    for one in replay_rounds(file, [domain], model):
        if one.why_not:
            writer.skip(one.row, one.why_not)
        else:
            yield one.row, list(one.turns)


def read_rounds(
    model: ResidualModel,
    lenses: Sequence[Lens],
    rounds: Iterator[tuple[Row, Turns]],
    tools: tuple[str, str],
    writer: SignalsWriter,
    on_round: Callable[[Row], None] = lambda _: None,
) -> None:
    """Read rounds one by one into a signals file."""
    kept = prefixes_for(model)
    for row, turns in rounds:
        writer.add(row, round_signals(model, lenses, turns, row, tools, kept))
        on_round(row)
