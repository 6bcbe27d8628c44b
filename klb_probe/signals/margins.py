"""Margins of eligibility scenarios: computing them, and the tables a reader wants of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from klb_probe.cases.load import load_domains
from klb_probe.cases.scenarios import Scenario, eligibility_scenarios
from klb_probe.files import file_sha256
from klb_probe.lens.margin import Lens, LogitLens, MarginLens
from klb_probe.models.residual_model import ResidualModel
from klb_probe.signals.readout import Readouts, read_prompts, readout_key
from klb_probe.signals.statistics import Estimate, PairBootstrap, folded_quantile, null_quantile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_FRAMINGS = ("honest", "deny")
POSITION = "answer"  # the last prompt token, from which the answer is predicted


@dataclass(frozen=True)
class Margins:
    """Margins of scenarios under one or two lenses, all layers, at the answer position.

    Attributes:
        scenarios: One a prompt.
        ids: Token ids of each prompt.
        lenses: Lens names, in the order of the readouts' lens axis.
        readouts: The numbers.
        model_name: For titles.
        contrast: The tokens, in words.
    """

    scenarios: Sequence[Scenario]
    ids: Sequence[Sequence[int]]
    lenses: tuple[str, ...]
    readouts: Readouts
    model_name: str
    contrast: str

    @property
    def n_layers(self) -> int:
        """Blocks of the model; layer n_layers - 1 is the model's own margin."""
        return self.readouts.margins.shape[-1]

    @property
    def framings(self) -> list[str]:
        """Framings present, in order."""
        return list(dict.fromkeys(scenario.framing for scenario in self.scenarios))

    @cached_property
    def _labels(self) -> pd.DataFrame:
        rows = [
            (s.situation.id, s.situation.pair, s.situation.domain, s.situation.entitled, s.framing, s.paraphrase)
            for s in self.scenarios
        ]
        return pd.DataFrame(rows, columns=["scenario", "pair", "domain", "entitled", "framing", "paraphrase"])

    @property
    def prompts(self) -> pd.DataFrame:
        """One row a prompt: scenario, pair, domain, entitled, framing, paraphrase, own_margin."""
        return self._labels.assign(own_margin=self.readouts.own.numpy())

    @property
    def frame(self) -> pd.DataFrame:
        """Tidy: one row a prompt, lens and layer it reads."""
        n_prompts, n_lenses, n_layers = self.readouts.margins.shape
        repeated = self._labels.loc[self._labels.index.repeat(n_lenses * n_layers)].reset_index(drop=True)
        return repeated.assign(
            lens=np.tile(np.repeat(self.lenses, n_layers), n_prompts),
            layer=np.tile(np.arange(n_layers), n_prompts * n_lenses),
            position=POSITION,
            margin=self.readouts.margins.numpy().reshape(-1),
        ).dropna(subset="margin", ignore_index=True)

    def summary(self, *, seed: int = 0) -> pd.DataFrame:
        """Tidy statistics with 95 % bootstrap intervals over pairs.

        Columns: lens, layer, statistic, framing, entitled, value, low, high, n, n_pairs, null_q95.
        Statistics: ``mean_margin``; ``entitlement_contrast`` (owed minus not owed, within a framing);
        ``framing_contrast`` (the first framing minus another, owed and not owed apart); ``auroc`` of the margin for
        entitlement, all owed prompts against all others; ``pair_accuracy``, the share of pairs (at the same paraphrase)
        whose owed side has the higher margin, which offsets between domains and wordings cannot blur. The last two have
        ``null_q95``, the 95th percentile of the folded statistic over the lens's random readouts. ``agreement``: the share
        of prompts where the layer's margin has the sign of the model's own.
        """
        entitled, framing = self._labels["entitled"].to_numpy(), self._labels["framing"].to_numpy()
        bootstrap = PairBootstrap(self._labels["pair"].to_numpy(), seed=seed)
        rows: list[pd.DataFrame] = []
        for number, lens in enumerate(self.lenses):
            values = self.readouts.margins[:, number].double().numpy()
            random = self.readouts.random[:, number].numpy()
            own_sign = np.sign(self.readouts.own.double().numpy())[:, None]

            def add(statistic: str, name: str, label: bool | None, estimate: Estimate, lens=lens, **more: Any) -> None:
                table = _table(lens, statistic, name, label, estimate, **more)
                rows.append(table[~np.isnan(values).all(0)])  # noqa: B023 (called within this turn of the loop)

            for name in self.framings:
                here = framing == name
                for label in (True, False):
                    add("mean_margin", name, label, bootstrap.mean(values, here & (entitled == label)))
                add(
                    "entitlement_contrast",
                    name,
                    None,
                    bootstrap.difference(values, here & entitled, here & ~entitled),
                )
                estimate = bootstrap.auroc(values, here, entitled)
                add("auroc", name, None, estimate, null_q95=null_quantile(random[here], entitled[here]))
                owed, twins = self._twins(here)
                estimate = bootstrap.mean(_wins(values, owed, twins), np.isin(np.arange(len(values)), owed))
                null = folded_quantile(_wins(random, owed, twins)[owed].mean(0))
                add("pair_accuracy", name, None, estimate, null_q95=null)
                add(
                    "agreement",
                    name,
                    None,
                    bootstrap.mean(np.where(np.isnan(values), np.nan, np.sign(values) == own_sign), here),
                )
            first, *others = self.framings
            for other in others:
                for label in (True, False):
                    chosen = [(framing == name) & (entitled == label) for name in (first, other)]
                    add("framing_contrast", f"{first} minus {other}", label, bootstrap.difference(values, *chosen))
        return pd.concat(rows, ignore_index=True)

    def _twins(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the chosen owed prompts, and of the same pair's not-owed prompt at the same paraphrase."""
        labels = self._labels[chosen].reset_index(names="index")
        sides = labels.pivot(index=["pair", "paraphrase"], columns="entitled", values="index")
        return sides[True].to_numpy(), sides[False].to_numpy()

    def plot(self, summary: pd.DataFrame | None = None) -> Figure:
        """Margins and AUROC by depth; see :func:`klb_probe.plots.margins_by_depth`."""
        from klb_probe.plots import margins_by_depth

        return margins_by_depth(self.summary() if summary is None else summary, self.model_name, self.contrast)


def _wins(values: np.ndarray, owed: np.ndarray, twins: np.ndarray) -> np.ndarray:
    """1 where an owed prompt exceeds its twin, 0 where not, half for ties, in the owed prompt's row ``[prompt, ...]``."""
    wins = np.full(values.shape, np.nan)
    wins[owed] = np.heaviside(values[owed] - values[twins], 0.5)
    return wins


def _table(
    lens: str,
    statistic: str,
    framing: str,
    entitled: bool | None,
    estimate: Estimate,
    null_q95: np.ndarray | None = None,
) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "lens": lens,
            "layer": np.arange(len(estimate.value)),
            "statistic": statistic,
            "framing": framing,
            "entitled": pd.array([entitled] * len(estimate.value), dtype="boolean"),
            "value": estimate.value,
            "low": estimate.low,
            "high": estimate.high,
            "n": estimate.n,
            "n_pairs": estimate.n_pairs,
            "null_q95": np.full(len(estimate.value), np.nan) if null_q95 is None else null_q95,
        }
    )


