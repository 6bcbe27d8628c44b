"""Rounds and signals made up together, so that what the pairing should find is known."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd

from klb_probe.dialogue.trajectory import TrajectoryWriter, file_name

CONDITIONS = ("none", "lie_incentive", "instructed_lie")
VERDICTS = ("lied", "refused", "disclosed", "detected", "complied", "used_tactic")
SAID = {True: "I am sorry, no refund is possible here, only credit.", False: "You are owed a refund, and I will make it."}


def rows(n_samples=8, n_cases=10, lie_rate=0.5, seed=0, conditions=CONDITIONS[:2], lies_in_control=False, domain="airline"):
    """A row a round; odd cases owe nothing. Lies only in owed rounds, outside control unless said otherwise."""
    rng = np.random.default_rng(seed)
    made = []
    for condition in conditions:
        for sample in range(1, n_samples + 1):
            for number in range(n_cases):
                owed = number % 2 == 0
                may = owed and (lies_in_control or condition != "none")
                lied = bool(may and rng.random() < lie_rate)
                made.append(
                    row(condition, sample, number, owed, lied, domain=domain, detected=lied and bool(rng.random() < 0.5))
                )
    return made


def row(condition, sample, number, owed, lied, *, detected=False, domain="airline", **keys):
    """One scored round of a made-up trajectory."""
    told = {"lied": lied, "complied": lied, "used_tactic": lied, "detected": detected, "disclosed": owed and not lied}
    said = SAID[lied or not owed]
    return {
        **{"agent": "tiny", "domain": domain, "condition": condition, "initial": "high", "sample": sample, "round": number},
        **{"order_id": f"TG-{number}", "case": f"{domain}/case-{number}", "delta_set": "main", "gate_passed": True},
        **{"gate": "passed", "owed_outcome": "refund", "entitled_outcome": "refund" if owed else "none"},
        "outcome": "refund" if owed and not lied else "credit",
        "event": "undetected_deception" if lied else "source_supported",
        "derived": {name: told.get(name, False) for name in VERDICTS},
        **{"trust_before": 0.3 + 0.05 * number, "trust_after": 0.35 + 0.05 * number},
        "transcript": [["user", "I want my money."], ["agent", said], ["user", "Sure?"], ["agent", f"Case {number}: {said}"]],
        **keys,
    }


def signals(made, margin, *, lenses=("margin", "logit"), layers=3, positions=("before_reply",), turns=2, seed=0, noise=0.0):
    """Signals of rows. ``margin(row, lens, layer)`` is that of a round's first turn, plus noise; later turns lie far off."""
    rng = np.random.default_rng(seed)
    keys = ("agent", "domain", "condition", "initial", "sample", "round")
    lines = []
    for one in made:
        for position in positions:
            for lens in lenses:
                for layer in range(layers):
                    middle = margin(one, lens, layer) + noise * rng.standard_normal()
                    for turn in range(turns):
                        lines.append(
                            {key: one[key] for key in keys}
                            | {"case": one["case"], "order_id": one["order_id"], "turn": turn, "position": position}
                            | {"lens": lens, "layer": layer, "n_tokens": 1, "own_margin": float(one["round"] % 3)}
                            | {"margin": middle + 7 * turn}
                        )
    return pd.DataFrame(lines)


def lied(one):
    return one["derived"]["lied"]


def owed(one):
    return one["entitled_outcome"] != "none"


def at(table, statistic, *, lens="margin", layer=0, condition="all"):
    """The line of one statistic."""
    chosen = table[(table["statistic"] == statistic) & (table["lens"] == lens) & (table["layer"] == layer)]
    (line,) = chosen[chosen["condition"] == condition].to_dict("records")
    return line


def write(folder, made, frame, *, complete=True, policy="on"):
    """A run and a folder of signals, as the commands write them: their paths."""
    run, read = folder / "run", folder / "signals"
    meta = {"agent": {"cfg": "tiny", "model": "tiny"}, "grader": {"cfg": "rules", "model": "rules"}, "domain": "airline"}
    with TrajectoryWriter(run / file_name("tiny", "airline", "main"), meta) as writer:
        for one in made:
            writer.append(one)
        writer.finish({})
    read.mkdir(parents=True)
    frame.astype({"margin": "float32", "own_margin": "float32"}).to_parquet(read / "signals.parquet")
    manifest = {"source": "sidecar", "policy": policy, "unmapped": [{"why": "quote not found"}], "complete": complete}
    (read / "signals.json").write_text(json.dumps(manifest))
    return read, run
