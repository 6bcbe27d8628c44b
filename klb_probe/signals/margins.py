"""Margins of eligibility scenarios: computing them, and the tables a reader wants of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from klb_probe.cases.scenarios import WORDINGS, Scenario, eligibility_scenarios
from klb_probe.cases.sources import OURS, load_cases
from klb_probe.files import file_sha256
from klb_probe.lens.margin import Lens, LogitLens, MarginLens
from klb_probe.models.residual_model import ResidualModel
from klb_probe.progress import progress_bar
from klb_probe.signals.readout import Readouts, read_prompts, readout_key
from klb_probe.signals.summary import summarise
from klb_probe.summary import as_html, estimate, in_a_line, number

if TYPE_CHECKING:
    from klb_probe.figure import Figure

DEFAULT_FRAMINGS = ("honest", "deny")
POSITION = "answer"  # the last prompt token, from which the answer is predicted


@dataclass(frozen=True, repr=False)
class Margins:
    """Margins of scenarios under one or two lenses, all layers, at the answer position.

    Attributes:
        scenarios: One a prompt.
        ids: Token ids of each prompt.
        lenses: Lens names, in the order of the readouts' lens axis.
        readouts: The numbers.
        model_name: For titles.
        contrast: The tokens, in words.

    Examples:
        >>> logit = klb.LogitLens.of(small, klb.TokenContrast.of(small.chat))
        >>> margins = klb.eligibility_margins(small, logit, domains=["refund"], questions=["plain"], quick=True)
        >>> len(margins.frame) == len(margins.prompts) * margins.n_layers
        True
        >>> sorted(set(margins.summary()["statistic"]))
        ['agreement', 'auroc', 'entitlement_contrast', 'framing_contrast', 'mean_margin', 'pair_accuracy']
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
        """Tidy statistics with 95 % bootstrap intervals over pairs; see :func:`klb_probe.signals.summary.summarise`."""
        arrays = (tensor.double().numpy() for tensor in (self.readouts.margins, self.readouts.random, self.readouts.own))
        return summarise(self._labels, self.lenses, *arrays, seed=seed)

    def plot(self, summary: pd.DataFrame | None = None) -> Figure:
        """Margins and AUROC by depth; see :func:`klb_probe.plots.margins_by_depth`."""
        from klb_probe.plots import margins_by_depth

        return margins_by_depth(self.summary() if summary is None else summary, self.model_name, self.contrast)

    def _facts(self) -> dict[str, Any]:
        from klb_probe.plots import LENS_TITLES

        read, prompts = int(self.readouts.done.sum()), len(self.scenarios)
        pairs = self._labels["pair"].nunique()
        return {
            "model": f"{self.model_name}, {self.n_layers} layers",
            "lens": ", ".join(LENS_TITLES.get(name, name) for name in self.lenses),
            "contrast": self.contrast,
            "prompts": f"{prompts} of {pairs} pairs" + (f", {read} of them read" if read < prompts else ""),
            "domains": ", ".join(self._labels["domain"].unique()),
            "framings": ", ".join(self.framings),
        }

    def __repr__(self) -> str:
        return in_a_line("Margins", self._facts())

    def _repr_html_(self) -> str:
        """The facts, and how well the model's own final margin tells what is owed."""
        if not bool(self.readouts.done.all()):
            return as_html("Margins of eligibility scenarios", self._facts())
        note = "Final layer: the model's own margin. Chance is 0.50. A score inside its random readouts shows nothing."
        return as_html("Margins of eligibility scenarios", self._facts(), self._final_scores(), note)

    def _final_scores(self) -> pd.DataFrame:
        """AUROC and pair accuracy of the first lens at the last layer, beside their nulls."""
        from klb_probe.plots import main_question

        first = {name: getattr(self.readouts, name)[:, :1, -1:] for name in ("margins", "random")}
        last = replace(self, lenses=self.lenses[:1], readouts=replace(self.readouts, **first)).summary()
        titles = {"auroc": "AUROC of entitlement", "pair_accuracy": "pairs with owed above its twin"}
        shown = last[last["statistic"].isin(titles) & (last["question"] == main_question(last))]
        lines = [
            {
                "framing": line.framing,
                "final margin": titles[line.statistic],
                "value [95 %]": estimate(line),
                "random readouts, 95 %": number(line.null_q95),
                "n": f"{line.n} prompts, {line.n_pairs} pairs",
            }
            for line in shown.itertuples()
        ]
        return pd.DataFrame(lines)


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
    progress: bool = True,
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
        progress: Show a bar, in a terminal or a notebook.

    Examples:
        >>> logit = klb.LogitLens.of(small, klb.TokenContrast.of(small.chat))
        >>> margins = klb.eligibility_margins(small, logit, domains=["refund"], quick=True)
        >>> margins.prompts["pair"].nunique(), len(margins.prompts), margins.n_layers
        (4, 32, 4)
    """
    loaded = load_cases(str(root) if root is not None and cases == OURS else cases, domains)
    scenarios = eligibility_scenarios(loaded, framings, root, questions=questions, quick=quick)
    margins, lenses = prepare(model, lens, scenarios)
    with progress_bar(len(scenarios), "reading", "prompt", shown=progress) as bar:

        def read(count: int) -> None:
            bar.update(count)
            on_batch(count)

        read_prompts(model, lenses, margins.ids, margins.readouts, batch_size=batch_size, on_batch=read)
    return margins
