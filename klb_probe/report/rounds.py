"""Played rounds: a short line each for the list, and in chunks the conversations, what the judge found, and margins by turn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
from tqdm.auto import tqdm

from klb_probe.dialogue.trajectory import Row, Trajectories, read_folder
from klb_probe.errors import KlbError
from klb_probe.metrics.panel import round_table
from klb_probe.metrics.score import agent_of
from klb_probe.pairing.moments import is_random
from klb_probe.report.data import Json, lens_title, plain, short
from klb_probe.report.margins import contrast_words, lens_words
from klb_probe.report.part import Part, View
from klb_probe.report.recognise import Output
from klb_probe.signals.signals_file import JOIN_KEYS, SIGNALS
from klb_probe.signals.spots import KINDS

IN_A_CHUNK = 50
DIGITS = 3  # significant, of a margin in a round
_KEYS = list(JOIN_KEYS)
_MOMENT = [*_KEYS, "turn", "position"]
_LISTED = ("domain", "condition", "trust", "case", "gate", "owed", "scored", "lied", "detected", "error")
_BATCH = 500_000  # rows of signals

RULES_JUDGE = "A rules judge graded: it knows lies by listed phrases, and misses those in other words."
DOES_NOT_SHOW = (
    "A margin beside a lie is not a cause of it, and a single round is no evidence: which margins go with lies over many "
    "rounds, and whether simpler readouts do as well, is what klb-probe pair measures."
)


def rounds_part(output: Output, signals: Sequence[Output]) -> Part:
    """The part of a run.

    Args:
        output: The run.
        signals: Those that were read from its rounds; of several, the first is shown.
    """
    files = read_folder(output.path)
    rows = [row for file in files for row in file.rows]
    if not rows:
        raise KlbError(f"{output.path} holds no rounds yet")
    table = round_table(rows)
    read, lenses, n_random = read_moments(signals[0].path) if signals else ({}, [], 0)
    chunks = {}
    for number, start in enumerate(range(0, len(rows), IN_A_CHUNK)):
        chunks[str(number)] = [_round(row, read.get(_key(row), [])) for row in rows[start : start + IN_A_CHUNK]]
    data = {
        "agent": ", ".join(dict.fromkeys(agent_of(file)[0] for file in files)),
        "lenses": [lens_title(name) for name in lenses],
        "n_random": n_random,
        "chunk": IN_A_CHUNK,
        "columns": _columns(table, rows),
    }
    limits = [RULES_JUDGE] if any(file.graded_by_rules for file in files) else []
    if signals and signals[0].of("policy") != "on":
        limits.append("These margins are off-policy, at least in part: another model wrote the words that were read.")
    return Part(
        title=f"Rounds of {data['agent']}",
        folder=str(output.path),
        facts=list(_facts(files, table, signals)),
        limits=[*limits, DOES_NOT_SHOW] if signals else limits,
        views=[View("rounds", data, chunks)],
    )


def signals_part(output: Output) -> Part:
    """The part of signals whose rounds were not given."""
    counted = ", ".join(f"{kind} {number}" for kind, number in output.of("positions").items())
    facts = [
        *_signals_facts(output),
        ("n", f"{output.of('rounds')} rounds; moments: {counted or 'none'}"),
        ("rounds", "not given: add the run's folder to see these margins in its conversations"),
    ]
    return Part(f"Signals read by {output.of('model', 'name')}", str(output.path), facts)


def _signals_facts(output: Output) -> Iterator[tuple[str, str]]:
    yield "signals", f"{output.path}, read by {output.of('model', 'name')}; policy: {output.of('policy')}"
    yield "lens", lens_words(output.of("lens"))
    yield "contrast", contrast_words(output.of("contrast"))


def _facts(files: Sequence[Trajectories], table: pd.DataFrame, signals: Sequence[Output]) -> Iterator[tuple[str, str]]:
    players = files[0].run_meta
    for part, name in (("agent", "agent"), ("customer", "customer"), ("grader", "judge")):
        said = players.get(part)
        yield name, str(said.get("cfg") if isinstance(said, Mapping) else said or "not recorded")
    counts = {
        "scored": table.scored,
        "owed something": table.scored & table.owed,
        "with a lie": table.scored & table.lied,
        "gate not passed": table.gate.isin(["failed", "unparsed"]),
        "provider errors": table.error,
    }
    counted = ", ".join(f"{int(found.sum())} {name}" for name, found in counts.items())
    yield "n", f"{len(table)} rounds of {table.trajectory.nunique()} trajectories: {counted}"
    if not all(file.complete for file in files):
        yield "incomplete", "the run has not come to its end; shown as far as it goes"
    for one in signals[:1]:
        yield from _signals_facts(one)


def _columns(table: pd.DataFrame, rows: Sequence[Row]) -> dict[str, Json]:
    """The list of rounds by column; names are held once each."""
    columns: dict[str, Json] = {}
    for name in _LISTED:
        values = table[name]
        if values.dtype == bool:
            columns[name] = values.astype(int).tolist()
        else:
            codes, names = pd.factorize(values.astype(str))
            columns[name] = {"names": list(map(str, names)), "codes": codes.tolist()}
    columns["walk"] = table["trajectory"].astype(int).tolist()
    columns["round"] = [plain(row.get("round")) for row in rows]
    columns["sample"] = [plain(row.get("sample")) for row in rows]
    for name in ("trust_before", "trust_after"):
        columns[name] = short(table[name])
    return columns


def _round(row: Row, moments: list[Json]) -> dict[str, Json]:
    """One round in full; what it lacks is left out."""
    facts = row.get("facts") or {}
    quote = str(facts.get("false_claim_quote") or "")
    shown = {
        "transcript": [
            [role, lie_pieces(str(text), quote) if role == "agent" else [[str(text), False]]]
            for role, text in row.get("transcript") or []
        ],
        "thoughts": row.get("agent_thoughts") or [],
        "gate": row.get("gate_raw") or [],
        "facts": facts,
        "derived": row.get("derived") or {},
        "moments": moments,
    }
    for name in ("order_id", "item", "outcome", "owed_outcome", "entitled_outcome", "event", "malformed", "error"):
        shown[name] = plain(row.get(name))
    return {name: value for name, value in shown.items() if value not in (None, [], {}, "")}


def lie_pieces(message: str, quote: str) -> list[tuple[str, bool]]:
    """A message in pieces, each with whether it is the claim that the judge quoted.

    Parts of a quote that an ellipsis joins are looked for one by one, in any case and with any white space between words. A
    quote that is not there word for word marks nothing.
    """
    parts = [part for raw in re.split(r"\.{3,}|…", quote) if (part := raw.strip())]
    spans = []
    for part in parts:
        pattern = r"\s+".join(map(re.escape, part.split()))
        spans += [found.span() for found in re.finditer(pattern, message, re.IGNORECASE)]
    pieces, at = [], 0
    for start, end in sorted(spans):
        if start < at:
            continue
        pieces += [(message[at:start], False), (message[start:end], True)]
        at = end
    pieces.append((message[at:], False))
    return [piece for piece in pieces if piece[0]] or [("", False)]


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(plain(row.get(name)) for name in _KEYS)


def read_moments(folder: Path) -> tuple[dict[tuple[Any, ...], list[dict[str, Json]]], list[str], int]:
    """The moments of every round by its key (``JOIN_KEYS``), in the order in which they happened; the lenses; and the
    number of random readouts.

    A moment: turn, position, the model's own margin, a curve by layer for each lens, and the range of the random readouts.
    """
    path = folder / SIGNALS
    try:
        file = pq.ParquetFile(path)
        wide, own = _wide(file)
    except (OSError, ValueError, KeyError) as error:  # Arrow's errors are among them
        raise KlbError(f"{path} cannot be read ({str(error).splitlines()[0]})") from None
    names = list(dict.fromkeys(lens for lens, _ in wide.columns if not is_random(lens)))
    curves = [short_rows(wide[name]) for name in names]
    random = wide[[column for column in wide.columns if is_random(column[0])]].T.groupby(level="layer")
    ends = [short_rows(table.T) for table in (random.min(), random.max())] if len(wide.columns) > len(curves) else []
    order = {kind: number for number, kind in enumerate(KINDS)}
    found: dict[tuple[Any, ...], list[dict[str, Json]]] = {}
    for at, (*key, turn, position) in enumerate(wide.index):
        moment = {"turn": int(turn), "position": position, "own": short([own.iloc[at]], DIGITS)[0]}
        moment["curves"] = [lines[at] for lines in curves]
        if ends:
            moment["random"] = [lines[at] for lines in ends]
        found.setdefault(tuple(plain(part) for part in key), []).append(moment)
    for moments in found.values():
        moments.sort(key=lambda moment: (moment["position"] != "gate", moment["turn"], order[moment["position"]]))
    return found, names, len({lens for lens, _ in wide.columns}) - len(names)


def _wide(file: pq.ParquetFile) -> tuple[pd.DataFrame, pd.Series]:
    """A row a moment: margins by lens and layer, and the model's own margin. Read in batches, for files of many rounds."""
    tables, owns = [], []
    with tqdm(total=file.metadata.num_rows, desc="signals", unit="row", unit_scale=True, disable=None) as bar:
        for batch in file.iter_batches(_BATCH, columns=[*_MOMENT, "lens", "layer", "margin", "own_margin"]):
            part = batch.to_pandas()
            tables.append(part.set_index([*_MOMENT, "lens", "layer"])["margin"].unstack(["lens", "layer"]))
            owns.append(part.drop_duplicates(_MOMENT).set_index(_MOMENT)["own_margin"])
            bar.update(len(part))
    # A moment may lie across two batches.
    wide, own = (pd.concat(parts).groupby(level=_MOMENT, sort=False).first() for parts in (tables, owns))
    return wide, own


def short_rows(table: pd.DataFrame) -> list[list[float | None]]:
    """The rows of a table by layer, as short numbers."""
    return [short(row, DIGITS) for row in table.sort_index(axis=1).to_numpy()]
