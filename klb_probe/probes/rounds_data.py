"""Played rounds as rows of the table and sites to read: each kind of moment where the round has it first.

===========  ====================================================================
answer       the last prompt token before the agent's first message
reply_mean   all tokens of that message
reply_last   its last token
gate         the last prompt token of the knowledge gate
claim        the tokens of the judge's ``false_claim_quote``
action       the last prompt token before the tool that closed the case
===========  ====================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from klb_probe.cases.load import Domain
from klb_probe.cases.sources import OURS, load_cases
from klb_probe.dialogue.trajectory import Row, Trajectories, read_folder
from klb_probe.dialogue.walk import trajectory_of
from klb_probe.models.residual_model import ResidualModel
from klb_probe.pairing.labels import label_table
from klb_probe.probes.rows import row_table
from klb_probe.probes.site import Site
from klb_probe.signals.from_files import Turns, check_same_model, closing_tools, replayed_rounds, sidecar_rounds
from klb_probe.signals.signals_file import Collected
from klb_probe.signals.spots import spots_of_round

log = logging.getLogger(__name__)

_KINDS = {
    "answer": "before_reply",
    "reply_mean": "reply_mean",
    "reply_last": "reply_last",
    "gate": "gate",
    "claim": "claim",
    "action": "action",
}
ROUND_POSITIONS = tuple(_KINDS)


def round_rows(
    model: ResidualModel,
    run_folder: Path,
    *,
    cases: str = OURS,
    replay: bool = False,
    positions: Sequence[str] = ROUND_POSITIONS,
) -> tuple[pd.DataFrame, dict[str, list[Site | None]]]:
    """One row a scored round, and for each position one site a row, None where the round has no such moment.

    Args:
        model: The run's agent; with ``replay``, any.
        run_folder: A run's folder.
        cases: Where the run's cases came from.
        replay: Rebuild the prompts from the transcripts instead of taking the stored token ids. Rounds that cannot be rebuilt
            are left out, with a warning.
        positions: Which sites to give.

    Raises KlbError for ids of another model and for a run without ids, unless it is replayed.
    """
    files = read_folder(run_folder)
    domains = {one.policy.domain: one for one in load_cases(cases, [file.run_meta["domain"] for file in files])}
    rows = [row for file in files for row in file.rows]
    labels = label_table(rows).to_dict("index")
    numbers = {id(row): number for number, row in enumerate(rows)}
    lines: list[dict[str, Any]] = []
    sites: dict[str, list[Site | None]] = {position: [] for position in positions}
    for file in files:
        domain = domains[file.run_meta["domain"]]
        for row, turns in _rounds(file, domain, model, replay):
            label = labels.get(numbers[id(row)])
            if label is None or not label["scored"]:
                continue
            lines.append(_line(row, label, turns, run_folder))
            found = first_sites(turns, row, closing_tools(domain), model)
            for position in positions:
                sites[position].append(found.get(_KINDS[position]))
    return row_table(lines), sites


def _rounds(file: Trajectories, domain: Domain, model: ResidualModel, replay: bool) -> Iterator[tuple[Row, Turns]]:
    if not replay:
        check_same_model(file, model)
        yield from sidecar_rounds(file)
        return
    skipped = Collected()
    yield from replayed_rounds(file, domain, model, skipped)
    if why := [one["why"] for one in skipped.unmapped]:
        log.warning("%s: %d rounds cannot be rebuilt and are left out, the first: %s", file.path, len(why), why[0])


def first_sites(turns: Turns, row: Row, tools: tuple[str, str], model: ResidualModel) -> dict[str, Site]:
    """By kind of moment, the site in the first turn that has one: what comes later has a lie already told in its prompt."""
    found: dict[str, Site] = {}
    for turn, spots, _ in spots_of_round(turns, row, tools, model.tokenizer):
        for spot in spots:
            if spot.kind not in found:
                found[spot.kind] = Site.of([*turn["prompt_ids"], *turn["ids"]], spot.positions)
    return found


def _line(row: Row, label: dict[str, Any], turns: Turns, run_folder: Path) -> dict[str, Any]:
    first = next((turn for turn in turns if turn["part"] == "agent"), turns[0])
    return {
        "kind": "round",
        "id": f"{run_folder.name} {trajectory_of(row)} {row['round']}",
        "group": turns[0]["case"],  # the case's own id: a public row has that of its record
        "domain": label["domain"],
        "paraphrase": 0,
        "entitled": label["owed"],
        "n_tokens": len(first["prompt_ids"]),
        "text": label["words"],
        "condition": label["named"],
        "lied": label["lied"],
        "initial": label["initial"],
        "sample": label["sample"],
        "round": label["round"],
    }
