"""``klb-probe probe``: linear probes on residuals of scenarios and rounds, with the controls they have to beat."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klb_probe.options import Backend, Cases, Contrast, Device, Domains, Dtype, Hooks, Model, Quantise, Revision, parse_names

if TYPE_CHECKING:
    from klb_probe.probes.results import ProbeResults

PROBE_FILES = (
    *("probes.csv", "transfer.csv", "scores.csv", "directions.safetensors"),
    *("auroc_by_layer.png", "transfer.png", "scores.png", "run.json"),
)
PROBE_EXAMPLE = "Example: klb-probe probe --question framing,lie --domains airline,deposit,refund --out outputs/probe"


def probe(
    model: Model = "smollm2-135m",
    question: Annotated[
        str,
        typer.Option(
            help="framing (deny or honest prompt) | lie (told to deny: owed or not) | entitlement | incentive | behaviour "
            "(the model's own answer) | round_lie (needs --run); several with commas."
        ),
    ] = "lie",
    estimators: Annotated[
        str,
        typer.Option(help="logistic | mean_difference | mass_mean | lat | ccs; several with commas."),
    ] = "logistic,mean_difference,mass_mean,lat",
    positions: Annotated[
        str,
        typer.Option(
            help="answer (where the answer starts; of rounds: before the first reply) | reply_mean | reply_last (a denial in "
            "the same words under every framing; of rounds: the agent's own) | gate | claim | action (rounds); with commas."
        ),
    ] = "answer",
    domains: Domains = "all",
    quick: Annotated[bool, typer.Option("--quick", help="A stratified subset of the scenarios: 4 pairs a domain.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Every paraphrase and both wordings; otherwise each pair has one, in turn.")
    ] = False,
    cases: Cases = "ours",
    scenarios: Annotated[Path | None, typer.Option(help="A scenarios folder whose framings to use.")] = None,
    run: Annotated[
        list[Path] | None, typer.Option(help="A run's folder: its rounds are tested on, or learnt from (round_lie).")
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Rebuild the rounds' prompts from the transcripts, as klb-probe rounds does.")
    ] = False,
    split: Annotated[
        str, typer.Option(help="What is left out: domain | paraphrase | pair. A case and its twin are never parted.")
    ] = "domain",
    shuffles: Annotated[int, typer.Option(help="Runs with shuffled labels, for the control band.", min=1)] = 5,
    store: Annotated[
        Path | None, typer.Option(help="Where residuals are kept, and not read again (default: outputs/residuals).")
    ] = None,
    store_dtype: Annotated[str, typer.Option(help="auto | float32 | bfloat16, of the residuals on disk.")] = "auto",
    lens: Annotated[str, typer.Option(help="Lens of the one-number control: margin | logit | a file or folder.")] = "margin",
    contrast: Contrast = "Yes/No",
    out: Annotated[Path | None, typer.Option(help="Output folder (default: outputs/probe-<model>-<time>).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results in --out.")] = False,
    batch: Annotated[int, typer.Option(help="Prompts in one forward pass; lower it when memory is short.", min=1)] = 8,
    seed: Annotated[int, typer.Option(help="Seed of folds, estimators, controls and bootstrap.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantise: Quantise = None,
    backend: Backend = "huggingface",
    revision: Revision = None,
    hooks: Hooks = None,
) -> None:
    """Train linear probes on residuals of every layer, and test them on cases they have not seen, beside their controls.

    Residuals are read once and kept in --store, so that a stopped run goes on where it was. Writes probes.csv, transfer.csv,
    scores.csv, directions.safetensors, three figures and run.json. Does a direction matter? klb-probe steer.
    """
    from klb_probe.outputs import check_folder, clear, default_folder, plain_argument

    started, arguments = time.time(), {k: plain_argument(v) for k, v in locals().items() if k in probe.__annotations__}
    folder = out or default_folder("probe", model)
    check_folder(folder, overwrite=overwrite)

    from klb_probe.console import page
    from klb_probe.models.load import load_model
    from klb_probe.probes.api import STORE, check_runs, train_probes
    from klb_probe.probes.report import WIDTH
    from klb_probe.probes.results import ProbeOptions
    from klb_probe.rounds_command import open_lenses

    names = [[name.strip() for name in text.split(",")] for text in (question, estimators, positions)]
    options = ProbeOptions.checked(*names, split=split, shuffles=shuffles, seed=seed)
    check_runs(options, run or ())
    console = page(WIDTH)
    loaded = load_model(
        model, device=device, dtype=dtype, quantise=quantise, revision=revision, hooks=hooks or (), backend=backend
    )
    lenses, about = open_lenses(loaded, lens, contrast, "lead", "mean")
    style, where = loaded.chat.style, loaded.where
    console.print(f"model     {loaded.name}, {loaded.n_layers} layers, {where}; {style}", soft_wrap=True)
    console.print(
        f"reading   residuals at {', '.join(options.positions)} into {store or STORE}, as far as they are not there",
        soft_wrap=True,
    )
    try:
        results = train_probes(
            loaded,
            lenses[0],
            options,
            domains=parse_names(domains),
            cases=cases,
            root=scenarios,
            quick=quick,
            full=full,
            runs=run or (),
            replay=replay,
            store=store or STORE,
            store_dtype=store_dtype,
            batch_size=batch,
        )
    except KeyboardInterrupt:
        go_on = "and the same command goes on from there"
        console.print(f"stopped: what was read is kept in {store or STORE}, {go_on}", soft_wrap=True)
        raise
    data = results.data
    if overwrite:
        clear(folder, PROBE_FILES)
    record = {
        **{"command": "probe", "complete": True, "arguments": arguments, **about},
        **{"counts": data.counts, "store": str(data.store.folder), "seconds": round(time.time() - started, 1)},
    }
    write_results(folder, results, loaded, record)
    print_results(console, results, folder)


def write_results(folder: Path, results: ProbeResults, model: Any, record: dict[str, Any]) -> None:
    """Tables, directions, figures, and the record last: a folder with a run.json is whole."""
    from klb_probe.files import replacing, write_json
    from klb_probe.probes.figures import auroc_by_layer, score_distributions, transfer_map

    for name, table in (("probes", results.probes), ("transfer", results.transfer), ("scores", results.scores)):
        with replacing(folder / f"{name}.csv") as path:
            table.to_csv(path, index=False, float_format="%.6g")
    seed = record["arguments"]["seed"]
    results.save(folder / "directions.safetensors", model, seed=seed, command="klb-probe probe")
    figures = {
        "auroc_by_layer": auroc_by_layer(results.probes),
        "transfer": transfer_map(results.transfer),
        "scores": score_distributions(results.scores),
    }
    for name, figure in figures.items():
        with replacing(folder / f"{name}.png") as path:
            figure.savefig(path, dpi=130)
    write_json(folder / "run.json", record)


def print_results(console: Any, results: ProbeResults, folder: Path) -> None:
    """The table, what it says in words, and what it does not."""
    from klb_probe.console import print_tables
    from klb_probe.probes.reading import DOES_NOT_SHOW, reading
    from klb_probe.probes.report import table, transfer_table

    print_tables(console, table(results.probes), transfer_table(results.transfer))
    for line in (*reading(results.probes, results.transfer), "Does not show:", *(f"- {line}" for line in DOES_NOT_SHOW)):
        console.print(line)
    console.print(f"Files in {folder}: {', '.join(PROBE_FILES)}", soft_wrap=True)
