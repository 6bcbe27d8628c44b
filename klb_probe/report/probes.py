"""Linear probes: AUROC by layer with every control, transfers, and the reading in words."""

from __future__ import annotations

import pandas as pd

from klb_probe.probes.report import DOES_NOT_SHOW, reading, table, transfer_table
from klb_probe.probes.results import PROBE_COLUMNS, TRANSFER_COLUMNS
from klb_probe.probes.tables import CHANCE, CONTROLS, PROBE, counted, main_split
from klb_probe.report.data import Json, curve, plain, printed_table
from klb_probe.report.part import Part, View
from klb_probe.report.recognise import Output

_AUROC = {"value": "auroc", "low": "auroc_low", "high": "auroc_high"}


def probes_part(output: Output) -> Part:
    """The part of a run of ``klb-probe probe``."""
    probes, transfer = output.table("probes.csv", PROBE_COLUMNS), output.table("transfer.csv", TRANSFER_COLUMNS)
    said, limits = reading(probes, transfer), [f"Does not show {line}." for line in DOES_NOT_SHOW]
    printed = printed_table(table(probes), "Probes whose layer was chosen within the training folds, beside their controls")
    panels = [
        _panel(str(question), str(position), rows)
        for (question, position), rows in main_split(probes).groupby(["question", "position"], sort=False)
    ]
    data = {
        "table": printed,
        "transfer": printed_table(transfer_table(transfer), "Trained on one population, tested on another"),
        "panels": panels,
        "chance": CHANCE,
        "says": said,
        "limits": limits,
    }
    model = output.of("model", "name")
    return Part(
        title=f"Probes of {model}",
        folder=str(output.path),
        facts=[("model", model), ("questions", ", ".join(dict.fromkeys(probes["question"])))],
        tables=[printed],
        says=said,
        limits=limits,
        views=[View("probes", data)],
    )


def _panel(question: str, position: str, rows: pd.DataFrame) -> dict[str, Json]:
    """Lines by layer of one question at one position, the chosen layers, and controls that have no layer."""
    by_layer = rows[rows["choice"] == "layer"]
    lines = [
        {"estimator": plain(estimator), "feature": feature, "control": feature in CONTROLS, **_mean(found)}
        for (feature, estimator), found in by_layer.groupby(["feature", "estimator"], sort=False, dropna=False)
    ]
    flat = rows[(rows["choice"] != "layer") & rows["feature"].isin(CONTROLS) & rows["auroc"].notna()]
    nested = rows[(rows["choice"] == "nested") & (rows["feature"] == PROBE)]
    return {
        "question": question,
        "position": position,
        "counted": counted(nested.iloc[0]) if len(nested) else "",
        "lines": lines,
        "flat": [
            {"feature": feature, "value": float(found["auroc"].max())} for feature, found in flat.groupby("feature", sort=False)
        ],
        "nested": [
            {
                "estimator": line.estimator,
                "layer": plain(line.layer),
                **{to: plain(getattr(line, of)) for to, of in _AUROC.items()},
            }
            for line in nested.itertuples()
        ],
        "note": next((str(note) for note in rows["note"].dropna() if rows["auroc"].isna().all()), ""),
    }


def _mean(rows: pd.DataFrame) -> dict[str, Json]:
    """A line by layer; of several runs of one control (shuffles) their mean, between the lowest and the highest."""
    if not rows["layer"].duplicated().any():
        return curve(rows, columns=_AUROC)
    runs = rows.groupby("layer")["auroc"].agg(["mean", "min", "max"]).reset_index()
    return curve(runs, columns={"value": "mean", "low": "min", "high": "max"})
