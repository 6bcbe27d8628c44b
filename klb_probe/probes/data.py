"""What probes are trained and tested on: a table of prompts and rounds, and their residuals in a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from klb_probe.cases.sources import OURS, load_cases
from klb_probe.errors import KlbError
from klb_probe.models.residual_model import ResidualModel
from klb_probe.probes.extract import extract
from klb_probe.probes.prompts import REPLY_POSITIONS, SCENARIO_POSITIONS, scenario_rows
from klb_probe.probes.rounds_data import ROUND_POSITIONS, round_rows
from klb_probe.probes.rows import row_table
from klb_probe.probes.site import Site
from klb_probe.probes.store import ResidualStore
from klb_probe.progress import progress_bar


@dataclass(frozen=True)
class ProbeData:
    """Rows, and where the residuals of each are in the store.

    Attributes:
        rows: One line a prompt or round; see :func:`klb_probe.probes.rows.row_table`.
        sites: For each position one site a row; None where a row has no such moment.
        store: Of the model that the sites were read with.
    """

    rows: pd.DataFrame
    sites: dict[str, list[Site | None]]
    store: ResidualStore

    @property
    def model_name(self) -> str:
        """The model."""
        return self.store.facts["model"]

    @property
    def n_layers(self) -> int:
        """Blocks of the model."""
        return self.store.n_layers

    @property
    def d_model(self) -> int:
        """Width of the model."""
        return self.store.d_model

    @property
    def positions(self) -> tuple[str, ...]:
        """Positions that were asked for."""
        return tuple(self.sites)

    @property
    def counts(self) -> dict[str, int]:
        """Rows by kind, groups and domains."""
        kinds = self.rows["kind"].value_counts()
        counts = {f"{kind}s": int(kinds.get(kind, 0)) for kind in ("scenario", "round")}
        return {**counts, "groups": self.rows["group"].nunique(), "domains": self.rows["domain"].nunique()}

    def __len__(self) -> int:
        """Rows."""
        return len(self.rows)

    def has(self, position: str) -> np.ndarray:
        """Which rows have a residual at a position ``[row]``."""
        return np.array([site is not None for site in self._at(position)], dtype=bool)

    def residuals(self, position: str, layer: int) -> np.ndarray:
        """Residuals ``[row, d_model]`` of one layer, float32, read from the store; NaN for rows without this position."""
        values = np.full((len(self), self.d_model), np.nan, np.float32)
        values[self.has(position)] = self.store.load([site for site in self._at(position) if site is not None], layer)
        return values

    def _at(self, position: str) -> list[Site | None]:
        if position not in self.sites:
            raise KlbError(f"no residuals at position {position}; there are: {', '.join(self.sites)}")
        return self.sites[position]

    @classmethod
    def concat(cls, parts: Sequence[ProbeData]) -> ProbeData:
        """All rows of parts that share a store, renumbered.

        Raises KlbError if there are none, or a row twice.
        """
        rows = pd.concat([row_table(()), *(part.rows for part in parts)], ignore_index=True)
        if rows.empty:
            raise KlbError("no scenario and no scored round to probe; name framings, or runs with scored rounds")
        if (twice := rows["id"].duplicated()).any():
            raise KlbError(f"{twice.sum()} rows are there twice, the first: {rows['id'][twice].iloc[0]}; name each run once")
        positions = dict.fromkeys(position for part in parts for position in part.sites)
        sites = {
            position: [site for part in parts for site in part.sites.get(position, [None] * len(part))]
            for position in positions
        }
        return cls(rows, sites, parts[0].store)


def load_probe_data(
    model: ResidualModel,
    *,
    framings: Iterable[str],
    store: Path,
    domains: Iterable[str] | None = None,
    cases: str = OURS,
    root: Path | None = None,
    full: bool = False,
    quick: bool = False,
    positions: Sequence[str] = ("answer",),
    runs: Iterable[Path] = (),
    replay: bool = False,
    dtype: str = "auto",
    batch_size: int = 8,
    progress: bool = False,
) -> ProbeData:
    """The scenarios of some framings and the rounds of some runs, with what the store lacks read first.

    Args:
        model: The model.
        framings: Names of framings; none for rounds alone.
        store: Folder of residual stores; see :class:`~klb_probe.probes.store.ResidualStore`.
        domains: Names of the scenarios' domains, all by default.
        cases: Where cases come from, those of the runs too; see :func:`klb_probe.cases.sources.load_cases`.
        root: A scenarios folder whose framings to use, and whose cases unless ``cases`` names others.
        full: Every paraphrase and wording of every situation, not each situation once.
        quick: A stratified subset of the scenarios.
        positions: Where to read: any of answer, reply_mean, reply_last; of rounds also gate, claim, action.
        runs: Folders of runs.
        replay: Rebuild the rounds' prompts from their transcripts.
        dtype: Type of number in the store.
        batch_size: Most prompts in one forward pass.
        progress: Show a bar, if this is a terminal.

    Raises KlbError for an unknown position, and for one that no row has.
    """
    if unknown := [name for name in positions if name not in ROUND_POSITIONS]:
        raise KlbError(f"unknown position {', '.join(unknown)}; known: {', '.join(ROUND_POSITIONS)}")
    residuals = ResidualStore.open(store, model, dtype)
    parts = []
    if framings := list(framings):
        if root is not None and not Path(root).is_dir():
            raise KlbError(f"--scenarios {root}: no such folder")
        loaded = load_cases(str(root) if root is not None and cases == OURS else cases, domains)
        reply = bool({*positions} & {*REPLY_POSITIONS})
        rows, sites = scenario_rows(model, loaded, framings, root, full=full, quick=quick, reply=reply)
        parts.append(ProbeData(rows, {name: [*sites[name]] for name in positions if name in SCENARIO_POSITIONS}, residuals))
    for run in runs:
        rows, found = round_rows(model, Path(run), cases=cases, replay=replay, positions=positions)
        parts.append(ProbeData(rows, found, residuals))
    data = ProbeData.concat(parts)
    if absent := [name for name in positions if name not in data.sites or not data.has(name).any()]:
        raise KlbError(f"no scenario or round has position {', '.join(absent)}; some are of rounds only: pass a run")
    _read(model, data, batch_size, progress)
    return data


def _read(model: ResidualModel, data: ProbeData, batch_size: int, progress: bool) -> None:
    wanted = {site.key: site for sites in data.sites.values() for site in sites if site is not None}
    todo = list(wanted.values())
    read_before = len(todo) - len(data.store.missing(todo))
    with progress_bar(len(todo), "reading", "site", initial=read_before, shown=progress) as bar:
        extract(model, todo, data.store, batch_size=batch_size, on_site=lambda _: bar.update())
