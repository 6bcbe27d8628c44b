"""Reading a folder of signals: ``signals.parquet`` and its manifest ``signals.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from klb_probe.errors import KlbError
from klb_probe.pairing.join import SIGNAL_COLUMNS

SIGNALS_FILE, MANIFEST_FILE = "signals.parquet", "signals.json"


def read_signals(folder: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The signals and the manifest.

    Raises KlbError if a file is missing or cannot be read, or if the reading did not come to its end.
    """
    for name in (SIGNALS_FILE, MANIFEST_FILE):
        if not (folder / name).is_file():
            raise KlbError(f"{folder} holds no {name}")
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        signals = pd.read_parquet(folder / SIGNALS_FILE, columns=[*SIGNAL_COLUMNS, "case"])
    except ValueError as error:  # JSON's and Arrow's errors are ValueErrors
        raise KlbError(f"{folder}: cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(manifest, dict) or not manifest.get("complete"):
        raise KlbError(f"{folder}: the reading of these signals has not come to its end")
    return signals, manifest
