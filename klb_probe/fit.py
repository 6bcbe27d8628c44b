"""``klb-probe fit``: fit a lens, go on with a stopped fit, put shards together. Nothing here imports torch on its own."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klb_probe.errors import KlbError
from klb_probe.options import (
    Backend,
    Bos,
    Contrast,
    Device,
    Dtype,
    Hooks,
    Model,
    Quantise,
    Ray,
    Revision,
    Spaces,
    Workers,
    check_shard_options,
)
from klb_probe.outputs import check_writable

if TYPE_CHECKING:
    from klb_probe.lens.contrast import TokenContrast
    from klb_probe.lens.metadata import LensMetadata

EXAMPLE = "Example: klb-probe fit --model smollm2-135m --n 8 --out outputs/smollm2-135m.margin.safetensors"
# Blank lines make a line of each command.
MERGE_EXAMPLE = """Example:

klb-probe fit --n 16 --shard 1/2 --out outputs/1.safetensors

klb-probe fit --n 16 --shard 2/2 --out outputs/2.safetensors

klb-probe fit merge outputs/1.safetensors outputs/2.safetensors --out outputs/lens.safetensors"""

fit_app = typer.Typer(
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    epilog=EXAMPLE,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing --out, or start a stopped fit again.")]


@fit_app.callback()
def fit(
    context: typer.Context,
    model: Model = "smollm2-135m",
    kind: Annotated[str, typer.Option(help="margin (contrast rows and norm sketch) | full (whole Jacobians).")] = "margin",
    contrast: Contrast = "Yes/No",
    spaces: Spaces = "lead",
    corpus: Annotated[
        str,
        typer.Option(help="sampled (text the model samples itself) | wikitext | a .txt, .jsonl, .parquet file or folder."),
    ] = "sampled",
    n: Annotated[int, typer.Option(help="Prompts to fit on.", min=1)] = 64,
    max_len: Annotated[int, typer.Option(help="Tokens a prompt.", min=2)] = 128,
    skip_first: Annotated[int, typer.Option(help="Leading positions left out (attention sinks).", min=0)] = 16,
    target_layer: Annotated[str, typer.Option(help="last | penultimate block.")] = "last",
    layers: Annotated[str, typer.Option(help="Source layers: all, or such as 0,5,10-15. The earliest sets the cost.")] = "all",
    k: Annotated[int, typer.Option(help="Rows of the norm sketch.", min=1)] = 32,
    seed: Annotated[int, typer.Option(help="Seed of sketch and sampling.")] = 0,
    batch: Annotated[
        int | None,
        typer.Option(help="Cotangents in one backward pass (by kind and device); halved when memory is short.", min=1),
    ] = None,
    bos: Bos = "auto",
    shuffle: Annotated[
        bool, typer.Option("--shuffle", help="Put the tokens of each prompt in random order: a control for jlens --shuffled.")
    ] = False,
    normalise: Annotated[
        bool, typer.Option("--normalise", help="Every prompt weighs the same, however large its Jacobian (heavy tails).")
    ] = False,
    until: Annotated[
        float | None,
        typer.Option(help="Stop once even and odd prompts agree this well (cosine, such as 0.99; 8 prompts at least)."),
    ] = None,
    shard: Annotated[str | None, typer.Option(help="i/n: fit every n-th prompt only; then klb-probe fit merge.")] = None,
    ray: Ray = False,
    workers: Workers = None,
    out: Annotated[
        Path | None, typer.Option(help="Lens file: .pt for a full lens; else the user's lens cache by default.")
    ] = None,
    overwrite: Overwrite = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a stopped fit to the same --out.")] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Prompts that a killed fit loses at most.", min=1)] = 8,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantise: Quantise = None,
    backend: Backend = "huggingface",
    revision: Revision = None,
    hooks: Hooks = None,
) -> None:
    """Fit a lens for a model and save it where `klb-probe jlens` finds it. `fit merge` puts shards together."""
    if context.invoked_subcommand:
        return
    asked = dict(context.params)
    if overwrite and resume:
        raise KlbError("pass --overwrite or --resume, not both")
    if max_len <= skip_first + 1:
        raise KlbError(f"--max-len {max_len} leaves nothing after --skip-first {skip_first} and the last token")
    if until is not None and not 0 < until <= 1:
        raise KlbError(f"--until wants a cosine above 0 and up to 1, such as 0.99; got {until:g}")
    if kind not in ("margin", "full"):
        raise KlbError(f"unknown --kind {kind!r}; one of margin, full")
    check_shard_options(shard, ray, workers, device)
    if out is None and (kind == "full" or shard or ray):
        raise KlbError(f"a {'full lens' if kind == 'full' else 'shard' if shard else 'fit with --ray'} needs --out FILE")
    if out:
        _check_suffix(out, kind)
        _check_out(out, overwrite, resume)
    if shard:
        from klb_probe.sharding import Shard

        asked["shard"] = Shard.parse(shard)
    asked["layers"] = parse_layers(layers)
    if ray:
        _on_ray(asked)
    else:
        _fit(asked)


def _on_ray(asked: dict) -> None:
    """The fit in shards on a Ray cluster, merged."""
    from klb_probe.lens.shards import merge_files
    from klb_probe.ray_workers import in_shards

    again = {name: asked[name] for name in ("workers", "device", "resume", "overwrite")}
    # More workers than prompts would have nothing to fit on.
    again["most"] = asked["n"]
    again["asked"] = _command(asked)
    in_shards(_fit_shard, {"asked": asked}, asked["out"], partial(merge_files, command=_command(asked)), **again)
    typer.echo(f"{asked['out']}\nread with it: klb-probe jlens --model {asked['model']} --lens {asked['out']}")


def _fit_shard(asked: dict, shard: str, out: Path) -> None:
    """A shard of a fit, gone on with if its worker died; one that is there is done."""
    from klb_probe.sharding import Shard

    if not out.exists():
        _fit({**asked, "shard": Shard.parse(shard), "out": out, "resume": True, "overwrite": False})


def _fit(asked: dict) -> None:
    """Load, fit, save; every argument has been looked at as far as that goes without the model."""
    from klb_probe.lens.checkpoint import Checkpoint
    from klb_probe.lens.contrast import TokenContrast, parse_pairs
    from klb_probe.lens.fit_run import fit_with_progress
    from klb_probe.lens.fitting import FitOptions
    from klb_probe.lens.margin import MarginLens
    from klb_probe.lens.shards import save_full_shard
    from klb_probe.lens.store import cached_lens_path, save_lens
    from klb_probe.models.load import load_model

    pairs = parse_pairs(asked["contrast"])
    same = {name: asked[name] for name in ("k", "seed", "skip_first", "batch", "kind", "layers", "normalise", "shard", "until")}
    options = FitOptions(target=asked["target_layer"], **same)
    loading = {name: asked[name] for name in ("device", "dtype", "quantise", "revision", "backend")}
    loaded = load_model(asked["model"], hooks=asked["hooks"] or (), **loading)
    options.source_layers(loaded.n_layers)
    if asked["out"] is None and (asked["shuffle"] or asked["layers"] is not None or asked["target_layer"] != "last"):
        raise KlbError("--shuffle, --layers and --target-layer make no lens that jlens should find by itself; pass --out FILE")
    chosen = TokenContrast.of(loaded.chat, pairs, spaces=asked["spaces"])
    path = asked["out"] or cached_lens_path(loaded, chosen)
    _check_out(path, asked["overwrite"], asked["resume"])
    checkpoint = Checkpoint.beside(path, asked["checkpoint_every"])
    try:
        lens = fit_with_progress(
            loaded,
            chosen,
            options,
            corpus=asked["corpus"],
            n=asked["n"],
            max_tokens=asked["max_len"],
            bos=asked["bos"],
            shuffle=asked["shuffle"],
            command=_command(asked),
            checkpoint=checkpoint,
            resume=asked["resume"],
        )
    except KeyboardInterrupt as stop:
        said = str(stop) or "stopped before the first prompt: nothing to go on with"
        typer.echo(said, err=True)
        raise KeyboardInterrupt(said) from stop
    if isinstance(lens, MarginLens):
        save_lens(lens, path)
    elif asked["shard"]:
        save_full_shard(lens, path)
    else:
        lens.save(path)
    checkpoint.remove()
    assert lens.metadata is not None  # a lens that was just fitted has it
    _report(asked, lens.metadata, path, chosen)


def _report(asked: dict[str, Any], metadata: LensMetadata, path: Path, contrast: TokenContrast) -> None:
    used = metadata.corpus
    assert used is not None  # what was just fitted knows its text
    what = "whole Jacobians" if metadata.kind == "full" else str(contrast)
    agreement = "" if metadata.split_half is None else f"; even and odd prompts agree to {metadata.split_half:.3f}"
    early = " and stopped early" if metadata.stopped_early else ""
    typer.echo(f"fitted on {used.n_prompts} prompts ({used.n_skipped} too short){early}: {what}{agreement}\n{path}")
    if metadata.shard:
        typer.echo(f"shard {metadata.shard}; with all of them: klb-probe fit merge ... --out WHOLE{path.suffix}")
    else:
        typer.echo(f"read with it: klb-probe jlens --model {asked['model']} --lens {path}")


# Options that make a lens what it is, in the order of the recorded command; the others only say how it gets there.
_RECORDED = (
    "model", "kind", "contrast", "spaces", "corpus", "n", "max_len", "skip_first", "target_layer", "layers", "k", "seed",
    "bos", "until", "shard", "quantise",
)  # fmt: skip
_QUIET = {"kind": "margin", "spaces": "lead", "layers": None, "until": None, "shard": None, "quantise": None}


def _command(asked: dict) -> str:
    """The command that makes this lens again; newer options show only where they say something."""
    parts = ["klb-probe", "fit"]
    for name in _RECORDED:
        value = asked[name]
        if name in _QUIET and value == _QUIET[name]:
            continue
        text = ",".join(map(str, value)) if name == "layers" else str(value)
        parts += [f"--{name.replace('_', '-')}", shlex.quote(text)]
    return " ".join([*parts, *(f"--{name}" for name in ("shuffle", "normalise") if asked[name])])


@fit_app.command(epilog=MERGE_EXAMPLE)
def merge(
    shards: Annotated[list[Path], typer.Argument(help="Lens files made with --shard, all of them.")],
    out: Annotated[Path, typer.Option(help="Lens file to write.")],
    overwrite: Overwrite = False,
) -> None:
    """Put the shards of one fit together: the lens that a single fit would have made."""
    for path in shards:
        if not path.is_file():
            raise KlbError(f"no such lens file: {path}")
    kinds = {path.suffix == ".pt" for path in shards}
    if len(kinds) > 1:
        raise KlbError("full lenses (.pt) and margin lenses do not merge with each other")
    _check_suffix(out, "full" if kinds.pop() else "margin")
    _check_lens_file(out, overwrite)
    from klb_probe.lens.shards import merge_files

    metadata = merge_files(shards, out, command=shlex.join(["klb-probe", "fit", "merge", *map(str, shards)]))
    used = metadata.corpus
    assert used is not None  # shards have one
    typer.echo(f"merged {len(shards)} shards: {used.n_prompts} prompts ({used.n_skipped} too short)\n{out}")


def parse_layers(text: str) -> tuple[int, ...] | None:
    """``"all"`` to None, ``"0,5,10-15"`` to layer numbers; KlbError for anything else."""
    if text == "all":
        return None
    layers: list[int] = []
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise KlbError(f"--layers wants 'all', or numbers and ranges such as 0,5,10-15; got {text!r}")
        layers += range(int(first), int(last if dash else first) + 1)
    return tuple(dict.fromkeys(layers))


def _check_suffix(path: Path, kind: str) -> None:
    """Full lenses are kept in the public .pt format, margin lenses in safetensors."""
    if (path.suffix == ".pt") != (kind == "full"):
        wanted = "a full lens is a .pt file" if kind == "full" else "a margin lens is a .safetensors file, not .pt"
        raise KlbError(f"--out {path}: {wanted}")


def _check_out(path: Path, overwrite: bool, resume: bool) -> None:
    """Refuse to lose a lens or a stopped fit. A checkpoint to resume implies that its --out may be replaced."""
    stopped = path.with_name(path.name + ".partial.safetensors")
    if stopped.exists() and not (overwrite or resume):
        raise KlbError(f"{stopped} is a stopped fit; pass --resume to go on with it or --overwrite to start again")
    _check_lens_file(path, overwrite or (resume and stopped.exists()))


def _check_lens_file(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        raise KlbError(f"{path} is a folder; name a lens file")
    if path.exists() and not overwrite:
        raise KlbError(f"{path} exists; pass --overwrite to replace it, or --out to write another")
    check_writable(path)
