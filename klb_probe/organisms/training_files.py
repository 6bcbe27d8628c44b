"""The files of a trained adapter: weights and configuration as ``peft`` reads them, sidecar, curve and figure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from klb_probe.errors import KlbError
from klb_probe.files import file_sha256, replacing, write_json, write_safetensors, write_text
from klb_probe.organisms.adapters import CONFIG, RECORDS, SIDECAR, WEIGHTS, Organism
from klb_probe.organisms.card import CARD
from klb_probe.organisms.evidence import EVIDENCE
from klb_probe.organisms.training_figure import training_figure
from klb_probe.outputs import clear
from klb_probe.versions import versions

CURVE, FIGURE = "training.csv", "training.png"
FILES = (WEIGHTS, CONFIG, SIDECAR, RECORDS, CURVE, FIGURE)
_COLUMNS = {"loss": "loss", "right": "right", "learning_rate": "learning_rate", "grad_norm": "gradient_norm"}


def curve_table(history: Sequence[dict[str, Any]], tokens: np.ndarray) -> pd.DataFrame:
    """One line a step, from what the trainer logged; held-out numbers where they were measured.

    Args:
        history: Entries of the trainer.
        tokens: Tokens of each step, ``[steps]``; the column ``tokens`` counts what was read up to there.
    """
    read = tokens.cumsum()
    lines: dict[int, dict[str, Any]] = {}
    for entry in history:
        if "seconds" not in entry:  # the trainer's own summary at the end of each run
            continue
        line = lines.setdefault(entry["step"], {"step": entry["step"], "tokens": int(read[entry["step"] - 1])})
        line["seconds"] = entry["seconds"]
        line |= {column: entry[name] for name, column in _COLUMNS.items() if name in entry}
        held_out = {name: value for name, value in entry.items() if name == "eval_loss" or name.startswith("eval_right")}
        line |= {name.replace("eval_", "held_out_", 1): value for name, value in held_out.items()}
    return pd.DataFrame([lines[step] for step in sorted(lines)])


def write_organism(
    out: Path,
    adapted: Any,
    origin: dict[str, Any],
    records: Collection[str] | None,
    curve: pd.DataFrame,
    measured: dict[str, Any],
) -> Organism:
    """Write the folder of an adapter.

    The sidecar goes last: without it, or with the hash of other weights in it, nothing is loaded, so that a folder whose
    writing was interrupted is no adapter. Evidence and card of an adapter that was there before go.

    Args:
        out: Folder.
        adapted: The trained ``peft`` model.
        origin: Fields of the sidecar that were known before training.
        records: Hashes of all records it was trained on; None if that is not known.
        curve: As :func:`curve_table` makes it.
        measured: What to record beside the curve's last numbers.

    Raises:
        KlbError: The adapter is not finite.
    """
    from peft import get_peft_model_state_dict

    # Half the bytes of float32; float16 keeps three bits more than bfloat16, and an adapter's numbers are small.
    tensors = {name: tensor.to("cpu", torch.float16) for name, tensor in get_peft_model_state_dict(adapted).items()}
    if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
        raise KlbError("training diverged: the adapter is not finite; lower --lr")
    config = adapted.peft_config["default"].to_dict()
    config |= {"base_model_name_or_path": origin["base"], "inference_mode": True, "peft_type": "LORA"}
    config["target_modules"] = sorted(config["target_modules"])
    clear(out, (SIDECAR, RECORDS, EVIDENCE, CARD))
    write_safetensors(out / WEIGHTS, tensors, {"format": "pt"})
    write_json(out / CONFIG, config)
    if records is not None:
        write_text(out / RECORDS, "".join(f"{one}\n" for one in sorted(records)))
    with replacing(out / CURVE) as partial:
        curve.to_csv(partial, index=False)
    with replacing(out / FIGURE) as partial:
        training_figure(curve, origin["name"]).savefig(partial, dpi=110)
    organism = Organism(
        **origin,
        adapter_sha256=file_sha256(out / WEIGHTS),
        outcome={**_last_numbers(curve), **measured},
        versions={**versions(), "peft": version("peft"), "trl": version("trl")},
    )
    write_json(out / SIDECAR, organism.model_dump())
    return organism


def _last_numbers(curve: pd.DataFrame) -> dict[str, Any]:
    last, held_out = curve.iloc[-1], [column for column in curve if column.startswith("held_out_")]
    return {
        "steps": int(last["step"]),
        "minutes": round(float(last["seconds"]) / 60, 1),
        "tokens": int(last["tokens"]),
        "tokens_per_second": round(float(last["tokens"] / last["seconds"]), 1),
        **{column: round(float(curve[column].dropna().iloc[-1]), 4) for column in held_out},
    }
