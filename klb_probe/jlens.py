"""``python -m klb_probe.jlens``: layer-by-layer yes-minus-no margins on eligibility scenarios."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klb_probe.options import (
    Backend,
    Cases,
    Contrast,
    Device,
    Domains,
    Dtype,
    Hooks,
    Model,
    Quantise,
    Reduce,
    Remote,
    Revision,
    Spaces,
    parse_names,
)

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from klb_probe.cases.scenarios import Scenario
    from klb_probe.signals.margins import Margins

FILES = ("margins.csv", "scenarios.jsonl", "summary.csv", "margins.png", "readouts.safetensors", "run.json")
EXAMPLE = "Example: python -m klb_probe.jlens --model smollm2-135m --domains airline --framings honest,deny"
_SAVE_EVERY_SECONDS = 20.0


def jlens(
    model: Model = "smollm2-135m",
    lens: Annotated[
        str,
        typer.Option(
            help="margin (published, shipped, cached, or fitted on the spot) | logit | a file or folder | hub:REPO::FILE@REV."
        ),
    ] = "margin",
    framings: Annotated[
        str,
        typer.Option(help="Framings, with commas; contrasts are against the first: honest, deny, incentive, neutral, secret."),
    ] = "honest,deny",
    domains: Domains = "all",
    questions: Annotated[
        str, typer.Option(help="Wordings of the question, with commas: plain (entitled?), reversed (may the company refuse?).")
    ] = "plain,reversed",
    quick: Annotated[
        bool, typer.Option("--quick", help="A stratified subset of the scenarios (4 pairs a domain, one paraphrase): laptops.")
    ] = False,
    cases: Cases = "ours",
    scenarios: Annotated[
        Path | None, typer.Option(help="A scenarios folder of your own (domains/<name>/*.yaml; framings.yaml if you like).")
    ] = None,
    controls: Annotated[
        bool, typer.Option("--controls", help="Beside a full lens (--lens FILE.pt): permuted J, random J, random token pairs.")
    ] = False,
    shuffled: Annotated[
        str | None, typer.Option(help="A lens fitted on shuffled text (klb-probe fit --shuffle), read beside as a control.")
    ] = None,
    contrast: Contrast = "Yes/No",
    spaces: Spaces = "lead",
    reduce: Reduce = "mean",
    positions: Annotated[
        str, typer.Option(help="answer: every scenario where the answer starts | all: every token of one scenario.")
    ] = "answer",
    scenario: Annotated[
        str | None, typer.Option(help="With --positions all: its id, such as airline/<case>, or airline/<case>~twin.")
    ] = None,
    top_k: Annotated[int, typer.Option(help="With --positions all: the lens's top tokens where the answer starts.", min=0)] = 0,
    top_layers: Annotated[
        str | None, typer.Option(help="Layers of --top-k, with commas (default: about nine, evenly spread).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder (default: outputs/jlens-<model>-<time>).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    fit: Annotated[bool, typer.Option("--fit", help="Fit a missing lens even if that takes long.")] = False,
    batch: Annotated[int, typer.Option(help="Prompts in one forward pass; lower it when memory is short.", min=1)] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantise: Quantise = None,
    backend: Backend = "huggingface",
    remote: Remote = False,
    revision: Revision = None,
    hooks: Hooks = None,
) -> None:
    """Decode a yes-minus-no margin from every layer, on eligibility scenarios, honest against deceptive framing.

    Prints margins, contrasts and AUROC of entitlement by layer, and writes margins.csv, scenarios.jsonl, summary.csv,
    margins.png and run.json. With --positions all, one scenario as a layer x token map instead: tokens.csv, heat_map.png.
    """
    from klb_probe.outputs import check_folder, clear, default_folder, plain_argument
    from klb_probe.view import VIEW_FILES, check_view_options, choose_scenario, parse_layers, write_view

    started, arguments = time.time(), {k: plain_argument(v) for k, v in locals().items() if k in jlens.__annotations__}
    check_view_options(positions, top_k, scenario, top_layers, resume, bool(controls or shuffled))
    chosen_layers = parse_layers(top_layers)
    folder = out or default_folder("jlens", model)
    check_folder(folder, overwrite=overwrite, resume=resume)

    from klb_probe.console import page
    from klb_probe.files import file_sha256
    from klb_probe.lens.contrast import TokenContrast, parse_pairs
    from klb_probe.lens.library import load_lens
    from klb_probe.lens.margin import LogitLens, MarginLens
    from klb_probe.models.load import load_model
    from klb_probe.signals.margins import prepare
    from klb_probe.versions import versions

    console = page(116)
    words = parse_pairs(contrast)
    # Mistakes in names show before anything slow begins.
    chosen = _scenarios(cases, scenarios, domains, framings, questions, quick)
    one = choose_scenario(chosen, scenario)

    loading: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "quantise": quantise,
        "revision": revision,
        "backend": backend,
        "remote": remote,
    }
    loaded = load_model(model, hooks=hooks or (), **loading)
    tokens = TokenContrast.of(loaded.chat, words, spaces=spaces, reduction=reduce)
    if lens == "logit":
        decoder: MarginLens | LogitLens = LogitLens.of(loaded, tokens)
    else:
        decoder = load_lens(loaded, tokens, path=None if lens == "margin" else lens, fit=fit)
    beside = _controls(decoder, loaded, tokens) if controls else []
    if shuffled:
        beside.append(_shuffled(load_lens(loaded, tokens, path=shuffled), decoder))
    console.print(f"model     {loaded.name}, {loaded.n_layers} layers, {loaded.where}; {loaded.chat.style}")
    console.print(f"lens      {_describe(decoder)}")
    console.print(f"contrast  {tokens}")
    if tokens.dropped:
        console.print(f"          left out, not single tokens: {', '.join('/'.join(pair) for pair in tokens.dropped)}")
    if overwrite:
        clear(folder, (*FILES, *VIEW_FILES))

    record: dict[str, Any] = {
        "command": "jlens",
        "complete": False,
        "arguments": arguments,
        "model": loaded.identity,
        "fingerprint": loaded.fingerprint,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "backend": loaded.backend,
        "chat": loaded.chat.style,
        "thinking": loaded.chat.thinking.how,
        "hook_map": loaded.layout.map.family,
        "self_check_error": loaded.self_check_error,
        "lens": {"name": "logit"}
        if isinstance(decoder, LogitLens)
        else {
            "file": str(decoder.file),
            "sha256": decoder.file and file_sha256(decoder.file),
            **decoder.metadata.model_dump(mode="json"),
        },
        "shuffled": beside[-1].metadata.model_dump(mode="json") if shuffled else None,
        "contrast": [[list(side) for side in pair] for pair in tokens.pairs],
        "contrast_left_out": tokens.dropped,
        "position": "last prompt token",
        "versions": versions(),
    }
    if positions == "all":
        view = write_view(loaded, decoder, tokens, one, folder, top_k=top_k, layers=chosen_layers, record=record)
        console.print("\n".join(view), soft_wrap=True, markup=False)
        return

    margins, lenses = prepare(loaded, decoder, chosen, controls=beside)
    record["counts"] = _counts(margins)
    _read(loaded, lenses, margins, folder, record, batch=batch, resume=resume, console=console)
    summary = margins.summary(seed=seed)
    if controls:
        summary = _with_identity_share(summary, decoder)
    _write_results(folder, margins, summary, record, loaded.tokenizer, seconds=time.time() - started)
    _print_results(console, margins, summary, folder)


def _scenarios(cases: str, root: Path | None, domains: str, framings: str, questions: str, quick: bool) -> list[Scenario]:
    from klb_probe.cases.scenarios import eligibility_scenarios
    from klb_probe.cases.sources import OURS, load_cases
    from klb_probe.errors import KlbError

    if root is not None and not (root / "domains").is_dir() and not (root / "framings.yaml").is_file():
        raise KlbError(f"--scenarios {root}: no domains/ and no framings.yaml in it")
    # A folder with framings alone goes with our cases, or those of --cases; a folder of cases may have its own framings.
    own = root is not None and cases == OURS and (root / "domains").is_dir()
    loaded = load_cases(str(root) if own else cases, parse_names(domains))
    if root is None and (Path(cases) / "framings.yaml").is_file():
        root = Path(cases)
    names, wordings = ([name.strip() for name in text.split(",")] for text in (framings, questions))
    return eligibility_scenarios(loaded, names, root, questions=wordings, quick=quick)


def _read(
    model: Any,
    lenses: Any,
    margins: Margins,
    folder: Path,
    record: dict[str, Any],
    *,
    batch: int,
    resume: bool,
    console: Console,
) -> None:
    """Read every prompt, saving now and then; what is read when it stops is kept for ``--resume``."""
    from tqdm.auto import tqdm

    from klb_probe.files import write_json
    from klb_probe.signals.readout import read_prompts

    state, checkpoint = margins.readouts, folder / "readouts.safetensors"
    if resume and checkpoint.exists():
        state.restore(checkpoint)
        console.print(f"resuming  {int(state.done.sum())} of {len(margins.ids)} prompts were read before")
    last_saved = time.monotonic()

    def read(count: int) -> None:
        nonlocal last_saved
        bar.update(count)
        if time.monotonic() - last_saved > _SAVE_EVERY_SECONDS:
            state.save(checkpoint)
            last_saved = time.monotonic()

    bar = tqdm(total=len(margins.ids), initial=int(state.done.sum()), desc="reading", unit="prompt", disable=None)
    try:
        with bar:
            read_prompts(model, lenses, margins.ids, state, batch_size=batch, on_batch=read)
    except (KeyboardInterrupt, RuntimeError, MemoryError):
        state.save(checkpoint)
        write_json(folder / "run.json", record)
        typer.echo(
            f"stopped after {int(state.done.sum())} of {len(margins.ids)} prompts; continue with --out {folder} --resume",
            err=True,
        )
        raise
    state.save(checkpoint)


def _write_results(
    folder: Path, margins: Margins, summary: pd.DataFrame, record: dict[str, Any], tokenizer: Any, *, seconds: float
) -> None:
    from klb_probe.files import write_json

    _write_tables(folder, margins, summary, tokenizer)
    error = margins.readouts.last_block_error
    write_json(folder / "run.json", {**record, "complete": True, "last_block_max_error": error, "seconds": round(seconds, 1)})


def _print_results(console: Console, margins: Margins, summary: pd.DataFrame, folder: Path) -> None:
    from klb_probe.console import print_tables
    from klb_probe.signals import report

    console.print()
    print_tables(console, report.tables(summary))
    console.print(report.what_it_shows(summary, margins.model_name))
    console.print(report.DOES_NOT_SHOW)
    error = margins.readouts.last_block_error
    console.print(f"Last block against the model's own margin: max error {error:.1e} logits.")
    console.print(f"Files in {folder}: {', '.join(FILES)}", soft_wrap=True)


def _write_tables(folder: Path, margins: Margins, summary: pd.DataFrame, tokenizer: Any) -> None:
    from klb_probe.files import replacing, write_text

    with replacing(folder / "margins.csv") as path:
        margins.frame.to_csv(path, index=False, float_format="%.6g")
    with replacing(folder / "summary.csv") as path:
        summary.to_csv(path, index=False, float_format="%.6g")
    with replacing(folder / "margins.png") as path:
        margins.plot(summary).savefig(path, dpi=130)
    rows = [
        {
            **{key: value for key, value in prompt.items() if key != "own_margin"},
            "own_margin": round(prompt["own_margin"], 6),
            "prompt": tokenizer.decode(ids),
            "token_ids": list(ids),
        }
        for prompt, ids in zip(margins.prompts.to_dict("records"), margins.ids, strict=True)
    ]
    write_text(folder / "scenarios.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _controls(decoder: Any, model: Any, tokens: Any) -> list[Any]:
    from klb_probe.errors import KlbError
    from klb_probe.lens.controls import control_lenses
    from klb_probe.lens.jacobian import JacobianLens

    if decoder.name == "logit" or decoder.file.suffix == ".safetensors":
        raise KlbError("--controls change the whole J: pass a full lens with --lens FILE.pt (klb-probe fit --kind full)")
    meta = decoder.metadata
    return control_lenses(JacobianLens.open(decoder.file), model, tokens, k=meta.k, seed=meta.seed)


def _shuffled(control: Any, decoder: Any) -> Any:
    from klb_probe.errors import KlbError
    from klb_probe.lens.corpus import SHUFFLED

    meta = control.metadata
    if meta.corpus is None or not meta.corpus.source.endswith(SHUFFLED):
        raise KlbError(f"--shuffled {control.file}: not fitted on shuffled text (klb-probe fit --shuffle)")
    if decoder.name != "logit" and meta.k != decoder.metadata.k:
        raise KlbError(f"--shuffled {control.file} has {meta.k} sketch rows, the lens {decoder.metadata.k}; fit it with --k")
    control.name = "shuffled text"
    return control


def _with_identity_share(summary: pd.DataFrame, decoder: Any) -> pd.DataFrame:
    """The summary, and how far each J of the full lens is the identity: tr(J) / d."""
    import pandas as pd

    from klb_probe.lens.checks import exact_identity_share
    from klb_probe.lens.jacobian import JacobianLens

    found = exact_identity_share(JacobianLens.open(decoder.file))
    rows = pd.DataFrame({"lens": "margin", "layer": found.layers, "statistic": "identity_share", "value": found.share})
    return pd.concat([summary, rows], ignore_index=True).astype({"n": "Int64", "n_pairs": "Int64"})


def _counts(margins: Margins) -> dict[str, int]:
    prompts = margins.prompts
    return {
        "prompts": len(prompts),
        "pairs": prompts["pair"].nunique(),
        "domains": prompts["domain"].nunique(),
        "tokens": sum(map(len, margins.ids)),
    }


def _describe(lens: Any) -> str:
    if lens.name == "logit":
        return "logit lens"
    meta = lens.metadata
    if meta.corpus is None:
        return f"J-Lens margin from {lens.file} ({meta.command})"
    fitted = f"{meta.corpus.n_prompts} prompts, {meta.corpus.source}; target layer {meta.target_layer}"
    return f"J-Lens margin from {lens.file} ({fitted})"


def main() -> None:
    """Entry point of ``python -m klb_probe.jlens``."""
    from klb_probe.cli import command_app, run

    app = command_app()
    app.command(epilog=EXAMPLE)(jlens)
    run(app)


if __name__ == "__main__":
    main()
