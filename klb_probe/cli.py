"""The ``klb-probe`` command. Nothing here imports torch before a command runs."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from klb_probe.errors import KlbError
from klb_probe.jlens import EXAMPLE, jlens
from klb_probe.options import Bos, Contrast, Device, Dtype, Hooks, Model, Revision
from klb_probe.outputs import check_writable


def command_app(**settings: Any) -> typer.Typer:
    """A typer app with this project's settings."""
    return typer.Typer(
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,
    )


app = command_app(name="klb-probe", no_args_is_help=True)


@app.callback()
def _main() -> None:
    """Look inside open-weight models that know, or do not know, what a customer is owed."""


app.command("jlens", epilog=EXAMPLE)(jlens)


@app.command(epilog="Example: klb-probe fit --model smollm2-135m --n 8 --out outputs/smollm2-135m.margin.safetensors")
def fit(
    model: Model = "smollm2-135m",
    contrast: Contrast = "Yes/No",
    corpus: Annotated[str, typer.Option(help="A text file, or 'sampled': text the model samples itself.")] = "sampled",
    n: Annotated[int, typer.Option(help="Prompts to fit on.", min=1)] = 64,
    max_len: Annotated[int, typer.Option(help="Tokens a prompt.", min=2)] = 128,
    skip_first: Annotated[int, typer.Option(help="Leading positions left out (attention sinks).", min=0)] = 16,
    target_layer: Annotated[str, typer.Option(help="last | penultimate block.")] = "last",
    k: Annotated[int, typer.Option(help="Rows of the norm sketch.", min=1)] = 32,
    seed: Annotated[int, typer.Option(help="Seed of sketch and sampling.")] = 0,
    batch: Annotated[int, typer.Option(help="Cotangents in one backward pass; lower it when memory is short.", min=1)] = 17,
    bos: Bos = "auto",
    out: Annotated[Path | None, typer.Option(help="Lens file to write (default: the user's lens cache).")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing --out.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    hooks: Hooks = None,
) -> None:
    """Fit a margin lens for a model and save it where `klb-probe jlens` finds it."""
    if out:
        _check_lens_file(out, overwrite)
    if max_len <= skip_first + 1:
        raise KlbError(f"--max-len {max_len} leaves nothing after --skip-first {skip_first} and the last token")
    from klb_probe.lens.contrast import TokenContrast, parse_pairs
    from klb_probe.lens.fitting import FitOptions
    from klb_probe.lens.library import fit_with_progress
    from klb_probe.lens.store import cached_lens_path, save_lens
    from klb_probe.models.load import load_model

    pairs = parse_pairs(contrast)
    loaded = load_model(model, device=device, dtype=dtype, revision=revision, hooks=hooks or ())
    chosen = TokenContrast.of(loaded.chat, pairs)
    path = out or cached_lens_path(loaded, chosen)
    _check_lens_file(path, overwrite)
    options = FitOptions(target=target_layer, k=k, seed=seed, skip_first=skip_first, batch=batch)
    command = (
        f"klb-probe fit --model {model} --contrast {contrast} --corpus {corpus} --n {n} --max-len {max_len} "
        f"--skip-first {skip_first} --target-layer {target_layer} --k {k} --seed {seed} --bos {bos}"
    )
    lens = fit_with_progress(loaded, chosen, options, corpus=corpus, n=n, max_tokens=max_len, bos=bos, command=command)
    save_lens(lens, path)
    used = lens.metadata.corpus
    typer.echo(f"fitted on {used.n_prompts} prompts ({used.n_skipped} too short): {chosen}\n{path}")
    typer.echo(f"read with it: klb-probe jlens --model {model} --lens {path}")


def _check_lens_file(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        raise KlbError(f"{path} is a folder; name a lens file")
    if path.exists() and not overwrite:
        raise KlbError(f"{path} exists; pass --overwrite to replace it, or --out to write another")
    check_writable(path)


def main() -> None:
    """Entry point of ``klb-probe``."""
    run(app)


def run(command: typer.Typer) -> None:
    """Run a typer app: a user's mistake is one line on stderr and exit code 2."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("klb_probe").setLevel(logging.INFO)
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        command()
    except KlbError as error:
        if debug:
            raise
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
    except OSError as error:
        if debug:
            raise
        typer.echo(f"error: {error.filename or 'a file'}: {error.strerror or error}", err=True)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        if debug or not (isinstance(error, MemoryError) or "memory" in str(error)):
            raise
        typer.echo("error: out of memory: lower --batch, pass --dtype bfloat16, or take a smaller model", err=True)
        sys.exit(2)
