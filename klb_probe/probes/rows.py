"""The table of what is probed: one line a scenario's prompt or a played round, the same columns for both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

# Nullable types where a scenario has nothing.
_TYPES = {
    **dict.fromkeys(("kind", "id", "group", "situation", "domain", "framing"), "object"),
    **{"paraphrase": "int64", "question": "object", "entitled": "bool", "answer": "object", "n_tokens": "int64"},
    **{"text": "object", "condition": "object", "lied": "boolean", "initial": "object", "sample": "Int64", "round": "Int64"},
}


def row_table(lines: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """A table of lines, all with the same columns; what a scenario or a round has not is None or missing.

    ============  =====================================================================================
    kind          scenario or round
    id            names the line
    group         id of the case that a prompt, its twin's, and a round are of
    situation     of scenarios: id of the case, or of its twin
    domain
    framing       of scenarios; with question (plain or reversed) and paraphrase (1, 2, ...; of rounds 0)
    entitled      whether the customer is
    answer        of scenarios: the right one, Yes or No
    n_tokens      of the prompt; of rounds, of that before the agent's first turn
    text          of the prompt; of rounds, the agent's words
    condition     of rounds, under the paper's name; with lied, initial (trust), sample, round
    ============  =====================================================================================
    """
    return pd.DataFrame([{name: line.get(name) for name in _TYPES} for line in lines], columns=list(_TYPES)).astype(_TYPES)
