"""Draw what ``klb-probe probe`` found: AUROC by layer, transfers, scores, and the questions beside each other.

python analyses/framing_probes.py --probes outputs/probe [outputs/probe-other ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from klb_probe.probes.figures import auroc_by_layer, score_distributions, side_by_side, transfer_map
from klb_probe.probes.report import DOES_NOT_SHOW, reading
from klb_probe.probes.tables import CONTROLS, controls, main_split, nested_probes

SHOWN = [
    "question", "position", "estimator", "split", "layer", "auroc", "auroc_low", "auroc_high",
    "n", "n_positive", "n_groups", "note",
]  # fmt: skip


def read(folder: Path, name: str) -> pd.DataFrame | None:
    """A table of a folder; None if it was not written."""
    path = folder / f"{name}.csv"
    return pd.read_csv(path) if path.exists() else None


def drawn(probes: pd.DataFrame) -> pd.DataFrame:
    """The numbers of the figure of all questions: a row a probe, and AUROC of each control beside it."""
    rows = main_split(nested_probes(probes))
    beside = pd.DataFrame([controls(probes, line) for line in rows.itertuples()], index=rows.index, columns=CONTROLS)
    return rows[SHOWN].join(beside)


def main() -> None:
    """Read the tables of each folder; write its figures, and one table of what stands beside each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probes", type=Path, nargs="+", required=True, help="folders that klb-probe probe wrote")
    parser.add_argument("--out", type=Path, help="folder for figures and table (default: the first of --probes)")
    arguments = parser.parse_args()
    out = arguments.out or arguments.probes[0]
    out.mkdir(parents=True, exist_ok=True)
    tables = []
    for folder in arguments.probes:
        probes, transfer, scores = (read(folder, name) for name in ("probes", "transfer", "scores"))
        if probes is None:
            parser.error(f"{folder} has no probes.csv; give a folder that klb-probe probe wrote")
        figures = {"auroc_by_layer": auroc_by_layer(probes), "questions": side_by_side(probes)}
        if transfer is not None and len(transfer):
            figures["transfer"] = transfer_map(transfer)
        if scores is not None and len(scores):
            figures["scores"] = score_distributions(scores)
        before = f"{folder.resolve().name}_" if len(arguments.probes) > 1 else ""
        for name, figure in figures.items():
            figure.savefig(out / f"{before}{name}.png", dpi=130)
            print(f"figure: {out / f'{before}{name}.png'}")
        tables.append(drawn(probes).assign(folder=str(folder)))
        print(*reading(probes, transfer), sep="\n")
    pd.concat(tables).to_csv(out / "framing_probes.csv", index=False, float_format="%.6g")
    print("What this does not show:", *DOES_NOT_SHOW, sep="\n- ")


if __name__ == "__main__":
    main()
