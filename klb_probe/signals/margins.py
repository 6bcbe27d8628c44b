"""Margins of eligibility scenarios: computing them, and the tables a reader wants of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from klb_probe.cases.scenarios import WORDINGS, Scenario, eligibility_scenarios
from klb_probe.cases.sources import OURS, load_cases
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
            (
                s.situation.id,
                s.situation.pair,
                s.situation.domain,
                s.situation.entitled,
                s.framing,
                s.paraphrase,
                s.question,
                s.answer,
            )
            for s in self.scenarios
        ]
        return pd.DataFrame(
            rows, columns=["scenario", "pair", "domain", "entitled", "framing", "paraphrase", "question", "answer"]
        )

    @property
    def prompts(self) -> pd.DataFrame:
        """One row a prompt: scenario, pair, domain, entitled, framing, paraphrase, question, answer, own_margin.

        ``answer`` is the right one.
        """
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

        Columns: lens, layer, statistic, framing, question, entitled, value, low, high, n, n_pairs, null_q95.

        ``mean_margin`` is the yes-minus-no margin as it is, for each wording of the question. All other statistics are of
        the margin *toward owed*: yes-minus-no under the plain question, no-minus-yes under the reversed one, and, where a
        run has both, question ``both``: their mean over the two wordings of one prompt, in which a taste for "yes" cancels.
        ``entitlement_contrast``: owed minus not owed, within a framing. ``framing_contrast``: the first framing minus
        another, owed and not owed apart. ``auroc`` of the margin for entitlement, all owed prompts against all others.
        ``pair_accuracy``: the share of pairs (at the same paraphrase) whose owed side has the higher margin, which offsets
        between domains and wordings cannot blur. The last two have ``null_q95``, the 95th percentile of the folded
        statistic over the lens's random readouts. ``agreement``: the share of prompts where the layer's margin has the sign
        of the model's own.
        """
        tables = [table for view in self._views() for table in self._view_tables(view, seed)]
        return pd.concat(tables, ignore_index=True)

    def _views(self) -> Iterator[_View]:
        """The prompts of each wording, and both wordings of a prompt as one."""
        margins, random, own = (
            tensor.double().numpy() for tensor in (self.readouts.margins, self.readouts.random, self.readouts.own)
        )
        found = {}
        for question in dict.fromkeys(self._labels["question"]):
            rows = np.flatnonzero(self._labels["question"] == question)
            sign = 1 if question == "plain" else -1
            view = _View(question, self._labels.iloc[rows].reset_index(drop=True), margins[rows], random[rows], own[rows], sign)
            found[question] = view
            yield view
        if len(found) == 2:
            plain, reverse = found["plain"], found["reversed"]
            same = ["scenario", "framing", "paraphrase"]
            order = plain.labels[same].merge(reverse.labels[same].reset_index(), on=same, validate="one_to_one")["index"]
            margins, random, own = (
                (getattr(plain, name) - getattr(reverse, name)[order]) / 2 for name in ("margins", "random", "own")
            )
            yield _View("both", plain.labels, margins, random, own, 1)

    def _view_tables(self, view: _View, seed: int) -> Iterator[pd.DataFrame]:
        entitled, framing = (view.labels[name].to_numpy() for name in ("entitled", "framing"))
        bootstrap = PairBootstrap(view.labels["pair"].to_numpy(), seed=seed)
        own_sign = np.sign(view.own)[:, None]
        for number, lens in enumerate(self.lenses):
            raw = view.margins[:, number]
            values, random = view.sign * raw, view.sign * view.random[:, number]
            read = ~np.isnan(values).all(0)

            def table(statistic: str, name: str, label: bool | None, estimate: Estimate, null: Any = None) -> pd.DataFrame:
                return _table(lens, statistic, name, view.question, label, estimate, null)[read]  # noqa: B023 (this turn's)

            for name in self.framings:
                here = framing == name
                if view.question != "both":
                    for label in (True, False):
                        yield table("mean_margin", name, label, bootstrap.mean(raw, here & (entitled == label)))
                yield table("entitlement_contrast", name, None, bootstrap.difference(values, here & entitled, here & ~entitled))
                null = null_quantile(random[here], entitled[here])
                yield table("auroc", name, None, bootstrap.auroc(values, here, entitled), null)
                owed, twins = _twins(view.labels[here])
                if len(owed):
                    estimate = bootstrap.mean(_wins(values, owed, twins), np.isin(np.arange(len(values)), owed))
                    null = folded_quantile(_wins(random, owed, twins)[owed].mean(0))
                    yield table("pair_accuracy", name, None, estimate, null)
                agreed = np.where(np.isnan(raw), np.nan, np.sign(raw) == own_sign)
                yield table("agreement", name, None, bootstrap.mean(agreed, here))
            first, *others = self.framings
            for other in others:
                for label in (True, False):
                    chosen = [(framing == name) & (entitled == label) for name in (first, other)]
                    yield table("framing_contrast", f"{first} minus {other}", label, bootstrap.difference(values, *chosen))

    def plot(self, summary: pd.DataFrame | None = None) -> Figure:
        """Margins and AUROC by depth; see :func:`klb_probe.plots.margins_by_depth`."""
        from klb_probe.plots import margins_by_depth

        return margins_by_depth(self.summary() if summary is None else summary, self.model_name, self.contrast)


