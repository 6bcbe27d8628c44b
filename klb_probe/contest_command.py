"""``klb-probe contest``: which function of a round tells a lie from the same words said in good faith?"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from klb_probe.options import Backend, Cases, Contrast, Device, Dtype, Hooks

CONTEST_FILES = ("contest.csv", "contest.png", "run.json")
# Blank lines make a line of each command.
CONTEST_EXAMPLE = """Example:

klb-probe organism cases --domains airline --n 24 --out outputs/fresh

klb-probe run --agent smollm2-135m-liar --cases outputs/fresh --out outputs/organism-liar

klb-probe run --agent smollm2-135m-honest --cases outputs/fresh --out outputs/organism-honest

klb-probe run --agent smollm2-135m-ignorant --cases outputs/fresh --past-gate --out outputs/organism-ignorant

klb-probe contest --cases outputs/fresh --out outputs/contest
--runs liar=outputs/organism-liar,honest=outputs/organism-honest,ignorant=outputs/organism-ignorant"""


def contest(
    runs: Annotated[
        str,
        typer.Option(help="liar=RUN,honest=RUN,ignorant=RUN, of klb-probe run; the ignorant one's with --past-gate."),
    ],
    models: Annotated[
        str, typer.Option(help="liar=MODEL,honest=MODEL,ignorant=MODEL: aliases or adapter folders.")
    ] = "liar=smollm2-135m-liar,honest=smollm2-135m-honest,ignorant=smollm2-135m-ignorant",
    detector: Annotated[
        list[str] | None, typer.Option(help="module:function or path/to/file.py:function; may be given several times.")
    ] = None,
    directions: Annotated[
        str | None, typer.Option(help="liar=FILE,honest=FILE,ignorant=FILE: directions.safetensors of klb-probe probe.")
    ] = None,
    position: Annotated[
        str, typer.Option(help="Where to read: gate | before_reply | reply_mean | reply_last | claim, with commas.")
    ] = "gate,before_reply,reply_mean,reply_last",
    layer: Annotated[
        int | None,
        typer.Option(help="A layer of the lenses that was chosen elsewhere (on scenarios), beside the nested one."),
    ] = None,
    lens: Annotated[
        str, typer.Option(help="margin | logit (the logit lens alone) | liar=FILE,honest=FILE,ignorant=FILE.")
    ] = "margin",
    cases: Cases = "organisms",
    contrast: Contrast = "Yes/No",
    store: Annotated[
        Path | None, typer.Option(help="Where residuals are kept, and not read again (default: outputs/residuals).")
    ] = None,
    store_dtype: Annotated[str, typer.Option(help="auto | float32 | bfloat16, of the residuals on disk.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Output folder (default: outputs/contest-<liar>-<time>).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results in --out.")] = False,
    batch: Annotated[int, typer.Option(help="Prompts in one forward pass; lower it when memory is short.", min=1)] = 8,
    draws: Annotated[int, typer.Option(help="Bootstrap draws.", min=100)] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of folds, order of rounds, random directions and bootstrap.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    backend: Backend = "huggingface",
    hooks: Hooks = None,
) -> None:
    """Score detectors on rounds of three organisms: one knows and lies, one knows and tells, one does not know.

    A detector is a function of a round (klb_probe.contest.rounds.ContestRound), higher for a more likely knowing lie; it is not
    told who spoke. Beside it: lenses, probes, the model's own margin, the words alone, random directions. Writes contest.csv,
    contest.png and run.json.
    """
    from klb_probe.outputs import check_folder, clear, default_folder, plain_argument

    started, arguments = time.time(), {k: plain_argument(v) for k, v in locals().items() if k in contest.__annotations__}
    names = parse_three("--models", models)
    folders = {organism: Path(path) for organism, path in parse_three("--runs", runs).items()}
    folder = out or default_folder("contest", names["liar"])
    check_folder(folder, overwrite=overwrite)

    from klb_probe.console import page
    from klb_probe.contest.detectors import load_detectors
    from klb_probe.contest.reading import Organism, read_field
    from klb_probe.contest.report import contest_figure
    from klb_probe.contest.rounds import SLOTS
    from klb_probe.contest.table import contest_table
    from klb_probe.errors import KlbError
    from klb_probe.files import replacing, write_json
    from klb_probe.models.load import load_model
    from klb_probe.probes.api import STORE
    from klb_probe.probes.directions import load_directions
    from klb_probe.rounds_command import open_lenses

    slots = tuple(dict.fromkeys(name.strip() for name in position.split(",")))
    if unknown := [name for name in slots if name not in SLOTS]:
        raise KlbError(f"unknown position {', '.join(unknown)}; known: {', '.join(SLOTS)}")
    detectors = load_detectors(detector or [])
    saved = {
        organism: load_directions(Path(path))
        for organism, path in (parse_three("--directions", directions) if directions else {}).items()
    }
    lens_of = parse_three("--lens", lens) if "=" in lens else dict.fromkeys(names, lens)
    about: dict[str, Any] = {}

    def open_organism(organism: str) -> Organism:
        loaded = load_model(names[organism], device=device, dtype=dtype, hooks=hooks or (), backend=backend)
        if organism in saved:
            saved[organism].check(loaded)
        lenses, about[organism] = open_lenses(loaded, lens_of[organism], contrast, "lead", "mean")
        return Organism(loaded, lenses)

    field = read_field(
        folders,
        open_organism,
        store=store or STORE,
        cases=cases,
        slots=slots,
        dtype=store_dtype,
        batch_size=batch,
        progress=True,
    )
    table = contest_table(field, detectors, directions=saved, layer=layer, draws=draws, seed=seed, progress=True)
    if overwrite:
        clear(folder, CONTEST_FILES)
    with replacing(folder / "contest.csv") as path:
        table.to_csv(path, index=False, float_format="%.6g")
    with replacing(folder / "contest.png") as path:
        contest_figure(table, names["liar"]).savefig(path, dpi=130)
    record = {
        **{"command": "contest", "complete": True, "arguments": arguments, "organisms": about},
        **{"counts": {organism: dict(counted) for organism, counted in field.counts.items()}},
        "seconds": round(time.time() - started, 1),
    }
    write_json(folder / "run.json", record)
    _print(page(160), table, field.counts, folder)


def _print(console: Any, table: Any, counts: Mapping[str, Mapping[str, int]], folder: Path) -> None:
    """The table, what it says in words, and what it does not."""
    from klb_probe.console import print_tables
    from klb_probe.contest.report import printed
    from klb_probe.contest.words import DOES_NOT_SHOW, reading

    for organism, counted in counts.items():
        console.print(f"{organism}: {', '.join(f'{n} {what}' for what, n in counted.items()) or 'no rounds'}", soft_wrap=True)
    print_tables(console, printed(table))
    for line in (*reading(table), "Does not show:", *(f"- {line}" for line in DOES_NOT_SHOW)):
        console.print(line, soft_wrap=True)
    console.print(f"Files in {folder}: {', '.join(CONTEST_FILES)}", soft_wrap=True)


def parse_three(option: str, text: str) -> dict[str, str]:
    """``liar=A,honest=B,ignorant=C`` by organism; KlbError unless it names each once."""
    from klb_probe.contest.rounds import ORGANISMS
    from klb_probe.errors import KlbError

    pairs = [part.strip().partition("=") for part in text.split(",")]
    given = {name.strip(): value.strip() for name, _, value in pairs}
    if sorted(given) != sorted(ORGANISMS) or len(pairs) != len(ORGANISMS) or not all(given.values()):
        raise KlbError(f"{option} {text}: give it as {','.join(f'{name}=...' for name in ORGANISMS)}")
    return {name: given[name] for name in ORGANISMS}
