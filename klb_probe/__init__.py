"""klb_probe: look inside open-weight models that know, or do not know, what a customer is owed.

    >>> import klb_probe as klb                                     # doctest: +SKIP
    >>> model = klb.load_model("smollm2-135m")                      # doctest: +SKIP
    >>> table = klb.eligibility_margins(model, klb.load_lens(model))  # doctest: +SKIP

Names below are imported when first used: importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "JacobianLens": "klb_probe.lens.jacobian",
    "KlbError": "klb_probe.errors",
    "LogitLens": "klb_probe.lens.margin",
    "MarginLens": "klb_probe.lens.margin",
    "Margins": "klb_probe.signals.margins",
    "Pairing": "klb_probe.pairing.api",
    "ProbeOptions": "klb_probe.probes.results",
    "ProbeResults": "klb_probe.probes.results",
    "Run": "klb_probe.dialogue.runner",
    "TokenContrast": "klb_probe.lens.contrast",
    "eligibility_margins": "klb_probe.signals.margins",
    "from_model": "klb_probe.models.load",
    "load_cases": "klb_probe.cases.sources",
    "load_directions": "klb_probe.probes.directions",
    "load_domains": "klb_probe.cases.load",
    "load_lens": "klb_probe.lens.library",
    "load_model": "klb_probe.models.load",
    "load_probe": "klb_probe.probes.directions",
    "load_run": "klb_probe.dialogue.api",
    "pair": "klb_probe.pairing.api",
    "panel": "klb_probe.metrics.panel",
    "registry": "klb_probe.models.registry",
    "resolve": "klb_probe.models.registry",
    "round_margins": "klb_probe.signals.from_files",
    "run_dialogues": "klb_probe.dialogue.api",
    "train_probes": "klb_probe.probes.api",
    "view_scenario": "klb_probe.view",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'klb_probe' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
