"""Command-line options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from klb_probe.errors import KlbError

Model = Annotated[str, typer.Option(help="Alias, hub id (owner/name), model folder, or .gguf file.")]
Contrast = Annotated[str, typer.Option(help="YES/NO word forms, single tokens; several pairs with commas.")]
Bos = Annotated[str, typer.Option(help="BOS before plain text: auto (as the tokenizer does) | always | never.")]
Device = Annotated[str, typer.Option(help="auto | cuda | mps | cpu | auto-map (over all GPUs, then the CPU and disk).")]
Dtype = Annotated[str, typer.Option(help="auto | float32 | bfloat16 | float16.")]
Quantise = Annotated[str | None, typer.Option(help="4bit | 8bit: weights made small by bitsandbytes; results say so.")]
Backend = Annotated[str, typer.Option(help="What reads residuals: huggingface | transformer_lens | nnsight.")]
Remote = Annotated[
    bool, typer.Option("--remote", help="Read a hub model that NDIF serves (key in NDIF_API_KEY); its weights stay there.")
]
Revision = Annotated[str | None, typer.Option(help="Hub revision to pin.")]
Hooks = Annotated[list[Path] | None, typer.Option(help="Folder with further hook maps.")]
Spaces = Annotated[
    str, typer.Option(help="Forms of each word: lead (as the prompt leads to) | both (with a space and without).")
]
Reduce = Annotated[str, typer.Option(help="Several pairs become one margin by: mean | first | max | logsumexp.")]
Cases = Annotated[
    str,
    typer.Option(
        help="ours | organisms (brief policies) | a scenarios folder | knownliebench:PATH | hub:franciscoliu/KnownLieBench."
    ),
]
Shard = Annotated[
    str | None, typer.Option("--shard", help="i/n: only every n-th trajectory, from the i-th; then klb-probe merge.")
]
Ray = Annotated[
    bool, typer.Option("--ray", help="In shards on a Ray cluster (RAY_ADDRESS, else this machine), one worker a GPU.")
]
Workers = Annotated[
    int | None, typer.Option("--workers", help="Workers of --ray (default: one a GPU; on CPUs it must be said).", min=1)
]
Domains = Annotated[str, typer.Option(help="Domains, with commas, or all.")]


def check_shard_options(shard: str | None, ray: bool, workers: int | None, device: str) -> None:
    """KlbError for options that do not go together."""
    if shard and ray:
        raise KlbError("--ray makes its own shards; pass --shard or --ray, not both")
    if workers and not ray:
        raise KlbError("--workers are those of --ray; pass --ray too")
    if ray and (device == "auto-map" or ":" in device):
        raise KlbError(f"--ray gives each worker a GPU of its own; leave out --device {device}")
    if ray and device == "cpu" and workers is None:
        raise KlbError("--ray counts its workers by GPUs, and --device cpu takes none; pass --workers N too")


def parse_names(text: str) -> list[str] | None:
    """Names given with commas; None for ``all``."""
    return None if text == "all" else [name.strip() for name in text.split(",")]
