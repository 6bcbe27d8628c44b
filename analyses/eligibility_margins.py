"""Redraw the margins-by-depth figure and print the tables of a saved ``jlens`` run.

python analyses/eligibility_margins.py --run outputs/demo --out outputs/demo/redrawn.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd
from rich.console import Console

from klb_probe.plots import margins_by_depth
from klb_probe.signals import report


def main() -> None:
    """Read ``summary.csv`` and ``run.json`` of a run; write a figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder that jlens wrote")
    parser.add_argument("--out", type=Path, help="figure (default: margins.png in the run's folder)")
    arguments = parser.parse_args()
    summary = pd.read_csv(arguments.run / "summary.csv", dtype={"entitled": "boolean"})
    run = json.loads((arguments.run / "run.json").read_text(encoding="utf-8"))
    contrast = ", ".join(f"{yes[0]!r} minus {no[0]!r}" for yes, no in run["contrast"])
    out = arguments.out or arguments.run / "margins.png"
    margins_by_depth(summary, run["model"]["name"], contrast).savefig(out, dpi=130)
    console = Console()
    console.print(report.tables(summary))
    console.print(report.what_it_shows(summary, run["model"]["name"]))
    console.print(report.DOES_NOT_SHOW)
    console.print(f"figure: {out}")


if __name__ == "__main__":
    main()
