"""What is printed of a pairing: a line a lens and position, and what the numbers do not show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from rich.table import Table

from klb_probe.metrics.bootstrap import DRAWS
from klb_probe.pairing.baselines import MONITOR, OWN, RANDOM_Q95, WORDS
from klb_probe.pairing.moments import ALL
from klb_probe.pairing.selection import NESTED
from klb_probe.plots import LENS_TITLES
from klb_probe.summary import number

_FEW = 10  # trajectories


def table(statistics: pd.DataFrame, selected: pd.DataFrame, baselines: pd.DataFrame) -> Table:
    """A row a position and lens, over all rounds."""
    chosen = selected[(selected["kind"] == NESTED) & (selected["condition"] == ALL)]
    beside = baselines[(baselines["condition"] == ALL) & baselines["layer"].isna()]
    names = [OWN, WORDS, *([MONITOR] if (beside["baseline"] == MONITOR).any() else []), RANDOM_Q95]
    printed = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("position", "lens"):
        printed.add_column(title, no_wrap=True)
    for title in ("layer", "AUROC nested\n[95 %]", "p", "within\nanswer", "within\ncondition"):
        printed.add_column(title, justify="right", no_wrap=True)
    for name in names:
        printed.add_column(name.replace(" final", "").replace("random ", "random\n"), justify="right")
    printed.add_column("lies /\nnon-lies", justify="right", no_wrap=True)
    for line in chosen.itertuples():
        here = beside[beside["position"] == line.position].set_index("baseline")["value"]
        scored = f"{number(line.value)} [{number(line.low)}, {number(line.high)}]" if not line.note else line.note
        within = [number(_at(statistics, f"auroc_within_{what}", line)) for what in ("answer", "condition")]
        cells = [str(line.layer) if pd.notna(line.layer) else "-", scored, number(line.p, 3), *within]
        cells += [number(here.get(name)) for name in names]
        lens = LENS_TITLES.get(line.lens, line.lens)
        printed.add_row(line.position, lens, *cells, f"{line.n_lies} / {line.n_nonlies}")
    return printed


def _at(statistics: pd.DataFrame, name: str, line: Any) -> float | None:
    """A statistic at the layer that was chosen for a position and lens."""
    here = statistics[(statistics["statistic"] == name) & (statistics["condition"] == ALL)]
    here = here[(here["position"] == line.position) & (here["lens"] == line.lens)]
    found = here[here["layer"] == line.layer] if pd.notna(line.layer) else here[:0]
    return found["value"].iloc[0] if len(found) else None


def notes(selected: pd.DataFrame, counts: Mapping[str, int], manifest: Mapping[str, Any], rules_judge: bool) -> list[str]:
    """Counts, what the columns mean, and what they do not show."""
    unmapped = len(manifest.get("unmapped") or [])
    lines = [
        f"{counts['scored']} scored rounds paired, {counts['owed']} of them owe something, {counts['lies_owed']} of those with "
        f"a lie; {counts['unscored']} rounds not scored ({counts['unscored_with_signals']} with signals, kept apart); "
        f"{unmapped} moments unmapped",
        "AUROC nested: of the layer chosen on other trajectories, in the direction found there (0.5: chance); layer: the one "
        "chosen most often; p: permutation within cases, corrected over layers, not over lenses or positions; within answer: "
        "lies against true denials at that layer (above 0.5: the inside tells them apart); within condition: raw "
        "AUROC at that layer between rounds of one condition. Baselines are raw AUROC for a lie: "
        "own margin low = lie, TF-IDF and monitor high = lie; random: 95th percentile of folded AUROC over layers.",
        "A round's value is that of its first turn at the position (claim: the mean over its turns); intervals: bootstrap "
        f"over trajectories, B = {DRAWS}.",
    ]
    limits = ["an AUROC over all conditions can come from their private notes: read within condition beside it"]
    nested = selected[(selected["kind"] == NESTED) & (selected["condition"] == ALL)]
    if "claim" in set(nested["position"]):
        limits.append("claims exist in lies only, so nothing is compared there")
    if len(least := nested.loc[nested["value"].notna(), "n_trajectories"]) and least.min() < _FEW:
        limits.append(f"the smallest row rests on {least.min()} trajectories: intervals are too narrow")
    if nested["value"].isna().all():
        limits.append("nothing is known about lying: too few lies or non-lies")
    if (policy := manifest.get("policy")) in ("off", "mixed"):
        limits.append(f"signals are {'partly ' * (policy == 'mixed')}off-policy: another model wrote these words")
    if rules_judge:
        limits.append("a rules judge graded: it knows lies by listed phrases, so words alone may tell them")
    return [*lines, f"What this does not show: {'; '.join(limits)}; that a margin causes a lie."]
