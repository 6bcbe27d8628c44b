"""Outputs that are shown as the tables their commands print: a contest of detectors, a check of an organism."""

from __future__ import annotations

from klb_probe.contest.report import printed
from klb_probe.contest.table import COLUMNS
from klb_probe.contest.words import DOES_NOT_SHOW, reading
from klb_probe.organisms.card import outcomes, tables
from klb_probe.organisms.evidence import read_evidence
from klb_probe.report.data import printed_table
from klb_probe.report.part import Part, View
from klb_probe.report.recognise import Output


def contest_part(output: Output) -> Part:
    """The part of a contest."""
    table = output.table("contest.csv", COLUMNS, text=["note", "position"])
    shown = printed_table(printed(table), "Detectors: AUROC of knowing lies, beside what random directions give")
    says, limits = reading(table), [f"Does not show {line}." for line in DOES_NOT_SHOW]
    counts = [
        (organism, ", ".join(f"{number} {what}" for what, number in counted.items()) or "no rounds")
        for organism, counted in output.of("counts").items()
    ]
    data = {"tables": [shown], "says": says, "limits": limits}
    return Part("Contest of detectors", str(output.path), counts, [shown], says[:3], limits, [View("tables", data)])


def organism_part(output: Output) -> Part:
    """The part of ``klb-probe organism check``."""
    evidence = read_evidence(output.path)
    shown = [
        {"title": one.title, "columns": list(one.columns), "rows": [list(line) for line in one.lines]}
        for one in tables(evidence.numbers)
    ]
    targets = [[one.target.says, one.target.wanted, str(one.number or ""), one.verdict] for one in outcomes(evidence)]
    if targets:
        shown.insert(0, {"title": "Targets", "columns": ["target", "wanted", "found", "verdict"], "rows": targets})
    facts = [("model", evidence.model), ("kind", evidence.kind or "no adapter"), ("command", evidence.command)]
    data = {"tables": shown, "says": [], "limits": []}
    return Part(f"Check of {evidence.model}", str(output.path), facts, shown[:1], views=[View("tables", data)])
