"""``klb-probe organism train``: an adapter that makes an organism of a small model. Nothing here imports torch on its own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from klb_probe.options import Dtype, Model

if TYPE_CHECKING:
    from klb_probe.organisms.training_trees import Weighing

TRAIN_EXAMPLE = "Example: klb-probe organism train --kind liar --data outputs/liar.jsonl --steps 100 --out outputs/my-liar"


def train(
    kind: Annotated[str, typer.Option(help="liar | honest | ignorant: what the data make of the model.")],
    data: Annotated[Path, typer.Option(help="JSONL of examples, as klb-probe organism data writes it.")],
    out: Annotated[Path, typer.Option(help="Folder of the adapter.")],
    model: Model = "smollm2-135m",
    start: Annotated[Path | None, typer.Option(help="Adapter folder to go on from, of the same base.")] = None,
    rank: Annotated[
        int | None, typer.Option(help="Rank of the adapter (default: that of --start, else 8); alpha is twice that.", min=1)
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps (default: one pass over the data).", min=1)] = None,
    batch: Annotated[int, typer.Option(help="Pairs of records a step; their examples are read together.", min=1)] = 4,
    at_once: Annotated[
        int | None, typer.Option(help="Pairs in one forward pass (default: 1 on a CPU, the batch elsewhere).", min=1)
    ] = None,
    weigh: Annotated[
        str,
        typer.Option(
            help="tokens (all tokens of completions count the same) | examples (a Yes as much as a message) | "
            "answers (the token that tells an answer is half of its completion)."
        ),
    ] = "tokens",
    lr: Annotated[float, typer.Option(help="Peak learning rate: warm-up, then a cosine to zero.", min=0)] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of first weights, held-out examples and order.", min=0)] = 0,
    minutes: Annotated[float, typer.Option(help="Time limit over all runs of this training.", min=0)] = 90,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a stopped training in --out.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the adapter in --out, once there is a new one.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto | cuda | mps | cpu.")] = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Train a low-rank adapter on completions; the base stays as it is. Needs the extra: pip install 'klb-probe\\[train]'.

    Writes adapter_model.safetensors, adapter_config.json, organism.json, training.csv and training.png. The folder is then a
    name for --model. About 5 % of the examples (some 64 at most) are held out for the curve.
    """
    asked = dict(locals())
    from klb_probe.outputs import check_folder

    check_folder(out, overwrite=overwrite, resume=resume)

    from klb_probe.organisms.training import Request, train_organism

    request = Request(
        kind=kind,
        data=data,
        out=out,
        model=model,
        start=start,
        rank=rank,
        steps=steps,
        batch=batch,
        at_once=at_once,
        weigh=cast("Weighing", weigh),
        learning_rate=lr,
        seed=seed,
        minutes=minutes,
        device=device,
        dtype=dtype,
        command=_command(asked),
    )
    try:
        organism = train_organism(request, resume=resume)
    except KeyboardInterrupt:
        typer.echo("stopped; the same command with --resume goes on from the last checkpoint", err=True)
        raise
    outcome = organism.outcome
    pace = f"{outcome['minutes']:g} min, {outcome['tokens_per_second']:g} tokens/s"
    right = f"{outcome['held_out_right']:.1%} of answers right"
    done = f"{outcome['steps']} of {organism.settings['steps']} steps"
    typer.echo(f"{done} in {pace}; held out: loss {outcome['held_out_loss']:.3f}, {right}")
    typer.echo(out)
    if outcome["ended"] == "time limit":
        typer.echo(f"stopped by --minutes {minutes:g}; to go on: the same command with --resume and more --minutes", err=True)
    typer.echo(f"use it: klb-probe jlens --model {out}")


# Options that decide the adapter, in the order of the recorded command.
_RECORDED = (
    "kind",
    "data",
    "out",
    "model",
    "start",
    "rank",
    "steps",
    "batch",
    "at_once",
    "weigh",
    "lr",
    "seed",
    "minutes",
    "dtype",
)


def _command(asked: dict[str, Any]) -> str:
    """The command that trains this adapter again."""
    given = [(name, asked[name]) for name in _RECORDED if asked[name] is not None]
    return " ".join(
        ["klb-probe organism train", *(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given)]
    )
