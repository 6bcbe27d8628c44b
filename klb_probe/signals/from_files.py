"""Reading the rounds of a run's files: turns from the sidecars, checked to be the model's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from klb_probe.cases.load import Domain
from klb_probe.cases.sources import OURS, load_cases
from klb_probe.dialogue.sidecar import read_turns, sidecar_path
from klb_probe.dialogue.trajectory import Row, Trajectories, read_folder
from klb_probe.dialogue.walk import trajectory_of
from klb_probe.errors import KlbError
from klb_probe.lens.margin import Lens, LogitLens, MarginLens
from klb_probe.models.residual_model import ResidualModel
from klb_probe.progress import progress_bar
from klb_probe.signals.replay import policy_of, replay_rounds
from klb_probe.signals.rounds import prefixes_for, round_signals
from klb_probe.signals.signals_file import Collected, SignalsSink
from klb_probe.signals.spots import KINDS

if TYPE_CHECKING:
    from klb_probe.dialogue.runner import Run

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
    file: Trajectories, domain: Domain, model: ResidualModel, writer: SignalsSink
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
    writer: SignalsSink,
    on_round: Callable[[Row], object] = lambda _: None,
    positions: Collection[str] = KINDS,
) -> None:
    """Read rounds one by one into a signals file; only some kinds of moments, if they are named."""
    kept = prefixes_for(model)
    for row, turns in rounds:
        writer.add(row, round_signals(model, lenses, turns, row, tools, kept, positions))
        on_round(row)


def round_margins(
    model: ResidualModel,
    lens: MarginLens | LogitLens,
    run: Path | Run,
    *,
    cases: str = OURS,
    replay: bool = False,
    positions: Collection[str] = KINDS,
    progress: bool = True,
) -> pd.DataFrame:
    """Margins at the named moments of a run's rounds, as ``klb-probe rounds`` writes them, in memory.

    Args:
        model: The model.
        lens: A margin lens (its logit-lens twin is read beside it) or a logit lens.
        run: A run's folder, or what ``run_dialogues`` gave.
        cases: Where the run's cases came from.
        replay: Rebuild the prompts from the transcripts instead of taking the stored token ids.
        positions: Moments to read, all by default; see :mod:`klb_probe.signals.spots`. Fewer take less time.
        progress: Show a bar, in a terminal or a notebook.

    Returns:
        The columns of signals.parquet. ``attrs`` holds ``model``, ``policy`` (on: the model wrote these words; off: another
        did; mixed) and ``unmapped``, the moments that could not be found.

    Examples:
        >>> from pathlib import Path
        >>> asked = {"domains": ["airline"], "conditions": ["emergent"], "trusts": ["high"], "cases_of_each_kind": 1}
        >>> run = klb.run_dialogues("scripted:deceptive", Path("outputs/two"), **asked)
        >>> logit = klb.LogitLens.of(small, klb.TokenContrast.of(small.chat))
        >>> marks = klb.round_margins(small, logit, run, replay=True)
        >>> sorted(set(marks["position"]))
        ['action', 'before_reply', 'claim', 'gate', 'reply_last', 'reply_mean']
    """
    if unknown := [name for name in positions if name not in KINDS]:
        raise KlbError(f"unknown position {', '.join(unknown)}; known: {', '.join(KINDS)}")
    files = read_folder(Path(run if isinstance(run, (str, Path)) else run.folder))
    domains = {one.policy.domain: one for one in load_cases(cases, [file.run_meta["domain"] for file in files])}
    lenses: list[Lens] = [lens, LogitLens.of(model, lens.contrast)] if isinstance(lens, MarginLens) else [lens]
    collected = Collected()
    with progress_bar(sum(len(file.rows) for file in files), "reading", "round", shown=progress) as bar:
        for file in files:
            domain = domains[file.run_meta["domain"]]
            if not replay:
                check_same_model(file, model)
            found = replayed_rounds(file, domain, model, collected) if replay else sidecar_rounds(file)
            read_rounds(model, lenses, found, closing_tools(domain), collected, lambda _: bar.update(), positions)
    policies = {policy_of(file.run_meta, model) for file in files} if replay else {"on"}
    frame = pd.DataFrame(collected.lines)
    frame.attrs["model"] = model.identity
    frame.attrs["policy"] = policies.pop() if len(policies) == 1 else "mixed"
    frame.attrs["unmapped"] = collected.unmapped
    return frame
