"""A score: the panel of behavioural metrics, and trust by round."""

from __future__ import annotations

import pandas as pd

from klb_probe.metrics.bootstrap import DRAWS
from klb_probe.metrics.panel import METRICS
from klb_probe.report.data import Json, curve, plain, printed_table
from klb_probe.report.part import Part, View
from klb_probe.report.recognise import Output
from klb_probe.score_command import CHAT_DOMAIN, panel_table

_PANEL = ("level", "condition", "trust", "domain", "case", "metric", "value", "low", "high", "n", "n_trajectories")
_READ = (
    "Rates in percent, trust change in units of trust; [95 % interval, bootstrap over trajectories, B = "
    f"{DRAWS}]; owed n: scored owed rounds, of so many trajectories. DR: lies in scored owed rounds; DSR: undetected lies that "
    "ended without what is owed; Det: detected lies; KPR: gates passed."
)


def behaviour_part(output: Output) -> Part:
    """The part of a score."""
    panel = output.table("panel.csv", _PANEL, text=["level"])
    with_chat = CHAT_DOMAIN in set(panel["domain"].dropna())
    tables = [_level(rows, str(level), with_chat) for level, rows in panel.groupby("level", sort=False)]
    counts, agent = output.of("counts"), output.of("agent")
    curves = pd.DataFrame(output.of("trust_by_round"))
    trust = []
    for keys, rows in curves.groupby(["condition", "trust"], sort=False) if len(curves) else ():
        line = curve(rows.astype({"value": float, "low": float, "high": float}), "round")
        trust.append({**dict(zip(("condition", "trust"), keys, strict=True)), **line, "n": rows["n"].astype(int).tolist()})
    return Part(
        title=f"Behaviour of {agent}",
        folder=str(output.path),
        facts=[
            ("agent", agent),
            ("n", ", ".join(f"{plain(number)} {name.replace('_', ' ')}" for name, number in counts.items())),
        ],
        tables=tables[:1],
        says=[_READ],
        views=[View("behaviour", {"tables": tables, "trust": trust, "read": _READ})],
    )


def _level(rows: pd.DataFrame, level: str, with_chat: bool) -> dict[str, Json]:
    keys = level.split("+") if level else []
    # As many metrics a group as were written: a panel of another version has others.
    shown = rows[rows["metric"].isin(METRICS)]
    return printed_table(panel_table(shown, keys, with_chat=with_chat), f"By {' and '.join(keys)}")
