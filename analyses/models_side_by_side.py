"""Draw ``jlens`` runs of several models beside each other: the liar knows what the ignorant one does not.

python analyses/models_side_by_side.py outputs/demo/liar outputs/demo/ignorant --out outputs/demo/organisms.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd

from klb_probe.plots import LENS_TITLES, main_question, models_side_by_side


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


def main() -> None:
    """Read ``summary.csv`` of each run; write a figure and print what it shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders that jlens wrote, over the same prompts")
    parser.add_argument("--lens", choices=sorted(LENS_TITLES), default="margin", help="the lens to draw")
    parser.add_argument("--out", type=Path, required=True, help="figure")
    arguments = parser.parse_args()
    summaries = {}
    for run in arguments.runs:
        name = json.loads((run / "run.json").read_text(encoding="utf-8"))["model"]["name"]
        summaries[name] = pd.read_csv(run / "summary.csv", dtype={"entitled": "boolean"})
    models_side_by_side(summaries, arguments.lens).savefig(arguments.out, dpi=130)
    print(f"AUROC of entitlement, {LENS_TITLES[arguments.lens]}")
    for name, summary in summaries.items():
        print(name, *best_layers(summary, arguments.lens), sep="\n")
    print(f"figure: {arguments.out}")


if __name__ == "__main__":
    main()
