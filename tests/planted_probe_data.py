"""Probe data made up so that what a probe should find is known: a table of prompts, and residuals with planted directions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.margin import LogitLens
from klb_probe.models.readout import TokenReadout
from klb_probe.probes.data import ProbeData
from klb_probe.probes.rows import row_table
from klb_probe.probes.site import Site

WIDTH, LAYERS, DOMAINS, PAIRS = 24, 4, 4, 6
FRAMINGS = ("honest", "deny", "incentive")


@dataclass
class PlantedStore:
    """Stands for a residual store: what ``values`` gives for a row and layer, by the site's key."""

    values: dict[str, np.ndarray]
    n_layers: int = LAYERS
    d_model: int = WIDTH
    facts: dict[str, str] = field(default_factory=lambda: {"model": "planted"})

    def load(self, sites, layer):
        return np.stack([self.values[site.key][layer] for site in sites]).astype(np.float32)


def unit(number):
    """A fixed direction a number, orthogonal to the others."""
    return np.eye(WIDTH)[number]


def planted(
    signal=lambda line, layer: 0.0, *, framings=FRAMINGS, words=lambda line: "", noise=1.0, seed=0, pairs=PAIRS, rounds=0
):
    """Probe data of ``DOMAINS x pairs`` pairs a framing; ``signal(line, layer)`` is added to Gaussian residuals."""
    rng = np.random.default_rng(seed)
    lines, sites, values = [], [], {}
    for domain in range(DOMAINS):
        for pair in range(pairs):
            case = f"d{domain}/case-{pair}"
            shared = {"group": case, "domain": f"d{domain}"}
            for framing in framings:
                for entitled in (True, False):
                    question = ("plain", "reversed")[pair % 2]
                    line = {"kind": "scenario", "framing": framing, "paraphrase": 1 + pair % 2, "question": question, **shared}
                    line |= {"situation": case + "~twin" * (not entitled), "entitled": entitled, "n_tokens": 10 + pair}
                    line |= {"answer": "Yes" if entitled is (question == "plain") else "No"}
                    line |= {"id": f"{line['situation']} {framing}"}
                    lines.append(line | {"text": f"case {case} {words(line)}"})
            for number in range(rounds):
                line = {"kind": "round", "paraphrase": 0, "entitled": True, "n_tokens": 20, **shared}
                line |= {"condition": ("control", "emergent")[number % 2], "lied": number % 2 == 1 and pair % 3 > 0}
                line |= {"id": f"{case} round {number}", "initial": "high", "sample": 1, "round": number}
                lines.append(line | {"text": f"round {case}"})
    for number, line in enumerate(lines):
        site = Site((number, number + 1), (1,))
        sites.append(site)
        values[site.key] = np.stack([noise * rng.standard_normal(WIDTH) + signal(line, layer) for layer in range(LAYERS)])
    return ProbeData(row_table(lines), {"answer": sites}, PlantedStore(values))


def logit_lens(seed=0):
    """A logit lens over made-up head rows of one Yes and one No."""
    rows = torch.tensor(np.random.default_rng(seed).standard_normal((2, WIDTH)), dtype=torch.float32)
    readout = TokenReadout(rows, torch.zeros(2), eps=1e-6, centred=False, softcap=None)
    return LogitLens(TokenContrast(((("Yes", 0), ("No", 1)),)), readout, torch.zeros(4, WIDTH))
