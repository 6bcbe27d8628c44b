"""Package versions for the records outputs keep."""

from __future__ import annotations

import importlib.metadata
import platform

_PACKAGES = ("klb-probe", "torch", "transformers", "numpy", "pandas", "safetensors")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in _PACKAGES}}
