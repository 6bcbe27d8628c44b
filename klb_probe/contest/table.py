"""All entries under all comparisons, in one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from klb_probe.contest.comparisons import COMPARISONS, LYING, MAIN, Null, check_field, gap_null, gaps, measured, null_band
from klb_probe.contest.detectors import Detector, detector_scores
from klb_probe.contest.entries import (
    DETECTOR,
    EACH,
    NONE,
    Entry,
    direction_entries,
    lens_entries,
    own_entries,
    probe_entries,
    text_entries,
)
from klb_probe.contest.rounds import Field
from klb_probe.metrics.bootstrap import DRAWS
from klb_probe.probes.directions import Directions

RANDOM_DIRECTIONS, NULL = "random directions", "random"
COLUMNS = [
    *("entry", "kind", "position", "choice", "layer", "comparison", "auroc", "auroc_low", "auroc_high"),
    *("recall_1_percent", "recall_1_percent_low", "recall_1_percent_high", "null_median", "null_q95"),
    *("gap", "gap_low", "gap_high", "gap_null_q95"),
    *("n", "n_positive", "n_cases", "note"),
]


def contest_table(
    field: Field,
    detectors: Sequence[Detector] = (),
    *,
    directions: Mapping[str, Directions] | None = None,
    layer: int | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    progress: bool = False,
) -> pd.DataFrame:
    """One line an entry (position, layer) and comparison, entries by their AUROC of liar against ignorant, best first.

    ``null_median`` and ``null_q95``: of max(AUROC, 1 - AUROC) of random directions of the residuals at the entry's position,
    all layers together; where an entry has no position of its own, of the position where that percentile is highest. Lines of
    kind ``random`` hold them by layer. ``gap`` (of :func:`klb_probe.contest.comparisons.gaps`) and the 95th percentile of its
    size over random directions stand in the lines of “lie or true denial”. An undefined number is NaN, and ``note`` says why.

    Args:
        field: The rounds.
        detectors: Contestants, beside the entries every contest has.
        directions: By organism, saved probes.
        layer: A layer that was chosen elsewhere, for the lenses.
        draws: Of the bootstrap.
        seed: Of folds, order of rounds, random directions and bootstrap.
        progress: Show a bar, if this is a terminal.

    Raises KlbError for denials of fewer than 10 cases, and for a detector that fails.
    """
    check_field(field)
    nulls = {
        (slot, comparison.name): null_band(field, slot, comparison, seed=seed)
        for slot in field.slots
        for comparison in COMPARISONS
        if field.has(slot).any()
    }
    gap_nulls = {slot: gap_null(field, slot, seed=seed) for slot in field.slots if field.has(slot).any()}
    entries = chain(
        # A detector that fails does so before the rest is computed.
        [Entry(one.name, DETECTOR, "", NONE, (None,), detector_scores(one, field, seed)[:, None]) for one in detectors],
        lens_entries(field, layer, seed),
        own_entries(field),
        direction_entries(field, directions or {}),
        probe_entries(field, seed),
        text_entries(field, seed),
    )
    lines = [*_null_lines(nulls)]
    for entry in tqdm(entries, desc="scoring", unit="entry", disable=None if progress else True):
        lines += _lines(entry, field, nulls, gap_nulls, draws, seed)
    return _sorted(pd.DataFrame(lines).reindex(columns=COLUMNS).astype({"layer": "Int64"}))


def _lines(
    entry: Entry,
    field: Field,
    nulls: Mapping[tuple[str, str], Null],
    gap_nulls: Mapping[str, float],
    draws: int,
    seed: int,
) -> Iterator[dict[str, Any]]:
    keys = {"entry": entry.name, "kind": entry.kind, "position": entry.slot, "choice": entry.choice}
    for comparison in COMPARISONS:
        null = _null(entry.slot, comparison.name, nulls)
        found = measured(entry.scores, field, comparison, fold=entry.fold, draws=draws, seed=seed)
        within: list[dict[str, Any]] = [{} for _ in found]
        if comparison is LYING:
            # A slot that no true denial has (the judge's quote) has no gap, and no null of it.
            known = [one for one in gap_nulls.values() if not np.isnan(one)]
            strictest = gap_nulls[entry.slot] if entry.slot else max(known, default=np.nan)
            within = [
                {**one, "gap_null_q95": strictest} for one in gaps(entry.scores, field, fold=entry.fold, draws=draws, seed=seed)
            ]
        for layer, line, gap in zip(entry.layers, found, within, strict=True):
            note = "; ".join(one for one in (line["note"], entry.note) if one)
            named = {**keys, "layer": layer, "comparison": comparison.name}
            yield {**named, **line, "null_median": null.median, "null_q95": null.q95, **gap, "note": note}


def _null(slot: str, comparison: str, nulls: Mapping[tuple[str, str], Null]) -> Null:
    """The null of a slot; without one, the strictest."""
    if slot:
        return nulls[slot, comparison]
    return max((one for (_, name), one in nulls.items() if name == comparison), key=lambda one: np.nan_to_num(one.q95))


def _null_lines(nulls: Mapping[tuple[str, str], Null]) -> Iterator[dict[str, Any]]:
    for (slot, comparison), null in nulls.items():
        keys = {"entry": RANDOM_DIRECTIONS, "kind": NULL, "position": slot, "comparison": comparison, "note": ""}
        yield {**keys, "choice": NONE, "null_median": null.median, "null_q95": null.q95}
        for layer, (median, q95) in enumerate(null.by_layer):
            yield {**keys, "choice": EACH, "layer": layer, "null_median": median, "null_q95": q95}


def _sorted(table: pd.DataFrame) -> pd.DataFrame:
    """Best entries first, undefined ones and the null last; single layers after all entries that have made their choice."""
    keys = ["entry", "position", "choice", "layer"]
    main = table[table["comparison"] == MAIN.name].set_index(keys)["auroc"]
    best = main.groupby(["entry", "position", "choice"]).max()
    order = [best.get(key, np.nan) for key in table[["entry", "position", "choice"]].itertuples(index=False, name=None)]
    return (
        table.assign(_single=table["choice"] == EACH, _best=order, _at=range(len(table)))
        .sort_values(["_single", "_best", "_at"], ascending=[True, False, True], na_position="last")
        .drop(columns=["_single", "_best", "_at"])
        .reset_index(drop=True)
    )
