"""Draw what ``klb-probe contest`` found by layer, beside what the liar's own pairing and probes say.

python analyses/organisms.py --contest outputs/contest --pairs outputs/liar/signals/pairs --probes outputs/probe-liar

--contest gives AUROC of the liar's denials of what is owed against the ignorant one's, by lens, position and layer, with what
random directions give; --pairs (klb-probe pair on the liar's run) how many of its lies a lens knows of, at the gate and later;
--probes (klb-probe probe --run on the liar) how probes of scenarios do on its rounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from klb_probe.contest.report import knowing_lies, layers_figure
from klb_probe.contest.words import DOES_NOT_SHOW, reading

PLACE = ["position", "lens", "layer", "value", "low", "high", "n_lies"]
TRANSFER = ["train", "test", "position", "estimator", "layer", "auroc", "auroc_low", "auroc_high", "n", "n_groups", "note"]


def to_rounds(transfer: pd.DataFrame) -> pd.DataFrame:
    """Probes learned from scenarios and tested on rounds, at the nested layer."""
    chosen = transfer["test"].str.startswith("rounds") & ~transfer["train"].str.startswith("rounds")
    return transfer[chosen & (transfer["choice"] == "nested")][TRANSFER]


def knowing_words(shares: pd.DataFrame) -> list[str]:
    """The share at the last layer of each lens and position, where a lens is the model's own readout."""
    last = shares[shares["layer"] == shares["layer"].max()]
    return [
        f"knowing while lying, {line.lens} at {line.position}, layer {line.layer}: {line.value:.2f} "
        f"{'' if pd.isna(line.low) else f'[{line.low:.2f}, {line.high:.2f}] '}of {line.n_lies} lies"
        for line in last.itertuples()
    ]


def main() -> None:
    """Read the tables; write a figure and the tables of what it draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contest", type=Path, required=True, help="folder that klb-probe contest wrote")
    parser.add_argument("--pairs", type=Path, help="folder that klb-probe pair wrote for the liar's run")
    parser.add_argument("--probes", type=Path, help="folder that klb-probe probe --run wrote for the liar")
    parser.add_argument("--out", type=Path, help="folder for figure and tables (default: --contest)")
    arguments = parser.parse_args()
    out = arguments.out or arguments.contest
    out.mkdir(parents=True, exist_ok=True)
    contest = pd.read_csv(arguments.contest / "contest.csv").fillna({"position": "", "note": ""})
    tables = {"by_layer": contest[contest["choice"] == "layer"]}
    lines = reading(contest)
    statistics = None
    if arguments.pairs:
        statistics = pd.read_csv(arguments.pairs / "statistics.csv")
        tables["knowing_lies"] = knowing_lies(statistics)[PLACE]
        lines += knowing_words(tables["knowing_lies"]) or ["No share of knowing lies: the pairing has no calibrated margins."]
    if arguments.probes:
        tables["transfer_to_rounds"] = to_rounds(pd.read_csv(arguments.probes / "transfer.csv"))
        lines += [
            f"learned from “{line.train}”, tested on “{line.test}”: {line.estimator} at {line.position} {line.auroc:.2f} "
            f"[{line.auroc_low:.2f}, {line.auroc_high:.2f}] (n = {line.n})"
            for line in tables["transfer_to_rounds"].itertuples()
        ]
    layers_figure(contest, statistics).savefig(out / "by_layer.png", dpi=130)
    for name, table in tables.items():
        table.to_csv(out / f"{name}.csv", index=False, float_format="%.6g")
    print(
        *lines,
        f"figure: {out / 'by_layer.png'}",
        "What this does not show:",
        *(f"- {line}" for line in DOES_NOT_SHOW),
        sep="\n",
    )


if __name__ == "__main__":
    main()
