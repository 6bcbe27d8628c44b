"""``klb-probe steer``: does a probe's direction move the answer more than random ones do?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klb_probe.errors import KlbError
from klb_probe.options import Backend, Cases, Contrast, Device, Domains, Dtype, Hooks, Model, Quantise, Revision, parse_names

if TYPE_CHECKING:
    import pandas as pd

    from klb_probe.cases.scenarios import Scenario
    from klb_probe.probes.steering import Intervention

STEER_EXAMPLE = "Example: klb-probe steer --probe outputs/probe/directions.safetensors --question lie --estimator logistic"
STEER_FILES = ("steering.csv", "steering_prompts.csv", "steering.png", "generations.jsonl", "run.json")
_GENERATED_PAIRS = 4
_WIDTH = 140  # of what is printed into a pipe


def steer(
    probe: Annotated[Path, typer.Option(help="Saved directions (directions.safetensors of klb-probe probe).")],
    question: Annotated[str | None, typer.Option(help="The probe's question (needed if the file has several).")] = None,
    estimator: Annotated[str | None, typer.Option(help="The probe's estimator (likewise).")] = None,
    position: Annotated[str | None, typer.Option(help="The position the probe reads (likewise).")] = None,
    layer: Annotated[int | None, typer.Option(help="Layer to change (default: the one chosen in training).")] = None,
    mode: Annotated[
        str, typer.Option(help="add, ablate (the component becomes that of the mean residual), or both.")
    ] = "add,ablate",
    scales: Annotated[
        str, typer.Option(help="Doses of add, in mean residual norms of the layer; each with both signs.")
    ] = "0.1,0.2,0.4",
    at: Annotated[
        str,
        typer.Option(help="Where: answer (the last prompt token; with --generate the reply too) or all (every token; slow)."),
    ] = "answer",
    random: Annotated[int, typer.Option(help="Random directions to compare with.", min=1)] = 16,
    framings: Annotated[
        str, typer.Option(help="Framings, with commas: honest, deny, incentive, neutral, secret.")
    ] = "honest,deny",
    domains: Domains = "all",
    cases: Cases = "ours",
    quick: Annotated[
        bool, typer.Option("--quick/--full", help="4 pairs a domain under one paraphrase, or all pairs and paraphrases.")
    ] = True,
    generate: Annotated[
        int, typer.Option(help="Also let the model answer in this many tokens: plain question, 4 pairs; slow.", min=0)
    ] = 0,
    model: Model = "smollm2-135m",
    contrast: Contrast = "Yes/No",
    out: Annotated[Path | None, typer.Option(help="Output folder (default: outputs/steer-<model>-<time>).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")] = False,
    batch: Annotated[
        int,
        typer.Option(help="Changes (--at all: prompts) in one forward pass; lower it when memory is short.", min=1),
    ] = 32,
    seed: Annotated[int, typer.Option(help="Seed of random directions, bootstrap and choice of pairs.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantise: Quantise = None,
    backend: Backend = "huggingface",
    revision: Revision = None,
    hooks: Hooks = None,
) -> None:
    """Add a saved direction to the residual of one layer, or ablate it, and compare with random directions.

    Reads the model's own yes-minus-no margin on eligibility scenarios in both wordings of the question, for every direction
    and dose. By default only the last prompt token is changed, where probes of the position answer read: about ten minutes
    of CPU time with the default model. With --at all every token is changed, and every direction and dose reads all prompts
    anew: hours, so name a few domains. Writes steering.csv, steering_prompts.csv (a line a prompt and intervention),
    steering.png, generations.jsonl (with --generate) and run.json.
    """
    from klb_probe.outputs import check_folder, clear, default_folder, plain_argument

    started, arguments = time.time(), {k: plain_argument(v) for k, v in locals().items() if k in steer.__annotations__}
    modes, doses, at = _modes(mode), _scales(scales), _at(at)
    folder = out or default_folder("steer", model)
    check_folder(folder, overwrite=overwrite)

    import torch
    from tqdm.auto import tqdm

    from klb_probe.cases.scenarios import eligibility_scenarios
    from klb_probe.cases.sources import load_cases
    from klb_probe.console import page, print_tables
    from klb_probe.files import file_sha256
    from klb_probe.lens.contrast import TokenContrast, parse_pairs
    from klb_probe.models.load import load_model
    from klb_probe.probes import steering_summary as report
    from klb_probe.probes.directions import load_directions
    from klb_probe.probes.steering import PROBE, interventions, random_directions, steering_effects
    from klb_probe.versions import versions

    # Mistakes in names show before anything slow begins.
    directions = load_directions(probe)
    chosen = directions.probe(question=question, estimator=estimator, position=position, layer=layer)
    scenarios = eligibility_scenarios(load_cases(cases, parse_names(domains)), _names(framings), quick=quick)
    words = parse_pairs(contrast)

    loaded = load_model(
        model, device=device, dtype=dtype, quantise=quantise, revision=revision, hooks=hooks or (), backend=backend
    )
    directions.check(loaded)
    tokens = TokenContrast.of(loaded.chat, words)
    vectors = {PROBE: torch.as_tensor(chosen.direction).float(), **random_directions(loaded.d_model, random, seed)}
    mean = torch.as_tensor(chosen.mean).float()
    planned = interventions(vectors, mean, float(chosen.norm), modes=modes, scales=doses)
    ids = [loaded.chat.encode(scenario.system, scenario.user) for scenario in scenarios]
    labels = _labels(scenarios)

    console = page(_WIDTH)
    named = f"{chosen.question} ({chosen.estimator}, {chosen.position}), layer {chosen.layer}"
    console.print(f"model      {loaded.name}, {loaded.n_layers} layers, {loaded.where}")
    console.print(f"direction  {named}; a dose of 1 is a norm of {float(chosen.norm):.3g}")
    console.print(f"changed    {_where(at, chosen.position, generate)}")
    console.print(f"contrast   {tokens}")
    console.print(f"reading    {len(ids)} prompts without and under {len(planned)} interventions ({random} random directions)")
    if overwrite:
        clear(folder, STEER_FILES)
    with tqdm(total=len(ids) * (1 + len(planned)), desc="steering", unit="margin", disable=None) as bar:
        effects = steering_effects(loaded, tokens, ids, chosen.layer, planned, at=at, batch_size=batch, on_batch=bar.update)
    effects = labels.merge(effects, on="prompt", validate="one_to_many")
    summary = report.steering_summary(effects, seed=seed)

    replies = _replies(loaded, ids, labels, chosen.layer, planned, at, generate, seed) if generate else None
    record = {
        "command": "steer",
        "arguments": arguments,
        "model": loaded.identity,
        "fingerprint": loaded.fingerprint,
        "thinking": loaded.chat.thinking.how,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "backend": loaded.backend,
        "probe": {
            "file": str(probe),
            "sha256": file_sha256(probe),
            **{name: getattr(chosen, name) for name in ("question", "estimator", "position", "layer")},
            "norm": float(chosen.norm),
        },
        "contrast": [[list(side) for side in pair] for pair in tokens.pairs],
        "counts": {"prompts": len(ids), "pairs": labels["pair"].nunique(), "interventions": len(planned)},
        "versions": versions(),
        "seconds": round(time.time() - started, 1),
    }
    _write(folder, summary, effects, replies, f"{loaded.name}: {named}", at, record)
    console.print()
    print_tables(console, report.table(summary))
    console.print(report.what_it_shows(summary, at))
    if replies is not None:
        print_tables(console, _begin_table(replies))
    console.print(report.does_not_show(at))
    written = [name for name in STEER_FILES if (folder / name).exists()]
    console.print(f"Files in {folder}: {', '.join(written)}", soft_wrap=True)


def _write(
    folder: Path,
    summary: pd.DataFrame,
    effects: pd.DataFrame,
    replies: pd.DataFrame | None,
    title: str,
    at: str,
    record: dict[str, Any],
) -> None:
    from klb_probe.files import replacing, write_json
    from klb_probe.probes.steering_figure import dose_response

    for name, table in (("steering.csv", summary), ("steering_prompts.csv", effects)):
        with replacing(folder / name) as path:
            table.to_csv(path, index=False, float_format="%.6g")
    with replacing(folder / "steering.png") as path:
        dose_response(summary, title, at).savefig(path, dpi=130)
    if replies is not None:
        with replacing(folder / "generations.jsonl") as path:
            replies.to_json(path, orient="records", lines=True, force_ascii=False)
    write_json(folder / "run.json", record)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _modes(text: str) -> list[str]:
    modes = _names(text)
    if unknown := [name for name in modes if name not in ("add", "ablate")]:
        raise KlbError(f"unknown --mode {', '.join(unknown)}; add, ablate, or both with a comma")
    return modes


def _at(text: str) -> str:
    from klb_probe.probes.steering_passes import PLACES

    if text not in PLACES:
        raise KlbError(f"unknown --at {text}; {' or '.join(PLACES)}")
    return text


def _where(at: str, position: str, generate: int) -> str:
    from klb_probe.probes.steering_passes import AT_ANSWER, PLACES

    if at != AT_ANSWER:
        return PLACES[at]
    elsewhere = "" if position == "answer" else f" (the probe was trained elsewhere: {position})"
    return f"{PLACES[at]}{elsewhere}{'; in replies every token of the reply too' if generate else ''}"


def _scales(text: str) -> list[float]:
    try:
        scales = [float(part) for part in text.split(",")]
    except ValueError:
        scales = [0.0]
    if not all(0 < scale < float("inf") for scale in scales):
        raise KlbError(f"--scales wants positive numbers, separated by commas; got {text!r}")
    return scales


def _labels(scenarios: Sequence[Scenario]) -> pd.DataFrame:
    import pandas as pd

    rows = [
        {
            "prompt": number,
            "scenario": one.situation.id,
            "pair": one.situation.pair,
            "domain": one.situation.domain,
            "entitled": one.situation.entitled,
            "framing": one.framing,
            "paraphrase": one.paraphrase,
            "question": one.question,
        }
        for number, one in enumerate(scenarios)
    ]
    return pd.DataFrame(rows)


def _replies(
    model: Any,
    ids: Sequence[Sequence[int]],
    labels: pd.DataFrame,
    layer: int,
    planned: Sequence[Intervention],
    at: str,
    n_tokens: int,
    seed: int,
) -> pd.DataFrame:
    """Replies to the plain question of a few pairs: without intervention, and under the probe's and one random direction's."""
    import numpy as np
    from tqdm.auto import tqdm

    from klb_probe.probes.steering import PROBE, steered_replies

    pairs = labels["pair"].unique()
    some = np.random.default_rng(seed).choice(pairs, min(_GENERATED_PAIRS, len(pairs)), replace=False)
    asked = labels[labels["pair"].isin(some) & (labels["question"] == "plain")]
    shown = [one for one in planned if one.direction in (PROBE, "random 1")]
    with tqdm(total=len(asked) * (1 + len(shown)), desc="replies", unit="reply", disable=None) as bar:
        replies = steered_replies(model, [ids[i] for i in asked["prompt"]], layer, shown, n_tokens, at=at, on_reply=bar.update)
    replies["prompt"] = asked["prompt"].to_numpy()[replies["prompt"]]
    return asked.merge(replies, on="prompt", validate="one_to_many")


def _begin_table(replies: pd.DataFrame) -> Any:
    """Shares of replies that begin with yes, no or neither."""
    from rich.table import Table

    from klb_probe.probes.steering_summary import NONE, change_name

    printed = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    printed.title = f"Replies that begin with ({replies['prompt'].nunique()} prompts, {replies['pair'].nunique()} pairs)"
    for title in ("direction", "change", "Yes", "No", "neither"):
        printed.add_column(title, justify="left" if title == "direction" else "right")
    for (direction, mode, dose), here in replies.groupby(["direction", "mode", "dose"], dropna=False, sort=False):
        shares = [f"{(here['begins'] == answer).mean():.2f}" for answer in ("Yes", "No", "neither")]
        printed.add_row(direction, "" if mode == NONE else change_name(mode, dose), *shares)
    return printed
