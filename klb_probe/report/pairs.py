"""The pairs of a run: both twins' prompts line by line, what differs between them, and their margins by depth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from klb_probe.report.data import lens_title, short
from klb_probe.report.part import View

RECORD = "Record on file:"  # where the prompt's own part begins; policy and private note come before


def pairs_view(labels: pd.DataFrame, texts: Sequence[str], lenses: Sequence[str], margins: np.ndarray, own: np.ndarray) -> View:
    """A chunk a domain. Lines of prompts are held once a domain, because prompts share most of theirs.

    Args:
        labels: One row a prompt: scenario, pair, domain, entitled, framing, paraphrase, question, answer.
        texts: Each prompt.
        lenses: Their names.
        margins: ``[prompt, lens, layer]``.
        own: The model's own margin ``[prompt]``.
    """
    listed, chunks = [], {}
    for domain, rows in labels.groupby("domain", sort=False):
        lines: dict[str, int] = {}
        prompts = []
        for at in rows.index:
            row = labels.loc[at]
            prompts.append(
                {
                    **{name: row[name] for name in ("scenario", "pair", "framing", "question", "answer")},
                    **{"entitled": bool(row["entitled"]), "paraphrase": int(row["paraphrase"])},
                    "own": short(own[at : at + 1])[0],
                    "text": [lines.setdefault(line, len(lines)) for line in texts[at].split("\n")],
                    "margins": [short(margins[at, lens]) for lens in range(len(lenses))],
                }
            )
        chunks[str(domain)] = {"lines": list(lines), "prompts": prompts}
        for pair, sides in rows.groupby("pair", sort=False):
            listed.append({"pair": pair, "domain": domain, "differs": _differs(sides, texts)})
    shared = {name: list(dict.fromkeys(labels[name].tolist())) for name in ("domain", "framing", "paraphrase", "question")}
    data = {"pairs": listed, "lenses": [lens_title(name) for name in lenses], "record": RECORD, **shared}
    return View("pairs", data, chunks)


def _differs(sides: pd.DataFrame, texts: Sequence[str]) -> list[list[str]]:
    """The lines of the owed prompt that its twin lacks, and the twin's own; none without a twin."""
    first = sides[
        (sides[["framing", "paraphrase", "question"]] == sides[["framing", "paraphrase", "question"]].iloc[0]).all(axis=1)
    ]
    prompts = {bool(owed): texts[at].split("\n") for at, owed in first["entitled"].items()}
    if len(prompts) < 2:
        return []
    return [[line for line in prompts[side] if line not in prompts[not side]] for side in (True, False)]
