"""Every question at every position: the tables, and the directions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np
import pandas as pd

from klb_probe.errors import KlbError
from klb_probe.lens.margin import LogitLens, MarginLens
from klb_probe.models.residual_model import ResidualModel
from klb_probe.probes.data import ProbeData
from klb_probe.probes.directions import DirectionsMetadata, ProbeSet, save_directions
from klb_probe.probes.estimators import ESTIMATORS
from klb_probe.probes.evaluation import CrossFit
from klb_probe.probes.folds import Split, check_groups
from klb_probe.probes.linear import Estimator
from klb_probe.probes.linear_probe import LinearProbe
from klb_probe.probes.measures import measure
from klb_probe.probes.population import Population
from klb_probe.probes.questions import family_populations, parse_questions, training_population
from klb_probe.probes.stage import population_problem, stage_for, stage_of
from klb_probe.probes.tables import RANDOM, SHUFFLED, WORDS, controls, nested_probes, whole, with_interval
from klb_probe.probes.trial import DRAWS, NESTED, RESIDUAL, Line, Trial, estimator_lines, shared_lines
from klb_probe.progress import progress_bar
from klb_probe.summary import as_html, number

if TYPE_CHECKING:
    from klb_probe.figure import Figure

_MEASURES = [
    f"{name}{end}"
    for name in ("auroc", "balanced_accuracy", "recall_1_percent", "selectivity")
    for end in ("", "_low", "_high")
]
PROBE_COLUMNS = [
    *("question", "position", "estimator", "feature", "split", "choice", "layer", *_MEASURES),
    *("cosine_jlens", "cosine_logit", "inverse_l2", "n", "n_positive", "n_groups", "chosen", "note"),
]
TRANSFER_COLUMNS = [
    *("family", "train", "test", "position", "estimator", "split", "choice", "layer"),
    *("auroc", "auroc_low", "auroc_high", "n", "n_positive", "n_groups", "note"),
]
SCORE_COLUMNS = [
    *("question", "position", "estimator", "id", "group", "domain", "framing", "entitled", "label", "fold", "score"),
]


@dataclass(frozen=True)
class ProbeOptions:
    """What to train and how to test it.

    Attributes:
        questions: Names of questions.
        estimators: Names of estimators; the first stands for all in transfers between other populations.
        positions: Where.
        split: What the folds leave out.
        shuffles: Runs with shuffled labels.
        seed: Of everything random.

    Examples:
        >>> klb.ProbeOptions(questions=["framing", "lie"], estimators="logistic")  # doctest: +NORMALIZE_WHITESPACE
        ProbeOptions(questions=('framing', 'lie'), estimators=('logistic',), positions=('answer',), split='domain',
                     shuffles=5, seed=0)
    """

    questions: tuple[str, ...] = ("lie",)
    estimators: tuple[str, ...] = ("logistic", "mean_difference", "mass_mean", "lat")
    positions: tuple[str, ...] = ("answer",)
    split: Split = "domain"
    shuffles: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("questions", "estimators", "positions"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))  # one name is one, not letters

    @classmethod
    def checked(
        cls,
        questions: Sequence[str],
        estimators: Sequence[str],
        positions: Sequence[str],
        *,
        split: str,
        shuffles: int,
        seed: int,
    ) -> ProbeOptions:
        """Options with every name known and none twice; KlbError otherwise."""
        parse_questions(questions)
        if unknown := [name for name in estimators if name not in ESTIMATORS]:
            raise KlbError(f"unknown estimator {', '.join(unknown)}; known: {', '.join(ESTIMATORS)}")
        if split not in get_args(Split):
            raise KlbError(f"unknown split {split!r}; one of {', '.join(get_args(Split))}")
        # Of rounds, the answer position is the last token before the agent's first message.
        positions = ["answer" if name == "before_reply" else name for name in positions]
        asked, fitted, read = (tuple(dict.fromkeys(one)) for one in (questions, estimators, positions))
        return cls(asked, fitted, read, split=cast(Split, split), shuffles=shuffles, seed=seed)


@dataclass(frozen=True, repr=False)
class ProbeResults:
    """What came out.

    Attributes:
        probes: A line a question, position, estimator, kind of features and layer; ``choice`` nested: the layer was chosen
            within the training folds.
        transfer: A line a pair of populations of one family.
        scores: Out-of-fold scores of every row of a question's population, at the nested layer.
        directions: Probes learned from all rows, of every layer.
        sets: What they are.
        data: What all this was computed from.

    Examples:
        >>> from pathlib import Path
        >>> logit = klb.LogitLens.of(small, klb.TokenContrast.of(small.chat))
        >>> options = klb.ProbeOptions(questions=("framing",), estimators=("mean_difference",), shuffles=1)
        >>> found = klb.train_probes(small, logit, options, domains=["airline", "debt", "refund"], quick=True)
        >>> sorted(set(found.probes["choice"]))
        ['layer', 'nested', 'none']
        >>> found.save(Path("outputs/mine.safetensors"), small)
        >>> klb.load_probe(Path("outputs/mine.safetensors"), small).question
        'framing'
    """

    probes: pd.DataFrame
    transfer: pd.DataFrame
    scores: pd.DataFrame
    directions: list[LinearProbe]
    sets: list[ProbeSet]
    data: ProbeData

    def _facts(self) -> dict[str, Any]:
        groups = self.data.rows["group"].nunique()
        return {
            "model": self.data.model_name,
            "probes": ", ".join(map(str, self.sets)) or "no probe",
            "rows": f"{len(self.data)} rows in {groups} groups (a case and its twin, or a case's rounds)",
            "layers": self.data.store.n_layers,
        }

    def __repr__(self) -> str:
        """In a line: the fields hold every token of every prompt."""
        found = ", ".join(map(str, self.sets)) or "no probe"
        return f"ProbeResults of {self.data.model_name}: {found}; {len(self.data)} rows"

    def _repr_html_(self) -> str:
        """The facts, and every nested probe beside controls that use no direction of its own."""
        lines = []
        for line in nested_probes(self.probes).itertuples():
            beside = controls(self.probes, line)
            lines.append(
                {
                    **{"question": line.question, "position": line.position, "estimator": line.estimator},
                    **{"layer": whole(line.layer), "AUROC nested [95 %]": with_interval(line)},
                    **{name: number(beside.get(name)) for name in (SHUFFLED, RANDOM, WORDS)},
                    "n / groups": f"{whole(line.n)} / {whole(line.n_groups)}",
                }
            )
        note = "AUROC on groups the probe has not seen, layer chosen without them; what its controls reach shows nothing."
        return as_html("Linear probes", self._facts(), pd.DataFrame(lines), note)

    def plot(self) -> Figure:
        """AUROC by layer; see :func:`klb_probe.probes.figures.auroc_by_layer`."""
        from klb_probe.probes.figures import auroc_by_layer

        return auroc_by_layer(self.probes)

    def save(self, path: Path, model: ResidualModel, *, seed: int = 0, command: str = "klb_probe.train_probes") -> None:
        """Write the probes of all layers to a ``.safetensors`` file, for :func:`klb_probe.load_probe`.

        Args:
            path: The file.
            model: The model they were trained on.
            seed: Of the options, for the file's own record.
            command: What trained them, for the same.
        """
        from klb_probe.versions import versions

        metadata = DirectionsMetadata(
            model=model.identity,
            fingerprint=model.fingerprint,
            n_layers=model.n_layers,
            d_model=model.d_model,
            layers=tuple(range(model.n_layers)),
            sets=tuple(self.sets),
            seed=seed,
            command=command,
            versions=versions(),
        )
        save_directions(Path(path), self.directions, metadata)


def evaluate(
    data: ProbeData, lenses: Sequence[MarginLens | LogitLens], options: ProbeOptions, *, progress: bool = False
) -> ProbeResults:
    """Train and test every probe the options ask for.

    Args:
        data: Rows and residuals; see :func:`klb_probe.probes.data.load_probe_data`.
        lenses: Read beside the probes as one-number controls; the last one a logit lens.
        options: What to do.
        progress: Show a bar, if this is a terminal.

    Raises KlbError for fewer than 10 groups, duplicated rows in different groups, and if no question could be asked.
    """
    questions = parse_questions(options.questions)
    estimators = [ESTIMATORS[name] for name in options.estimators]
    for position in options.positions:  # before anything is computed at the others
        try:
            check_groups(data.rows["group"].to_numpy(str)[data.has(position)])
        except KlbError as error:
            raise KlbError(f"position {position}: {error}, or leave this position out") from None
    lines: list[Line] = []
    transfers: list[Line] = []
    scores: list[pd.DataFrame] = []
    directions: list[LinearProbe] = []
    sets: list[ProbeSet] = []
    steps = len(options.positions) * len(questions) * (len(estimators) + 1)
    with progress_bar(steps, "probing", "fit", shown=progress) as bar:
        for position in options.positions:
            stage = stage_of(data, position, lenses, options.split, options.seed)
            for question in questions:
                population = stage.narrowed(training_population(question, stage.rows))
                trial = Trial(question, stage_for(stage, population, options.seed), population, options.shuffles, options.seed)
                if problem := population_problem(population, stage.groups):
                    lines += [_empty(trial, name, problem) for name in options.estimators]
                    bar.update(len(estimators) + 1)
                    continue
                lines += shared_lines(trial)
                bar.update()
                for estimator in estimators:
                    found_lines, found, probes = estimator_lines(trial, estimator)
                    lines += found_lines
                    if probes:
                        directions += probes
                        sets.append(_set(trial, estimator.name, probes, found))
                        scores.append(_scores(trial, estimator.name, found))
                        transfers += _transfers(trial, estimator.name, population, found)
                    bar.update()
                transfers += _others(
                    trial, estimators[0], {line["train"] for line in transfers if line["position"] == position}
                )
    if not directions:
        raise KlbError(f"no probe could be trained: {'; '.join(dict.fromkeys(line['note'] for line in lines))}")
    return ProbeResults(
        pd.DataFrame(lines).reindex(columns=PROBE_COLUMNS).astype({"layer": "Int64"}),
        pd.DataFrame(transfers)
        .drop_duplicates(TRANSFER_COLUMNS[1:6])
        .reindex(columns=TRANSFER_COLUMNS)
        .astype({"layer": "Int64"}),
        pd.concat(scores, ignore_index=True)[SCORE_COLUMNS],
        directions,
        sets,
        data,
    )


def _others(trial: Trial, estimator: Estimator, done: Set[str]) -> Iterator[Line]:
    """Probes of the other populations of the family, tested on all of them, but for those that were done."""
    for other in family_populations(trial.question, trial.stage.rows):
        other = trial.stage.narrowed(other)
        if other.name in done or population_problem(other, trial.stage.groups):
            continue
        stage = stage_for(trial.stage, other, trial.seed)
        there = Trial(trial.question, stage, other, trial.shuffles, trial.seed)
        found = there.fit(stage.residuals, stage.layers, estimator)
        yield from _transfers(there, estimator.name, other, found)


def _transfers(trial: Trial, estimator: str, train: Population, found: CrossFit) -> Iterator[Line]:
    """A probe at its nested layer on every population of the family, in groups it has not seen."""
    stage = trial.stage
    for test in family_populations(trial.question, stage.rows):
        test = stage.narrowed(test)
        tested = Trial(trial.question, stage, test, trial.shuffles, trial.seed)
        scores, hard = found.nested_scores[:, None], found.nested_hard[:, None]
        measured = measure(
            scores,
            hard,
            tested.labels,
            stage.groups,
            found.fold,
            judged=tested.judged,
            controls=tested.controls,
            draws=DRAWS,
            seed=trial.seed,
        )
        yield {
            **{"family": trial.question.family, "train": train.name, "test": test.name, "position": stage.position},
            **{"estimator": estimator, "split": stage.split, "choice": NESTED},
            **{"layer": None if found.usual is None else int(found.layers[found.usual])},
            **{"auroc": measured.auroc.value[0], "auroc_low": measured.auroc.low[0], "auroc_high": measured.auroc.high[0]},
            **{"n": measured.n, "n_positive": measured.n_positive, "n_groups": measured.n_groups},
            "note": "; ".join(one for one in (measured.note, found.note) if one),
        }


def _scores(trial: Trial, estimator: str, found: CrossFit) -> pd.DataFrame:
    rows, population, folds = trial.stage.rows, trial.population, trial.stage.folds
    part = rows.iloc[population.rows][["id", "group", "domain", "framing", "entitled"]]
    names = np.array([fold.name for fold in folds] + [""], dtype=object)  # -1: never tested
    return part.assign(
        question=trial.question.name,
        position=trial.stage.position,
        estimator=estimator,
        label=population.labels,
        fold=names[found.fold[population.rows]],
        score=found.nested_scores[population.rows],
    )


def _set(trial: Trial, estimator: str, probes: Sequence[LinearProbe], found: CrossFit) -> ProbeSet:
    return ProbeSet(
        question=trial.question.name,
        estimator=estimator,
        position=trial.stage.position,
        label=trial.question.true,
        layer=int(found.layers[found.usual]),
        n_rows=len(trial.population.rows),
    )


def _empty(trial: Trial, estimator: str, problem: str) -> Line:
    return {
        **trial.keys(estimator, RESIDUAL),
        **{"choice": NESTED, "n": len(trial.population.rows), "n_positive": int(trial.population.labels.sum())},
        **{"n_groups": len(np.unique(trial.stage.groups[trial.population.rows])), "note": problem},
    }
