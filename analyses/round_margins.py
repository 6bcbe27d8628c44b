"""Draw the margin over the agent's turns, lies against non-lies, from saved signals and their rounds.

python analyses/round_margins.py --signals outputs/signals --run outputs/run --pairs outputs/signals/pairs
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from klb_probe.dialogue.trajectory import read_folder
from klb_probe.pairing.excerpts import best_layer, turn_curves
from klb_probe.pairing.figures import turns_figure
from klb_probe.pairing.join import join
from klb_probe.pairing.read import read_signals


def main() -> None:
    """Read signals, rounds and, for the layer, ``selection.csv`` of ``klb-probe pair``; write a figure and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", type=Path, required=True, help="folder with signals.parquet")
    parser.add_argument("--run", type=Path, required=True, help="folder with trajectories_*.jsonl")
    parser.add_argument("--pairs", type=Path, help="folder that klb-probe pair wrote (default: pairs in --signals)")
    parser.add_argument("--out", type=Path, help="folder for round_margins.png and .csv (default: --pairs)")
    parser.add_argument("--position", default="before_reply")
    parser.add_argument("--lens", default="margin")
    parser.add_argument("--layer", type=int, help="default: the one the nested split chose most often")
    arguments = parser.parse_args()
    pairs = arguments.pairs or arguments.signals / "pairs"
    position, lens, layer = arguments.position, arguments.lens, arguments.layer
    if layer is None:
        layer = best_layer(pd.read_csv(pairs / "selection.csv"), position, lens)
    rows = [row for file in read_folder(arguments.run) for row in file.rows]
    paired = join(read_signals(arguments.signals)[0], rows, [position])
    curves, readings = turn_curves(paired, position, lens, layer)
    out = arguments.out or pairs
    out.mkdir(parents=True, exist_ok=True)
    curves.to_csv(out / "round_margins.csv", index=False, float_format="%.6g")
    turns_figure(curves, readings, f"{lens} at {position}, layer {layer}").savefig(out / "round_margins.png", dpi=130)
    print(curves.to_string(index=False))
    print(f"figure: {out / 'round_margins.png'}")


if __name__ == "__main__":
    main()
