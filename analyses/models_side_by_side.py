"""Draw ``jlens`` runs of several models, over the same prompts, beside each other.

python analyses/models_side_by_side.py outputs/one outputs/other --out outputs/both.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd

from klb_probe.plots import LENS_TITLES, framings_of, main_question, models_side_by_side


def best_layers(summary: pd.DataFrame, lens: str) -> list[str]:
    """Of each framing: the AUROC of entitlement at the last layer, and below it at its best."""
    table = summary[(summary["lens"] == lens) & (summary["statistic"] == "auroc")]
    table = table[table["question"] == main_question(summary)]
    lines = []
    for framing, group in table.groupby("framing", sort=False):
        last = group.loc[group["layer"].idxmax()]
        below = group[group["layer"] < last["layer"]]
        best = below.loc[below["value"].idxmax()]
        found = (
            f"{one['value']:.2f} [{one['low']:.2f}, {one['high']:.2f}] at layer {one['layer']} (random: {one['null_q95']:.2f})"
            for one in (last, best)
        )
        lines.append(f"  {framing}: {next(found)}; best below it, chosen by looking: {next(found)}")
    return lines


def read_runs(runs: list[Path], lens: str) -> dict[str, pd.DataFrame]:
    """The summary of each run, by the name of its model; ValueError for what cannot be drawn side by side."""
    summaries: dict[str, pd.DataFrame] = {}
    asked = set()
    for run in runs:
        if absent := [name for name in ("run.json", "summary.csv") if not (run / name).is_file()]:
            raise ValueError(f"{run} has no {absent[0]}: name folders that jlens wrote")
        name = json.loads((run / "run.json").read_text(encoding="utf-8"))["model"]["name"]
        summary = pd.read_csv(run / "summary.csv", dtype={"entitled": "boolean"})
        if name in summaries:
            raise ValueError(f"{run} is a second run of {name}")
        if lens not in set(summary["lens"]):
            raise ValueError(f"{run} was not read with lens {lens}, but with {', '.join(dict.fromkeys(summary['lens']))}")
        scores = summary[summary["statistic"] == "auroc"]
        asked.add((main_question(summary), *framings_of(summary), scores["n"].max(), scores["n_pairs"].max()))
        summaries[name] = summary
    if len(asked) > 1:
        raise ValueError("the runs are not over the same prompts")
    return summaries


def main() -> None:
    """Read ``summary.csv`` of each run; write a figure and print what it shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders that jlens wrote, over the same prompts")
    parser.add_argument("--lens", choices=sorted(LENS_TITLES), default="margin", help="the lens to draw")
    parser.add_argument("--out", type=Path, required=True, help="figure")
    arguments = parser.parse_args()
    try:
        summaries = read_runs(arguments.runs, arguments.lens)
    except ValueError as error:
        parser.error(str(error))
    models_side_by_side(summaries, arguments.lens).savefig(arguments.out, dpi=130)
    print(f"AUROC of entitlement, {LENS_TITLES[arguments.lens]}")
    for name, summary in summaries.items():
        print(name, *best_layers(summary, arguments.lens), sep="\n")
    print(f"figure: {arguments.out}")


if __name__ == "__main__":
    main()
