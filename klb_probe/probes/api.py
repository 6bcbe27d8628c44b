"""Probes from Python: read what is missing, train, test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from klb_probe.cases.sources import OURS
from klb_probe.errors import KlbError
from klb_probe.lens.margin import LogitLens, MarginLens
from klb_probe.models.residual_model import ResidualModel
from klb_probe.probes.data import load_probe_data
from klb_probe.probes.questions import parse_questions
from klb_probe.probes.results import ProbeOptions, ProbeResults, evaluate

STORE = Path("outputs") / "residuals"


def check_runs(options: ProbeOptions, runs: Sequence[Path]) -> None:
    """Raises KlbError for a question about rounds without any."""
    if not runs and any(one.family == "rounds" for one in parse_questions(options.questions)):
        raise KlbError("round_lie learns from played rounds: pass a run (--run RUN; klb-probe run makes one)")


def train_probes(
    model: ResidualModel,
    lens: MarginLens | LogitLens,
    options: ProbeOptions | None = None,
    *,
    domains: Iterable[str] | None = None,
    cases: str = OURS,
    root: Path | None = None,
    quick: bool = False,
    full: bool = False,
    runs: Iterable[Path] = (),
    replay: bool = False,
    store: Path = STORE,
    store_dtype: str = "auto",
    batch_size: int = 8,
    progress: bool = True,
) -> ProbeResults:
    """Train linear probes on residuals of every layer, and test them on groups they have not seen, beside their controls.

    Args:
        model: The model.
        lens: A margin lens (its logit-lens twin is read beside it) or a logit lens, for the one-number controls.
        options: Questions, estimators, positions, split; by default the question ``lie`` where the answer starts.
        domains: Names of domains, all by default.
        cases: Where cases come from; see :func:`klb_probe.cases.sources.load_cases`.
        root: A scenarios folder whose framings to use, and whose cases unless ``cases`` names others.
        quick: A stratified subset of the scenarios.
        full: Every paraphrase and both wordings.
        runs: Folders of runs, whose rounds are tested on, or learnt from (question ``round_lie``).
        replay: Rebuild the rounds' prompts from the transcripts.
        store: Where residuals are kept; those that are there are not read again.
        store_dtype: Of the residuals on disk: auto, float32 or bfloat16.
        batch_size: Most prompts in one forward pass.
        progress: Show bars, if this is a terminal.

    Examples:
        >>> logit = klb.LogitLens.of(small, klb.TokenContrast.of(small.chat))
        >>> options = klb.ProbeOptions(questions=("framing",), estimators=("mean_difference",), shuffles=1)
        >>> found = klb.train_probes(small, logit, options, domains=["airline", "debt", "refund"], quick=True)
        >>> nested = found.probes[(found.probes["choice"] == "nested") & (found.probes["feature"] == "residual")]
        >>> nested[["question", "estimator", "n_groups"]].values.tolist()
        [['framing', 'mean_difference', 12]]
    """
    options, runs = options or ProbeOptions(), list(runs)
    check_runs(options, runs)
    asked = parse_questions(options.questions)
    positions = list(options.positions)
    if any(one.family == "answer" for one in asked) and "answer" not in positions:
        positions.append("answer")  # the model's own answer is read there
    data = load_probe_data(
        model,
        framings=dict.fromkeys(name for one in asked for name in one.framings),
        domains=domains,
        cases=cases,
        root=root,
        full=full,
        quick=quick,
        positions=positions,
        store=store,
        dtype=store_dtype,
        runs=runs,
        replay=replay,
        batch_size=batch_size,
        progress=progress,
    )
    lenses: list[MarginLens | LogitLens] = (
        [lens, LogitLens.of(model, lens.contrast)] if isinstance(lens, MarginLens) else [lens]
    )
    return evaluate(data, lenses, options, progress=progress)
