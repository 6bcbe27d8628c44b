"""Draw what ``klb-probe pair`` found: AUROC by layer beside its baselines, cases with and without a lie, example rounds.

python analyses/lie_pairing.py --pairs outputs/signals/pairs --signals outputs/signals --run outputs/run
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from klb_probe.dialogue.trajectory import read_folder
from klb_probe.pairing.excerpts import best_layer, case_slopes, example_rounds
from klb_probe.pairing.figures import auroc_figure, examples_figure, slopes_figure
from klb_probe.pairing.join import Paired, join
from klb_probe.pairing.read import read_signals


def examples(pairs: pd.DataFrame, paired: Paired, rows: list[dict[str, Any]], at: tuple[str, str, int]) -> list[dict[str, Any]]:
    """Up to three rounds with their words and the margins of all layers by turn."""
    position, lens, _ = at
    turns = paired.turns[(paired.turns["position"] == position) & (paired.turns["lens"] == lens)]
    return [
        {
            "why": why,
            "name": f"{rows[number]['case']}, {rows[number]['condition']}, trust {rows[number]['trust_before']:.2f}",
            "transcript": rows[number]["transcript"],
            "margins": turns[turns["round_id"] == number].pivot(index="layer", columns="turn", values="margin"),
        }
        for why, number in example_rounds(pairs, *at)
    ]


def main() -> None:
    """Read the tables of a pairing, its signals and its rounds; write three figures and the table of cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True, help="folder that klb-probe pair wrote")
    parser.add_argument("--signals", type=Path, required=True, help="folder with signals.parquet")
    parser.add_argument("--run", type=Path, required=True, help="folder with trajectories_*.jsonl")
    parser.add_argument("--out", type=Path, help="folder for the figures (default: --pairs)")
    parser.add_argument("--position", default="before_reply")
    parser.add_argument("--lens", default="margin")
    parser.add_argument("--layer", type=int, help="default: the one the nested split chose most often")
    arguments = parser.parse_args()
    tables = {name: pd.read_csv(arguments.pairs / f"{name}.csv") for name in ("pairs", "statistics", "selection", "baselines")}
    position, lens, layer = arguments.position, arguments.lens, arguments.layer
    if layer is None:
        layer = best_layer(tables["selection"], position, lens)
    rows = [row for file in read_folder(arguments.run) for row in file.rows]
    paired = join(read_signals(arguments.signals)[0], rows, [position])
    at, where = (position, lens, layer), f"{lens} at {position}, layer {layer}"
    slopes = case_slopes(tables["pairs"], *at)
    figures = {
        "auroc_by_layer.png": auroc_figure(tables["statistics"], tables["baselines"], "AUROC of margins for lies"),
        "within_case.png": slopes_figure(slopes, where),
        "examples.png": examples_figure(examples(tables["pairs"], paired, rows, at), f"{where} chose these rounds"),
    }
    out = arguments.out or arguments.pairs
    out.mkdir(parents=True, exist_ok=True)
    slopes.to_csv(out / "within_case.csv", index=False, float_format="%.6g")
    for name, figure in figures.items():
        figure.savefig(out / name, dpi=130)
        print(f"figure: {out / name}")


if __name__ == "__main__":
    main()
