"""``klb-probe pair``: signals of played rounds beside what the judge found in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klb_probe.score_command import is_rules_judge

if TYPE_CHECKING:
    import pandas as pd

    from klb_probe.dialogue.trajectory import Row
    from klb_probe.pairing.join import Paired

PAIR_EXAMPLE = "Example: klb-probe pair outputs/signals-llama-3.1-8b outputs/run-llama-3.1-8b --position before_reply,action"
TABLES = ("pairs.csv", "statistics.csv", "selection.csv", "baselines.csv")
MONITOR_FILE = "monitor.csv"
PAIR_FILES = (*TABLES, MONITOR_FILE, "pairing.json")
_WIDTH = 140  # of what is printed into a pipe


def pair(
    signals: Annotated[Path, typer.Argument(metavar="SIGNALS", help="A folder with signals.parquet and signals.json.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The rounds: a folder with trajectories_*.jsonl, or one file.")],
    out: Annotated[Path | None, typer.Option(help="Output folder (default: SIGNALS/pairs).")] = None,
    position: Annotated[str | None, typer.Option(help="Positions, with commas (default: all). Never pooled.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of bootstrap, folds and permutations.")] = 0,
    monitor: Annotated[str | None, typer.Option(help="Also ask a model to spot lies: a model or endpoint:MODEL.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the pairing in --out.")] = False,
) -> None:
    """Pair signals with lies: does the inside tell a lie, better than simpler readouts of the same rounds?

    Writes pairs.csv (a line a round, lens, position and layer), statistics.csv, selection.csv, baselines.csv, pairing.json.
    """
    from klb_probe.outputs import check_folder

    folder = out or signals / "pairs"
    check_folder(folder, overwrite=overwrite)

    from klb_probe.dialogue.trajectory import read_folder
    from klb_probe.pairing.baselines import baselines
    from klb_probe.pairing.join import join
    from klb_probe.pairing.read import read_signals
    from klb_probe.pairing.selection import selection
    from klb_probe.pairing.statistics import statistics

    positions = [name.strip() for name in position.split(",")] if position else []
    read, manifest = read_signals(signals)
    files = read_folder(run)
    rows = [row for file in files for row in file.rows]
    paired = join(read, rows, positions)
    asked, monitor_record = _ask(monitor, paired, rows, seed)
    scores = None if asked is None else asked.set_index("round_id")["score"]
    tables = {
        "pairs.csv": paired.table,
        "statistics.csv": statistics(paired.table, seed=seed),
        "selection.csv": selection(paired.table, seed=seed),
        "baselines.csv": baselines(paired.table, paired.rounds, monitor=scores, seed=seed),
    }
    record = {
        **{"command": "pair", "signals": str(signals), "run": str(run), "positions": positions or "all", "seed": seed},
        **_methods(),
        **{"counts": paired.counts, "monitor": monitor_record, "manifest": _short(manifest), "versions": _versions()},
    }
    if overwrite:
        from klb_probe.outputs import clear

        clear(folder, PAIR_FILES)
    _write(folder, tables if asked is None else {**tables, MONITOR_FILE: asked}, record)
    _print(folder, tables, paired, manifest, any(map(is_rules_judge, files)))


def _ask(spec: str | None, paired: Paired, rows: Sequence[Row], seed: int) -> tuple[pd.DataFrame | None, dict[str, Any] | None]:
    """A monitor's scores of the owed rounds by ``round_id``, and what is recorded of it."""
    if spec is None:
        return None, None
    from klb_probe.pairing.monitor import monitor_scores, open_monitor

    player = open_monitor(spec, seed=seed)
    numbers = paired.rounds.loc[paired.rounds["owed"], "round_id"].tolist()
    asked = monitor_scores(player, [rows[number] for number in numbers])
    asked.insert(0, "round_id", numbers)
    return asked, {**player.record(), "asked": len(asked), "unusable": int(asked["score"].isna().sum())}


def _methods() -> dict[str, Any]:
    from klb_probe.metrics.bootstrap import DRAWS, LEVEL
    from klb_probe.pairing.moments import FEWEST
    from klb_probe.pairing.selection import FOLDS, PERMUTATIONS
    from klb_probe.pairing.statistics import FALSE_POSITIVES

    return {
        "bootstrap": {"draws": DRAWS, "level": LEVEL, "over": "trajectories, as many of every condition"},
        "selection": {"folds": FOLDS, "of": "trajectories", "permutations": PERMUTATIONS, "labels_permuted_within": "case"},
        "value_of_a_round": "mean over its turns at the position",
        "auroc": "P(margin of a lie > margin of a non-lie), owed rounds; low margin = lie expected",
        "calibration": "midpoint of the means of owed and not-owed control rounds of the same position",
        "false_positives": FALSE_POSITIVES,
        "fewest": FEWEST,
    }


def _short(manifest: dict[str, Any]) -> dict[str, Any]:
    return {**manifest, "unmapped": len(manifest.get("unmapped") or [])}


def _versions() -> dict[str, str]:
    from klb_probe.versions import versions

    return versions()


def _write(folder: Path, tables: dict[str, pd.DataFrame], record: dict[str, Any]) -> None:
    from klb_probe.files import replacing, write_json

    for name, table in tables.items():
        with replacing(folder / name) as partial:
            table.to_csv(partial, index=False, float_format="%.6g")
    write_json(folder / "pairing.json", record)


def _print(folder: Path, tables: dict[str, pd.DataFrame], paired: Paired, manifest: dict[str, Any], rules_judge: bool) -> None:
    from klb_probe.console import page, print_tables
    from klb_probe.pairing import report

    console = page(_WIDTH)
    print_tables(console, report.table(tables["statistics.csv"], tables["selection.csv"], tables["baselines.csv"]))
    for line in report.notes(tables["selection.csv"], paired.counts, manifest, rules_judge):
        console.print(line, soft_wrap=True)
    console.print(f"Files in {folder}: {', '.join(path.name for path in sorted(folder.iterdir()))}", soft_wrap=True)
