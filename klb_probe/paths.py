"""Where the project's data and the user's cache are."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

_PACKAGE = Path(__file__).parent


def data_dir(kind: str) -> Path:
    """The folder ``scenarios``, ``hooks``, ``lenses`` or ``organisms``: beside the package, or inside it when installed."""
    installed = _PACKAGE / "data" / kind
    return installed if installed.is_dir() else _PACKAGE.parent / kind


def cache_dir() -> Path:
    """The user's cache folder; the environment variable KLB_PROBE_CACHE moves it."""
    return Path(os.environ.get("KLB_PROBE_CACHE") or platformdirs.user_cache_dir("klb_probe"))
