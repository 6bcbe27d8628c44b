"""From folders to a page."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from klb_probe.report.behaviour import behaviour_part
from klb_probe.report.margins import margins_part
from klb_probe.report.page import render
from klb_probe.report.pairing import pairing_part
from klb_probe.report.part import Part
from klb_probe.report.probes import probes_part
from klb_probe.report.recognise import Kind, Output, recognise
from klb_probe.report.rounds import rounds_part, signals_part
from klb_probe.report.tables import contest_part, organism_part
from klb_probe.report.tokens import tokens_part

_PARTS: dict[Kind, Callable[[Output], Part]] = {
    "jlens": margins_part,
    "tokens": tokens_part,
    "score": behaviour_part,
    "pair": pairing_part,
    "probe": probes_part,
    "contest": contest_part,
    "organism": organism_part,
}


def report(folders: Sequence[Path], title: str | None = None) -> str:
    """The page of everything the folders hold.

    Raises KlbError for what cannot be read; see :func:`klb_probe.report.recognise.recognise`.
    """
    parts = parts_of(recognise(folders))
    more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
    return render(title or f"{parts[0].title}{more}", page_data(parts))


def parts_of(outputs: Sequence[Output]) -> list[Part]:
    """The parts of outputs, in their order. Signals stand in their rounds; on their own they have a part without any."""
    signals = [one for one in outputs if one.kind == "signals"]
    runs = [one for one in outputs if one.kind == "run"]
    own = {run.path: [one for one in signals if one.path.parent.resolve() == run.path.resolve()] for run in runs}
    # Signals that lie elsewhere belong to the only run, or to none that is known.
    elsewhere = [one for one in signals if not any(one in found for found in own.values())]
    if len(runs) == 1:
        own[runs[0].path] += elsewhere
        elsewhere = []
    parts = []
    for one in outputs:
        if one.kind == "run":
            parts.append(rounds_part(one, own[one.path]))
        elif one.kind != "signals":
            parts.append(_PARTS[one.kind](one))
        elif one in elsewhere:
            parts.append(signals_part(one))
    return parts


def page_data(parts: Sequence[Part]) -> dict[str, Any]:
    """What goes into the page, by the id of its element: ``index``, and for each view its data and its chunks."""
    data: dict[str, Any] = {}
    listed, views = [], []
    for number, part in enumerate(parts):
        shown = ("title", "folder", "facts", "tables", "says", "limits")
        listed.append({name: getattr(part, name) for name in shown} | {"tabs": [view.tab for view in part.views]})
        for view in part.views:
            name = f"{view.tab}-{number}"
            chunks = {key: f"{name}-{at}" for at, key in enumerate(view.chunks)}
            views.append({"tab": view.tab, "title": part.title, "folder": part.folder, "data": name, "chunks": chunks})
            data[name] = view.data
            data |= {chunks[key]: chunk for key, chunk in view.chunks.items()}
    version = importlib.metadata.version("klb-probe")
    return {"index": {"parts": listed, "views": views, "version": version}, **data}