def prepare(
    model: ResidualModel,
    lens: MarginLens | LogitLens,
    *,
    domains: Iterable[str] | None = None,
    framings: Iterable[str] = DEFAULT_FRAMINGS,
    root: Path | None = None,
    controls: Sequence[Lens] = (),
) -> tuple[Margins, list[Lens]]:
    """Scenarios as ids with empty readouts, and what to read them with: the lens, its logit-lens twin, and any controls."""
    scenarios = eligibility_scenarios(load_domains(domains, root), framings, root)
    ids = [model.chat.encode(scenario.system, scenario.user) for scenario in scenarios]
    if isinstance(lens, MarginLens):
        k, seed = lens.metadata.k, lens.metadata.seed
        lenses: list[Lens] = [lens, LogitLens.of(model, lens.contrast, k=k, seed=seed)]
        hashes = [lens.metadata.model_dump_json(), file_sha256(lens.file) if lens.file else ""]
    else:
        k, lenses, hashes = len(lens.random_rows), [lens], []
    hashes += [control.metadata.model_dump_json() for control in controls if hasattr(control, "metadata")]
    n_own = len(lenses)
    lenses += controls
    key = readout_key(model, lenses, hashes, ids)
    readouts = Readouts.empty(len(ids), len(lenses), model.n_layers, k, key, n_own)
    names = tuple(one.name for one in lenses)
    return Margins(scenarios, ids, names, readouts, model.name, str(lens.contrast)), lenses


def eligibility_margins(
    model: ResidualModel,
    lens: MarginLens | LogitLens,
    *,
    domains: Iterable[str] | None = None,
    framings: Iterable[str] = DEFAULT_FRAMINGS,
    root: Path | None = None,
    batch_size: int = 8,
    on_batch: Callable[[int], None] = lambda _: None,
) -> Margins:
    """Margins of every eligibility scenario of the domains (all by default) under the framings.

    Args:
        model: The model.
        lens: A margin lens (its logit-lens twin is read beside it) or a logit lens.
        domains: Names of domains.
        framings: Names of framings; contrasts are against the first.
        root: A scenarios folder to use instead of the project's.
        batch_size: Most prompts in one forward pass.
        on_batch: Called with the number of prompts just read.
    """
    margins, lenses = prepare(model, lens, domains=domains, framings=framings, root=root)
    read_prompts(model, lenses, margins.ids, margins.readouts, batch_size=batch_size, on_batch=on_batch)
    return margins
