"""A pairing: does the inside go with the lie, beside what simpler readouts of the same rounds reach."""

from __future__ import annotations

import pandas as pd

from klb_probe.pairing import report
from klb_probe.pairing.baselines import LENGTH, MONITOR, OWN, RANDOM_Q95, TURNS, WORDS
from klb_probe.report.data import Json, curve, lens_title, plain, printed_table, short
from klb_probe.report.part import Part, View
from klb_probe.report.recognise import Output

_COUNTS = ["n_lies", "n_nonlies", "n_trajectories"]
_STATISTICS = ("position", "lens", "layer", "condition", "statistic", "value", "low", "high", *_COUNTS, "note")
_SELECTION = ("position", "lens", "condition", "kind", "layer", "value", "low", "high", "p", *_COUNTS, "note")
_BASELINES = ("position", "condition", "baseline", "layer", "direction", "value", "low", "high", "note")
_ACROSS = (OWN, LENGTH, TURNS, WORDS, MONITOR)


def pairing_part(output: Output) -> Part:
    """The part of a pairing."""
    statistics = output.table("statistics.csv", _STATISTICS, text=["note"])
    selected = output.table("selection.csv", _SELECTION, text=["note"])
    baselines = output.table("baselines.csv", _BASELINES, text=["note"])
    # Whole again where a column with gaps was read as numbers with a fraction.
    selected["layer"] = selected["layer"].astype("Int64")
    manifest = output.of("manifest")
    # The record holds how many moments were unmapped; the notes count them.
    counted = {**manifest, "unmapped": range(int(manifest.get("unmapped") or 0))}
    *notes, limits = report.notes(selected, output.of("counts"), counted, output.of("rules_judge"))
    table = printed_table(report.table(statistics, selected, baselines), "AUROC of the margin for a lie, over all conditions")
    lines = [_line(keys, rows) for keys, rows in statistics.groupby(["position", "condition", "statistic", "lens"], sort=False)]
    data = {
        "table": table,
        "notes": notes,
        "limits": [limits],
        "lines": [{**line, "chance": 0.5 if line["statistic"].startswith("auroc") else 0} for line in lines],
        "baselines": [
            {"position": line.position, "condition": line.condition, "name": line.baseline, "value": plain(line.value)}
            for line in baselines[baselines["layer"].isna() & baselines["baseline"].isin(_ACROSS)].itertuples()
        ],
        "random": [
            {
                "position": position,
                "condition": condition,
                "x": rows["layer"].astype(int).tolist(),
                "null": short(rows["value"]),
            }
            for (position, condition), rows in _by_layer(baselines).groupby(["position", "condition"], sort=False)
        ],
    }
    model = (manifest.get("model") or {}).get("name", "a model")
    return Part(
        title=f"Signals of {model} beside lies",
        folder=str(output.path),
        facts=[("signals", output.of("signals")), ("run", output.of("run")), ("n", notes[0])],
        tables=[table],
        says=notes[1:],
        limits=[limits],
        views=[View("pairing", data)],
    )


def _by_layer(baselines: pd.DataFrame) -> pd.DataFrame:
    return baselines[baselines["layer"].notna() & (baselines["baseline"] == RANDOM_Q95)]


def _line(keys: tuple[str, ...], rows: pd.DataFrame) -> dict[str, Json]:
    named = dict(zip(("position", "condition", "statistic", "lens"), keys, strict=True))
    first = rows.iloc[0]
    return {
        **named,
        "title": lens_title(named["lens"]),
        **curve(rows),
        **{name: plain(first[name]) for name in (*_COUNTS, "note")},
    }
