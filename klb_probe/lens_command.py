"""``klb-probe lens``: is a lens right for a model, and does it read what it should?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from klb_probe.errors import KlbError
from klb_probe.options import Backend, Device, Dtype, Hooks, Model, Quantise, Revision

CHECK_EXAMPLE = "Example: klb-probe lens check lenses/smollm2-135m.margin.safetensors --model smollm2-135m"
# A blank line makes a line of each command.
EVAL_EXAMPLE = """Example:

klb-probe fit --kind full --n 2 --max-len 40 --layers 20-28 --out outputs/full.pt

klb-probe lens eval outputs/full.pt --model smollm2-135m"""

lens_app = typer.Typer(
    epilog=CHECK_EXAMPLE,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Check a lens file against a model, or score what it reads.",
)
EVAL_FILES = ("scores.csv", "ranks.csv", "run.json")

LensFile = Annotated[
    str, typer.Argument(metavar="LENS", help="A margin lens or full Jacobian lens file, or hub:REPO::FILE@REV.")
]
_STYLES = {"pass": "green", "fail": "bold red", "unknown": "yellow"}


@lens_app.command("check", epilog=CHECK_EXAMPLE)
def check(
    lens: LensFile,
    model: Model = "smollm2-135m",
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantise: Quantise = None,
    backend: Backend = "huggingface",
    revision: Revision = None,
    hooks: Hooks = None,
) -> None:
    """Is this lens right for this model?

    Exit code 0 when no check fails (unknown is no failure), 1 when one does, 2 for a mistake in the command.
    """
    path = _local_file(lens)

    from rich.table import Table
    from rich.text import Text

    from klb_probe.console import page, print_tables
    from klb_probe.lens.checks import check_lens
    from klb_probe.models.load import load_model

    loaded = load_model(
        model, device=device, dtype=dtype, quantise=quantise, revision=revision, hooks=hooks or (), backend=backend
    )
    checks = check_lens(path, loaded)
    failed = [one.name for one in checks if one.verdict == "fail"]
    if as_json:
        rows = [{"check": one.name, "verdict": one.verdict, "why": one.why} for one in checks]
        typer.echo(json.dumps({"lens": str(path), "model": loaded.name, "checks": rows}, indent=2, ensure_ascii=False))
    else:
        console = page(116)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for header in ("check", "verdict", "why"):
            table.add_column(header, overflow="fold")
        for one in checks:
            table.add_row(one.name, Text(one.verdict, style=_STYLES[one.verdict]), Text(one.why))
        print_tables(console, table)
        unknown = [one.name for one in checks if one.verdict == "unknown"]
        rest = f"; the file cannot say: {', '.join(unknown)}" if unknown else ""
        if failed:
            verdict = f"{path.name} is not right for {loaded.name}: {', '.join(failed)}{rest}"
        else:
            verdict = f"nothing speaks against {path.name} for {loaded.name}{rest}"
        console.print(verdict, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


@lens_app.command("eval", epilog=EVAL_EXAMPLE)
def evaluate(
    lens: LensFile,
    model: Model = "smollm2-135m",
    items: Annotated[Path | None, typer.Option(help="YAML file of your own items (default: the project's).")] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder (default: outputs/lens-eval-<model>-<time>).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the halves, the random transport and the bootstrap.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantise: Quantise = None,
    backend: Backend = "huggingface",
    revision: Revision = None,
    hooks: Hooks = None,
) -> None:
    """Score pass@k of known intermediates: full Jacobian lens, logit lens and random transport, on multi-step items.

    Writes scores.csv, ranks.csv (every item, lens and layer) and run.json.
    """
    from klb_probe.outputs import check_folder, clear, default_folder

    path = _local_file(lens)
    if path.suffix == ".safetensors":
        raise KlbError(f"{path} is a margin lens: it has no vocabulary to rank; pass a full Jacobian lens file")
    folder = out or default_folder("lens-eval", model)
    check_folder(folder, overwrite=overwrite)

    from tqdm.auto import tqdm

    from klb_probe.console import page, print_tables
    from klb_probe.files import file_sha256, replacing, write_json
    from klb_probe.lens.evaluation import evaluate_lens, load_items, usable_items
    from klb_probe.lens.jacobian import JacobianLens
    from klb_probe.models.load import load_model
    from klb_probe.versions import versions

    all_items = load_items(items)
    full = JacobianLens.open(path)
    loaded = load_model(
        model, device=device, dtype=dtype, quantise=quantise, revision=revision, hooks=hooks or (), backend=backend
    )
    if problem := full.mismatch(loaded):
        raise KlbError(f"lens {path}: {problem}")
    usable, skipped = usable_items(loaded, all_items)
    with tqdm(total=len(full.source_layers), desc="scoring", unit="layer", disable=None) as bar:
        result = evaluate_lens(loaded, full, usable, seed=seed, on_layer=lambda: bar.update(1))
    if overwrite:
        clear(folder, EVAL_FILES)
    scores = result.scores(seed=seed)
    for name, table in (("scores.csv", scores), ("ranks.csv", result.ranks_frame())):
        with replacing(folder / name) as partial:
            table.to_csv(partial, index=False, float_format="%.6g")
    record: dict[str, Any] = {
        "command": "lens eval",
        "complete": True,
        "model": loaded.identity,
        "fingerprint": loaded.fingerprint,
        "lens": {"file": str(path), "sha256": file_sha256(path) if path.is_file() else None},
        "items": str(items) if items else "the project's",
        "counts": {"items": len(usable), "skipped": skipped},
        "seed": seed,
        "versions": versions(),
    }
    write_json(folder / "run.json", record)
    console = page(116)
    print_tables(console, result.table(scores))
    left_out = f"{sum(skipped.values())} of {len(all_items)} items skipped (no intermediate is a single token here)"
    console.print("\n".join([result.reading(scores), left_out, f"Files in {folder}: {', '.join(EVAL_FILES)}"]), soft_wrap=True)


def _local_file(lens: str) -> Path:
    """The file a LENS argument names; one on the hub is fetched."""
    from klb_probe.lens.published import parse_lens_spec

    spec = parse_lens_spec(lens)
    path = spec if isinstance(spec, Path) else spec.fetch()
    if not path.exists():
        raise KlbError(f"no such lens file: {path}")
    return path
