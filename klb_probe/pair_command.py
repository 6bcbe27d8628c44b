"""``klb-probe pair``: signals of played rounds beside what the judge found in them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pandas as pd

    from klb_probe.pairing.api import Pairing

PAIR_EXAMPLE = "Example: klb-probe pair outputs/liar/signals outputs/liar --position before_reply,action"
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

    from klb_probe.pairing.api import pair as pair_files

    positions = [name.strip() for name in position.split(",")] if position else []
    found = pair_files(signals, run, positions=positions, monitor=monitor, seed=seed)
    tables = dict(zip(TABLES, (found.frame, found.statistics, found.selection, found.baselines), strict=True))
    asked, monitor_record = found.monitor or (None, None)
    about = {"counts": found.paired.counts, "monitor": monitor_record, "manifest": _short(found.manifest)}
    record = {
        **{"command": "pair", "signals": str(signals), "run": str(run), "positions": positions or "all", "seed": seed},
        **_methods(),
        "rules_judge": found.rules_judge,
        **about,
        "versions": _versions(),
    }
    if overwrite:
        from klb_probe.outputs import clear

        clear(folder, PAIR_FILES)
    _write(folder, tables if asked is None else {**tables, MONITOR_FILE: asked}, record)
    _print(folder, found)


def _methods() -> dict[str, Any]:
    from klb_probe.metrics.bootstrap import DRAWS, LEVEL
    from klb_probe.pairing.moments import FEWEST
    from klb_probe.pairing.selection import FOLDS, PERMUTATIONS
    from klb_probe.pairing.statistics import FALSE_POSITIVES

    return {
        "bootstrap": {"draws": DRAWS, "level": LEVEL, "over": "trajectories, as many of every condition"},
        "selection": {"folds": FOLDS, "of": "trajectories", "permutations": PERMUTATIONS, "labels_permuted_within": "case"},
        "value_of_a_round": "that of its first turn at the position; of claims the mean",
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


def _print(folder: Path, found: Pairing) -> None:
    from klb_probe.console import page, print_tables
    from klb_probe.pairing import report

    console = page(_WIDTH)
    print_tables(console, report.table(found.statistics, found.selection, found.baselines))
    for line in found.notes():
        console.print(line, soft_wrap=True)
    console.print(f"Files in {folder}: {', '.join(path.name for path in sorted(folder.iterdir()))}", soft_wrap=True)
