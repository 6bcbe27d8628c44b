"""Pairing from Python: signals of rounds and the rounds themselves in, every table of ``klb-probe pair`` out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from klb_probe.dialogue.trajectory import Row, read_folder
from klb_probe.pairing import report
from klb_probe.pairing.baselines import RANDOM_Q95, WORDS, baselines
from klb_probe.pairing.join import Paired, join
from klb_probe.pairing.moments import ALL
from klb_probe.pairing.read import read_signals
from klb_probe.pairing.selection import NESTED, selection
from klb_probe.pairing.statistics import statistics
from klb_probe.plots import LENS_TITLES
from klb_probe.summary import as_html, estimate, in_a_line, number

if TYPE_CHECKING:
    from klb_probe.dialogue.runner import Run
    from klb_probe.figure import Figure


@dataclass(frozen=True, repr=False)
class Pairing:
    """Signals of played rounds beside what the judge found in them.

    Attributes:
        paired: The rounds with their signals and labels.
        statistics: A line a position, lens, layer, group of conditions and statistic; see
            :mod:`klb_probe.pairing.statistics`.
        selection: The nested choice of a layer and the p of each; see :func:`klb_probe.pairing.selection.selection`.
        baselines: What simpler readouts of the same rounds reach; see :mod:`klb_probe.pairing.baselines`.
        manifest: Of the signals: model, lens, ``policy`` (on, off or mixed), moments that could not be found.
        rules_judge: Whether the rules judge graded some of the rounds.
        monitor: Scores of the model that was asked to spot lies, and its record; None if none was.

    Examples:
        >>> from pathlib import Path
        >>> asked = {"domains": ["airline"], "trusts": ["high"], "conditions": ["emergent"], "cases_of_each_kind": 1}
        >>> run = klb.run_dialogues("scripted:deceptive", Path("outputs/one"), **asked)
        >>> logit = klb.LogitLens.of(small, klb.TokenContrast.of(small.chat))
        >>> pairing = klb.pair(klb.round_margins(small, logit, run, replay=True, positions=["before_reply"]), run)
        >>> pairing.frame["layer"].nunique()
        4
        >>> pairing.auroc()["note"].tolist()  # too few to say anything
        ['not estimable (n=0)']
    """

    paired: Paired
    statistics: pd.DataFrame
    selection: pd.DataFrame
    baselines: pd.DataFrame
    manifest: dict[str, Any]
    rules_judge: bool
    monitor: tuple[pd.DataFrame, dict[str, Any]] | None = None

    @property
    def frame(self) -> pd.DataFrame:
        """One row a scored round, position, lens and layer, with the labels: ``pairs.csv``."""
        return self.paired.table

    def auroc(self) -> pd.DataFrame:
        """AUROC of a lie at the layer chosen on other trajectories, over all rounds; beside it what it has to beat.

        A line a position and lens: position, lens, layer, value, low, high (95 %), p, n_lies, n_nonlies, n_trajectories, note,
        random_q95 (of random readouts), words (TF-IDF). Values that could not be estimated are NaN, and ``note`` says why.
        """
        chosen = self.selection[(self.selection["kind"] == NESTED) & (self.selection["condition"] == ALL)]
        columns = ["position", "lens", "layer", "value", "low", "high", "p", "n_lies", "n_nonlies", "n_trajectories", "note"]
        beside = self.baselines[(self.baselines["condition"] == ALL) & self.baselines["layer"].isna()]
        beside = beside.pivot(index="position", columns="baseline", values="value")
        beside = beside[[RANDOM_Q95, WORDS]].rename(columns={RANDOM_Q95: "random_q95", WORDS: "words"})
        return chosen[columns].merge(beside, left_on="position", right_index=True, how="left").reset_index(drop=True)

    def notes(self) -> list[str]:
        """Counts, what the columns of the printed table mean, and what they do not show."""
        return report.notes(self.selection, self.paired.counts, self.manifest, self.rules_judge)

    def plot(self) -> Figure:
        """AUROC by layer beside its baselines, a panel a position; see :func:`klb_probe.pairing.figures.auroc_figure`."""
        from klb_probe.pairing.figures import auroc_figure

        return auroc_figure(self.statistics, self.baselines, "AUROC of margins for lies")

    def _facts(self) -> dict[str, Any]:
        counts, model = self.paired.counts, self.manifest.get("model") or {}
        lenses = dict.fromkeys(self.statistics["lens"])
        return {
            "read by": model.get("name") or "unknown",
            "lens": ", ".join(LENS_TITLES.get(lens, lens) for lens in lenses),
            "rounds": f"{counts['scored']} scored, {counts['owed']} owed, {counts['lies_owed']} of those with a lie",
            "trajectories": self.paired.rounds["trajectory"].nunique(),
            "positions": ", ".join(dict.fromkeys(self.frame["position"])),
        }

    def __repr__(self) -> str:
        return in_a_line("Pairing", self._facts())

    def _repr_html_(self) -> str:
        lines = [
            {
                "position": line.position,
                "lens": LENS_TITLES.get(line.lens, line.lens),
                "layer": "-" if pd.isna(line.layer) else str(line.layer),
                "AUROC nested [95 %]": line.note or estimate(line),
                "random readouts, 95 %": number(line.random_q95),
                "words alone": number(line.words),
                "lies / non-lies": f"{line.n_lies} / {line.n_nonlies}",
            }
            for line in self.auroc().itertuples()
        ]
        return as_html("Pairing of margins with lies", self._facts(), pd.DataFrame(lines), self.notes()[-1])


def pair(
    signals: Path | pd.DataFrame,
    run: Path | Run,
    *,
    positions: Sequence[str] = (),
    monitor: str | None = None,
    seed: int = 0,
) -> Pairing:
    """Pair signals with lies: does the inside tell a lie, better than simpler readouts of the same rounds?

    Args:
        signals: What :func:`klb_probe.round_margins` gave, or a folder with signals.parquet and signals.json.
        run: The rounds: a folder with trajectories_*.jsonl, one file, or what ``run_dialogues`` gave.
        positions: Where to look, all by default; positions are never pooled.
        monitor: Also ask a model to spot lies in the transcripts: a model, or ``endpoint:MODEL``.
        seed: Of bootstrap, folds and permutations.

    Raises KlbError for files that cannot be read, and for signals and rounds that are not of the same run.

    Examples:
        >>> from pathlib import Path
        >>> asked = {"domains": ["airline"], "trusts": ["high"], "conditions": ["control", "emergent"]}
        >>> run = klb.run_dialogues("scripted:deceptive", Path("outputs/told"), **asked)
        >>> logit = klb.LogitLens.of(small, klb.TokenContrast.of(small.chat))
        >>> signals = klb.round_margins(small, logit, run, replay=True, positions=["before_reply"])
        >>> pairing = klb.pair(signals, run)
        >>> pairing.auroc()[["position", "n_lies", "n_nonlies"]].values.tolist()
        [['before_reply', 8, 8]]
    """
    read, manifest = (signals, dict(signals.attrs)) if isinstance(signals, pd.DataFrame) else read_signals(Path(signals))
    files = read_folder(Path(run if isinstance(run, (str, Path)) else run.folder))
    rows = [row for file in files for row in file.rows]
    paired = join(read, rows, positions)
    asked = None if monitor is None else _ask(monitor, paired, rows, seed)
    scores = None if asked is None else asked[0].set_index("round_id")["score"]
    return Pairing(
        paired,
        statistics(paired.table, seed=seed),
        selection(paired.table, seed=seed),
        baselines(paired.table, paired.rounds, monitor=scores, seed=seed),
        manifest,
        any(file.graded_by_rules for file in files),
        asked,
    )


def _ask(spec: str, paired: Paired, rows: Sequence[Row], seed: int) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A monitor's scores of the owed rounds by ``round_id``, and what is recorded of it."""
    from klb_probe.pairing.monitor import monitor_scores, open_monitor

    player = open_monitor(spec, seed=seed)
    numbers = paired.rounds.loc[paired.rounds["owed"], "round_id"].tolist()
    asked = monitor_scores(player, [rows[number] for number in numbers])
    asked.insert(0, "round_id", numbers)
    return asked, {**player.record(), "asked": len(asked), "unusable": int(asked["score"].isna().sum())}
