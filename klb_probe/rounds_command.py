"""``klb-probe rounds``: the J-Lens on a run's rounds, from the token ids they were played with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from klb_probe.errors import KlbError
from klb_probe.options import (
    Backend,
    Cases,
    Contrast,
    Device,
    Dtype,
    Hooks,
    Model,
    Quantise,
    Ray,
    Reduce,
    Remote,
    Revision,
    Shard,
    Spaces,
    Workers,
    check_shard_options,
)

ROUNDS_EXAMPLE = "Example: klb-probe rounds outputs/liar --replay --model smollm2-135m"


def rounds(
    run: Annotated[Path, typer.Argument(help="A run's folder: trajectories_*.jsonl and their turns_*.jsonl.")],
    model: Model = "smollm2-135m",
    lens: Annotated[str, typer.Option(help="margin | logit | a file or folder | hub:REPO::FILE@REV.")] = "margin",
    replay: Annotated[
        bool,
        typer.Option(
            "--replay", help="Rebuild the prompts from the transcripts: any model, any run, the public runner's files."
        ),
    ] = False,
    cases: Cases = "ours",
    contrast: Contrast = "Yes/No",
    spaces: Spaces = "lead",
    reduce: Reduce = "mean",
    shard: Shard = None,
    ray: Ray = False,
    workers: Workers = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder (default: RUN/signals, of a shard RUN/signals.shards/i-of-n).")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the signals in --out.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantise: Quantise = None,
    backend: Backend = "huggingface",
    remote: Remote = False,
    revision: Revision = None,
    hooks: Hooks = None,
) -> None:
    """Read a yes-minus-no margin at named moments of every round, layer by layer.

    The token ids are those the rounds were played with (turns_*.jsonl); with --replay they are rebuilt from the transcripts,
    which is off-policy unless the model is the run's agent.
    Moments: gate, before_reply, reply_mean, reply_last, claim, action, elicited (runs played with --elicit). Writes
    signals.parquet and signals.json. Pair them with the lie labels: klb-probe pair.
    """
    given = {key: value for key, value in locals().items() if key in rounds.__annotations__}
    from klb_probe.outputs import check_folder, clear
    from klb_probe.sharding import Shard as Part
    from klb_probe.sharding import merge_signals, shard_record, walk_of, walks_of
    from klb_probe.signals.signals_file import MANIFEST, SIGNALS

    check_shard_options(shard, ray, workers, device)
    part = Part.parse(shard) if shard else None
    default = run / "signals.shards" / f"{part.index}-of-{part.count}" if part else run / "signals"
    folder = out or default
    check_folder(folder, overwrite=overwrite)
    if part and (folder / MANIFEST).exists():
        there = json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("shard", "the whole")
        if there != shard:
            raise KlbError(f"{folder} holds {there}; give shard {shard} a folder of its own")
    if ray:
        from klb_probe.ray_workers import in_shards

        again = {"ray": False, "workers": None, "overwrite": True}  # signals are in place only when whole
        asked = {name: value for name, value in given.items() if name not in ("workers", "device", "overwrite", "out")}
        where: dict[str, Any] = {"workers": workers, "device": device, "overwrite": overwrite}
        in_shards(rounds, {**given, **again}, folder, merge_signals, asked=asked, **where)
        typer.echo(f"Files in {folder}: signals.parquet, signals.json")
        return

    from tqdm.auto import tqdm

    from klb_probe.cases.sources import load_cases
    from klb_probe.dialogue.trajectory import read_folder
    from klb_probe.models.load import load_model
    from klb_probe.signals.from_files import (
        check_same_model,
        closing_tools,
        read_rounds,
        replayed_rounds,
        sidecar_rounds,
    )
    from klb_probe.signals.replay import policy_of
    from klb_probe.signals.signals_file import signals_file

    files = read_folder(run)
    domains = {one.policy.domain: one for one in load_cases(cases, [file.run_meta["domain"] for file in files])}
    loading: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "quantise": quantise,
        "revision": revision,
        "backend": backend,
        "remote": remote,
    }
    loaded = load_model(model, hooks=hooks or (), **loading)
    if not replay:
        for file in files:
            check_same_model(file, loaded)
    policies = {policy_of(file.run_meta, loaded) for file in files} if replay else {"on"}
    source = {"source": "replay" if replay else "sidecar", "policy": policies.pop() if len(policies) == 1 else "mixed"}
    lenses, about = open_lenses(loaded, lens, contrast, spaces, reduce)
    if overwrite:
        clear(folder, (SIGNALS, MANIFEST))
    mine = walks_of(files, part)
    parts = [replace(file, rows=[row for row in file.rows if walk_of(file, row) in mine]) for file in files]
    bar = tqdm(total=sum(len(one.rows) for one in parts), desc="reading", unit="round", disable=None)
    with bar, signals_file(folder, {**source, **about, **shard_record(part, files)}) as writer:
        for file, one in zip(files, parts, strict=True):
            domain = domains[file.run_meta["domain"]]
            if replay:
                found = replayed_rounds(one, domain, loaded, writer)
            else:  # a sidecar is checked against all of its file
                found = (pair for pair in sidecar_rounds(file) if walk_of(file, pair[0]) in mine)
            read_rounds(loaded, lenses, found, closing_tools(domain), writer, lambda _: bar.update())
    if replay:
        typer.echo(f"replay, {source['policy']}-policy, read by {loaded.name}")
    typer.echo("\n".join(summary(writer, folder)))


def open_lenses(model: Any, lens: str, contrast: str, spaces: str, reduce: str) -> tuple[list[Any], dict[str, Any]]:
    """The lens and its logit-lens twin, and what the manifest says of them."""
    from klb_probe.files import file_sha256
    from klb_probe.lens.contrast import TokenContrast, parse_pairs
    from klb_probe.lens.library import load_lens
    from klb_probe.lens.margin import LogitLens
    from klb_probe.versions import versions

    tokens = TokenContrast.of(model.chat, parse_pairs(contrast), spaces=spaces, reduction=reduce)
    twin = LogitLens.of(model, tokens)
    about: dict[str, Any] = {
        "model": model.identity,
        "fingerprint": model.fingerprint,
        "thinking": model.chat.thinking.how,
        "dtype": str(model.dtype).removeprefix("torch."),
        "backend": model.backend,
        "contrast": [[list(side) for side in pair] for pair in tokens.pairs],
        "versions": versions(),
    }
    if lens == "logit":
        return [twin], {**about, "lens": {"name": "logit"}}
    loaded = load_lens(model, tokens, path=None if lens == "margin" else lens)
    sha256 = loaded.file and file_sha256(loaded.file)
    used = {"file": str(loaded.file), "sha256": sha256, **loaded.metadata.model_dump(mode="json")}
    return [loaded, twin], {**about, "lens": used}


def summary(writer: Any, folder: Path) -> list[str]:
    """What was read and what could not be, in a few lines."""
    moments = ", ".join(f"{kind} {number}" for kind, number in writer.positions.items()) or "none"
    lines = [f"{writer.rounds} rounds; moments read: {moments}"]
    if writer.unmapped:
        why: dict[str, int] = {}
        for one in writer.unmapped:
            said = f"{one['position']}: {one['why']}"
            why[said] = why.get(said, 0) + 1
        lines.append("not found: " + "; ".join(f"{number} x {said}" for said, number in why.items()))
    return [*lines, f"Files in {folder}: signals.parquet, signals.json"]
