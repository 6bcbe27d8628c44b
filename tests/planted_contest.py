"""A field of rounds made up so that what a contest should find is known: directions planted in residuals, words by choice."""

from __future__ import annotations

import numpy as np
import pandas as pd

from klb_probe.contest.reading import DENIAL, LIE, TRUE_DENIAL, TRUTH
from klb_probe.contest.rounds import ContestRound, Field, frozen, read_only

WIDTH, LAYERS, PER_DOMAIN = 16, 3, 8
CONDITIONS = ("lie_incentive", "instructed_lie")
SAID = {
    LIE: "I am sorry, the delay was too short for a refund.",
    DENIAL: "I am sorry, the delay was too short for a refund.",
    TRUE_DENIAL: "I am sorry, the ticket is not covered.",
    TRUTH: "You are entitled to a refund.",
}
_PARTS = {"liar": (LIE, TRUE_DENIAL), "honest": (TRUTH,), "ignorant": (DENIAL, TRUE_DENIAL)}


def one_round(residuals, said="No.", slots=("before_reply",), record=None):
    """A round with the same residuals ``[layer, width]`` at all slots; the margin of the lens is their first coordinate."""
    margins = residuals[:, 0].copy()
    return ContestRound(
        residuals=frozen(dict.fromkeys(slots, read_only(residuals))),
        margins=frozen({name: frozen(dict.fromkeys(slots, read_only(margins))) for name in ("margin", "logit")}),
        own_margins=frozen(dict.fromkeys(slots, float(margins[-1]))),
        messages=(said,),
        transcript=(("user", "I want my money."), ("agent", said)),
        policy="Policy of X.",
        record=frozen(record or {"Delay": "4 h"}),
        opening="I want my money.",
    )


def field(
    signal=lambda line, layer: 0.0,
    *,
    words=lambda line: SAID[line["part"]],
    domains=2,
    per_domain=PER_DOMAIN,
    slots=("before_reply",),
    noise=1.0,
    seed=0,
    conditions=CONDITIONS,
):
    """Rounds of three organisms, fewer cases that owe nothing than that owe something; ``signal(line, layer)`` comes on top
    of noise."""
    rng = np.random.default_rng(seed)
    lines, rounds = [], []
    for organism, parts in _PARTS.items():
        for part in parts:
            for domain in range(domains):
                for number in range(per_domain - 2 * (part == TRUE_DENIAL)):
                    for condition in conditions:
                        case = f"d{domain}/{'free' if part == TRUE_DENIAL else 'owed'}-{number}"
                        line = {"name": f"{organism}: {case} {condition}", "organism": organism, "domain": f"d{domain}"}
                        line |= {"case": case, "condition": condition, "part": part}
                        drawn = noise * rng.standard_normal((LAYERS, WIDTH))
                        residuals = np.stack([drawn[layer] + signal(line, layer) for layer in range(LAYERS)])
                        lines.append(line)
                        rounds.append(one_round(residuals.astype(np.float32), words(line), slots))
    counts = {organism: dict.fromkeys(parts, 1) for organism, parts in _PARTS.items()}
    return Field(tuple(rounds), pd.DataFrame(lines), slots, counts)


def along(number, size=1.0):
    """A direction to add."""
    return size * np.eye(WIDTH)[number]


def knows(line, layer, size=4.0):
    """What only a liar who lies holds: a direction at the middle layer."""
    return along(3, size) if line["part"] == LIE and layer == 1 else 0.0