@dataclass(frozen=True)
class _View:
    """Prompts of one wording of the question, or of both as one.

    Attributes:
        labels: One row a prompt.
        margins: ``[prompt, lens, layer]``, yes minus no.
        random: ``[prompt, lens, layer, row]``.
        own: ``[prompt]``.
        sign: What turns yes-minus-no into a margin toward owed.
    """

    question: str
    labels: pd.DataFrame
    margins: np.ndarray
    random: np.ndarray
    own: np.ndarray
    sign: int

    arrays: ClassVar[tuple[str, ...]] = ("margins", "random", "own")


def _twins(labels: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Indices of owed prompts whose pair has a not-owed prompt at the same paraphrase, and of those."""
    sides = labels.reset_index(names="at").pivot(index=["pair", "paraphrase"], columns="entitled", values="at")
    sides = sides.reindex(columns=[True, False]).dropna().astype(int)
    return sides[True].to_numpy(), sides[False].to_numpy()


def _wins(values: np.ndarray, owed: np.ndarray, twins: np.ndarray) -> np.ndarray:
    """1 where an owed prompt exceeds its twin, 0 where not, half for ties, in the owed prompt's row ``[prompt, ...]``."""
    wins = np.full(values.shape, np.nan)
    wins[owed] = np.heaviside(values[owed] - values[twins], 0.5)
    return wins


def _table(
    lens: str,
    statistic: str,
    framing: str,
    question: str,
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
            "question": question,
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
    model: ResidualModel, lens: MarginLens | LogitLens, scenarios: Sequence[Scenario], *, controls: Sequence[Lens] = ()
) -> tuple[Margins, list[Lens]]:
    """Scenarios as ids with empty readouts, and what to read them with: the lens, its logit-lens twin, and any controls."""
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
    questions: Sequence[str] = WORDINGS,
    quick: bool = False,
    cases: str = OURS,
    root: Path | None = None,
    batch_size: int = 8,
    on_batch: Callable[[int], object] = lambda _: None,
) -> Margins:
    """Margins of every eligibility scenario of the domains (all by default) under the framings.

    Args:
        model: The model.
        lens: A margin lens (its logit-lens twin is read beside it) or a logit lens.
        domains: Names of domains.
        framings: Names of framings; contrasts are against the first.
        questions: Wordings of the question: plain, reversed, or both.
        quick: A stratified subset of the scenarios.
        cases: Where the cases come from; see :func:`klb_probe.cases.sources.load_cases`.
        root: A scenarios folder whose framings to use, and whose cases unless ``cases`` names others.
        batch_size: Most prompts in one forward pass.
        on_batch: Called with the number of prompts just read.
    """
    loaded = load_cases(str(root) if root is not None and cases == OURS else cases, domains)
    scenarios = eligibility_scenarios(loaded, framings, root, questions=questions, quick=quick)
    margins, lenses = prepare(model, lens, scenarios)
    read_prompts(model, lenses, margins.ids, margins.readouts, batch_size=batch_size, on_batch=on_batch)
    return margins
