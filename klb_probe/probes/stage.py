"""One position of the probe data, ready for evaluation: rows that have it, folds, and features by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from klb_probe.errors import KlbError
from klb_probe.lens.margin import LogitLens, MarginLens
from klb_probe.probes.controls import lens_margins
from klb_probe.probes.data import ProbeData
from klb_probe.probes.folds import FEWEST_DOMAINS, Fold, Split, check_duplicates, check_groups, group_folds, make_folds
from klb_probe.probes.population import Population

_KEPT_BYTES = 2 << 30  # of residuals in memory; beyond that a layer is read again when it is asked for again


@dataclass(frozen=True)
class Stage:
    """One position.

    Attributes:
        data: All rows and residuals.
        rows: The table, with ``own_margin`` (yes minus no, of the model's own answer) where the data has the answer position.
        position: The position.
        usable: Rows that have a residual there ``[row]``.
        folds: Over all rows.
        split: What the folds leave out.
        lenses: For the one-number controls.
    """

    data: ProbeData
    rows: pd.DataFrame
    position: str
    usable: np.ndarray
    folds: list[Fold]
    split: Split
    lenses: Sequence[MarginLens | LogitLens]

    @cached_property
    def groups(self) -> np.ndarray:
        """``[row]``."""
        return self.rows["group"].to_numpy(str)

    @property
    def layers(self) -> range:
        """All layers of the model."""
        return range(self.data.n_layers)

    @cached_property
    def _kept(self) -> dict[int, np.ndarray]:
        return {}

    def residuals(self, layer: int) -> np.ndarray:
        """``[row, d_model]`` float32; NaN for rows without the position."""
        if layer in self._kept:
            return self._kept[layer]
        values = self.data.residuals(self.position, layer)
        if values.nbytes * (len(self._kept) + 1) <= _KEPT_BYTES:
            self._kept[layer] = values
        return values

    def margins(self, lens: MarginLens | LogitLens, sign: np.ndarray) -> Callable[[int], np.ndarray]:
        """The lens's margin at a layer times ``sign [row]``, as features ``[row, 1]``."""
        return lambda layer: (lens_margins(lens, self.residuals(layer), layer) * sign)[:, None]

    def narrowed(self, population: Population) -> Population:
        """The population's rows that have this position."""
        there = self.usable[population.rows]
        return replace(
            population,
            rows=population.rows[there],
            labels=population.labels[there],
            contrast=population.contrast[there],
        )


def stage_of(data: ProbeData, position: str, lenses: Sequence[MarginLens | LogitLens], split: Split, seed: int) -> Stage:
    """The stage of a position; KlbError for too few groups, or rows of different groups that are the same."""
    usable = data.has(position)
    groups = data.rows["group"].to_numpy(str)
    check_groups(groups[usable])
    last = data.residuals(position, data.n_layers - 1)
    check_duplicates(last[usable], groups[usable])
    folds, used = make_folds(split, data.rows, seed)
    return Stage(data, with_own_margin(data, lenses), position, usable, folds, used, lenses)


def with_own_margin(data: ProbeData, lenses: Sequence[MarginLens | LogitLens]) -> pd.DataFrame:
    """The rows with the margin of the model's own answer, read at the last layer where every lens is the model's readout."""
    if "answer" not in data.positions:
        return data.rows.assign(own_margin=np.nan)
    last = data.n_layers - 1
    return data.rows.assign(own_margin=lens_margins(lenses[-1], data.residuals("answer", last), last))


def stage_for(stage: Stage, population: Population, seed: int) -> Stage:
    """The stage with whole groups left out instead of domains, for a population of too few domains to leave one out."""
    domains = stage.rows["domain"].to_numpy(str)
    if stage.split != "domain" or len(set(domains[population.rows])) >= FEWEST_DOMAINS:
        return stage
    return replace(stage, folds=group_folds(stage.groups, domains, seed=seed), split="pair")


def population_problem(population: Population, groups: np.ndarray) -> str:
    """Why nothing can be learned from a population, or empty."""
    if not len(population.rows):
        return "no rows"
    if population.labels.all() or not population.labels.any():
        return f"all {len(population.rows)} rows have the same label"
    try:
        check_groups(groups[population.rows])
    except KlbError as error:
        return str(error)
    return ""
