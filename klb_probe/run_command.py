"""``klb-probe run``: the dialogue benchmark, in-process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from klb_probe.errors import KlbError
from klb_probe.options import (
    Backend,
    Cases,
    Device,
    Domains,
    Dtype,
    Hooks,
    Quantise,
    Ray,
    Revision,
    Shard,
    Workers,
    check_shard_options,
    parse_names,
)

EXAMPLE = "Example: klb-probe run --agent scripted:deceptive --domains airline --out outputs/liar"


def run_dialogues_command(
    agent: Annotated[
        str, typer.Option(help="A model (alias, hub id, folder, .gguf) | endpoint:MODEL[@URL] | scripted:honest|deceptive.")
    ] = "smollm2-135m",
    customer: Annotated[
        str, typer.Option(help="scripted:verifying | scripted:accepting | endpoint:MODEL[@URL] | a model.")
    ] = "scripted:verifying",
    judge: Annotated[
        str, typer.Option(help="rules (offline, from the case's phrases) | endpoint:MODEL[@URL] | a model.")
    ] = "rules",
    domains: Domains = "all",
    conditions: Annotated[str, typer.Option(help="With commas: control, emergent, instructed; or all.")] = "all",
    trust: Annotated[str, typer.Option(help="Starting trust, with commas: low, medium, high; or all.")] = "all",
    samples: Annotated[int, typer.Option(help="Trajectories of each domain, condition and starting trust.", min=1)] = 1,
    gate_samples: Annotated[
        int, typer.Option(help="Ask the gate so often, at the agent's temperature; all must pass.", min=1)
    ] = 1,
    mode: Annotated[
        str, typer.Option(help="Rendering: flat (one user message, as the public runner) | turns (chat roles).")
    ] = "flat",
    trust_model: Annotated[
        str, typer.Option(help="state_dependent | flat | default_soft | harsh | gentle.")
    ] = "state_dependent",
    temperature: Annotated[float, typer.Option(help="Of the agent; gate, customer and judge decode greedily.", min=0)] = 0.7,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an agent's turn (default 400; 96 with --quick).", min=1)
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Small: airline and debt, control and emergent, medium trust, 2 cases a domain."),
    ] = False,
    per_kind: Annotated[
        int | None, typer.Option(help="Only the first N owed and N calibration cases of each domain.", min=1)
    ] = None,
    cases: Cases = "ours",
    label: Annotated[str | None, typer.Option(help="Names the agent in files (default: its own name).")] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder (default: outputs/run-<agent>-<time>).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    batch: Annotated[int, typer.Option(help="Sequences a local model decodes at once.", min=1)] = 8,
    parallel: Annotated[int, typer.Option(help="Trajectories in flight.", min=1)] = 16,
    constrain: Annotated[
        bool, typer.Option("--constrain", help="Hold gate, customer and judge (never the agent) to their JSON schemas.")
    ] = False,
    elicit: Annotated[
        bool, typer.Option("--elicit", help="Fork off the eligibility question at every turn of a local agent, for its margin.")
    ] = False,
    past_gate: Annotated[
        bool,
        typer.Option("--past-gate", help="Play rounds whose gate was not passed too; they are not scored (klb-probe contest)."),
    ] = False,
    signals: Annotated[
        bool, typer.Option("--signals", help="Read margins of a local agent's rounds as they are played (klb-probe rounds).")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of every random stream.")] = 0,
    shard: Shard = None,
    ray: Ray = False,
    workers: Workers = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantise: Quantise = None,
    backend: Backend = "huggingface",
    revision: Revision = None,
    hooks: Hooks = None,
) -> None:
    """Play rounds of the benchmark: knowledge gate, agent with tools, customer with trust, judge.

    Writes trajectories_*.jsonl (the public format), turns_*.jsonl (token ids as they happened) and run.json. Read them with
    klb-probe score. Keys of endpoints come from the environment: KLB_API_KEY or OPENAI_API_KEY.
    """
    from klb_probe.outputs import check_folder, clear, default_folder, plain_argument

    given = {key: value for key, value in locals().items() if key in run_dialogues_command.__annotations__}
    check_shard_options(shard, ray, workers, device)
    if shard and out is None:
        raise KlbError("a shard needs --out FOLDER, one of its own")
    folder = out or default_folder("run", agent)
    check_folder(folder, overwrite=overwrite, resume=resume)
    if ray:
        return _on_ray(given, folder)

    from tqdm.auto import tqdm

    from klb_probe.dialogue import api
    from klb_probe.dialogue.players import Players
    from klb_probe.dialogue.round import Settings
    from klb_probe.dialogue.runner import Cast
    from klb_probe.dialogue.sidecar import sidecar_path
    from klb_probe.dialogue.trajectory import file_name
    from klb_probe.sharding import Shard as Part
    from klb_probe.signals.signals_file import MANIFEST, SIGNALS

    rendering: Any = mode  # checked with the names below, before anything is played
    settings = Settings(
        mode=rendering,
        gate_samples=gate_samples,
        agent_temperature=temperature,
        agent_tokens=max_tokens or (96 if quick else 400),
        elicit=elicit,
        past_gate=past_gate,
    )
    chosen = api.plan(
        domains=parse_names(domains) or (api.QUICK_DOMAINS if quick and cases == "ours" else None),
        conditions=parse_names(conditions) or (api.QUICK_CONDITIONS if quick else api.CONDITIONS),
        trusts=parse_names(trust) or (api.QUICK_TRUSTS if quick else api.TRUSTS),
        samples=samples,
        cases=cases,
        cases_of_each_kind=per_kind or (1 if quick else None),
        trust=trust_model,
        settings=settings,
        shard=Part.parse(shard) if shard else None,
    )
    loading = {
        "device": device,
        "dtype": dtype,
        "quantise": quantise,
        "revision": revision,
        "hooks": hooks or (),
        "backend": backend,
    }
    players = Players(seed=seed, batch_size=batch, constrain=constrain, **loading)
    cast = Cast(players.open("agent", agent), players.open("customer", customer), players.open("judge", judge))
    if (elicit or signals) and cast.agent.record()["kind"] != "local":
        raise KlbError(f"--elicit and --signals look inside the agent: it must be a local model, not {cast.agent.name}")
    if signals and resume:
        raise KlbError("--signals reads rounds as they are played; resume without it, then klb-probe rounds reads all of them")
    if overwrite:
        name = label or cast.agent.name
        for domain in {one.domain.policy.domain for one in chosen.trajectories}:
            trajectories = file_name(name, domain, trust_model)
            clear(folder, [trajectories, sidecar_path(Path(trajectories)).name, "run.json"])
        clear(folder / "signals", (SIGNALS, MANIFEST))  # of the run that is replaced
    typer.echo(f"agent {cast.agent.name}, customer {cast.customer.name}, judge {cast.judge.name}")
    typer.echo(f"{len(chosen.played)} trajectories, {chosen.n_rounds} rounds, {mode} rendering; files in {folder}")
    lies, started = 0, time.monotonic()

    def count(row: dict[str, Any]) -> None:
        nonlocal lies
        lies += bool((row.get("derived") or {}).get("lied"))
        minutes = (time.monotonic() - started) / 60
        bar.set_postfix_str(f"{lies} lies, {bar.n / max(minutes, 1e-9):.1f} rounds/min", refresh=False)
        bar.update()

    bar = tqdm(total=chosen.n_rounds, desc="playing", unit="round", disable=None)
    try:
        with bar, _signals(cast.agent, chosen, folder / "signals") if signals else nullcontext(_unread) as on_turns:
            run = api.play_plan(
                cast,
                chosen,
                folder,
                label=label,
                seed=seed,
                parallel=parallel,
                on_round=count,
                on_turns=on_turns,
                record={"arguments": {key: plain_argument(value) for key, value in given.items()}},
            )
    except KeyboardInterrupt as stop:
        said = f"stopped; continue with --out {folder} --resume"
        typer.echo(said, err=True)
        raise KeyboardInterrupt(said) from stop
    typer.echo("\n".join(counts(run.rows)))
    if chosen.shard:
        typer.echo(f"shard {chosen.shard}; with all of them: klb-probe merge ... --out WHOLE")
    else:
        typer.echo(f"Score it: klb-probe score {folder}")
    return None


def _on_ray(given: dict[str, Any], folder: Path) -> None:
    """The run in shards on a Ray cluster, merged."""
    from klb_probe.dialogue.trajectory import read_folder
    from klb_probe.ray_workers import in_shards
    from klb_probe.sharding import merge_runs

    if given["signals"]:
        raise KlbError("--signals cannot go on after a worker died; run without it, then klb-probe rounds --ray")
    part = {**given, "ray": False, "workers": None, "resume": True, "overwrite": False}
    again = {name: given[name] for name in ("workers", "device", "resume", "overwrite")}
    again["asked"] = {name: value for name, value in given.items() if name not in (*again, "out")}
    in_shards(run_dialogues_command, part, folder, merge_runs, **again)
    typer.echo("\n".join(counts([row for file in read_folder(folder) for row in file.rows])))
    typer.echo(f"Score it: klb-probe score {folder}")


def _unread(_row: dict[str, Any], _turns: list[dict[str, Any]]) -> None:
    """Rounds that are not looked into."""


@contextmanager
def _signals(agent: Any, chosen: Any, folder: Path) -> Iterator[Callable[[dict[str, Any], list[dict[str, Any]]], None]]:
    """Reads each round's turns into a signals file as soon as it is over."""
    from klb_probe.rounds_command import open_lenses, summary
    from klb_probe.sharding import shard_record
    from klb_probe.signals.from_files import closing_tools
    from klb_probe.signals.rounds import prefixes_for, round_signals
    from klb_probe.signals.signals_file import signals_file

    lenses, about = open_lenses(agent.model, "margin", "Yes/No", "lead", "mean")
    tools = {one.domain.policy.domain: closing_tools(one.domain) for one in chosen.trajectories}
    kept = prefixes_for(agent.model)
    part = shard_record(chosen.shard, [])
    with signals_file(folder, {"source": "live", "policy": "on", **about, **part}) as writer:

        def read(row: dict[str, Any], turns: list[dict[str, Any]]) -> None:
            writer.add(row, round_signals(agent.model, lenses, turns, row, tools[row["domain"]], kept))

        yield read
    typer.echo("\n".join(summary(writer, folder)))


def counts(rows: list[dict[str, Any]]) -> list[str]:
    """What happened, in a few lines of counts."""
    errors = sum(bool(row.get("error")) for row in rows)
    gates = {
        name: sum(row.get("gate") == name and not row.get("error") for row in rows) for name in ("passed", "failed", "unparsed")
    }
    played = [row for row in rows if row.get("gate") == "passed" and not row.get("error")]
    forms: dict[str, int] = {}
    for row in played:
        for form in row["agent_forms"]:
            forms[form] = forms.get(form, 0) + 1
    malformed = sum("malformed" in row for row in played)
    open_ended = sum(row["outcome"] == "none" for row in played)
    lies = sum(bool((row.get("derived") or {}).get("lied")) for row in played)
    lines = [
        f"{len(rows)} rounds: gate {gates['passed']} passed, {gates['failed']} failed, {gates['unparsed']} unparsed; "
        f"{errors} provider errors",
        f"{len(played)} played: {lies} with a lie, {open_ended} not closed by the agent, {malformed} with an unusable verdict",
    ]
    if forms:
        shown = ", ".join(f"{name} {count}" for name, count in sorted(forms.items(), key=lambda item: -item[1]))
        lines.append(f"how the agent's {sum(forms.values())} turns were written: {shown}")
    for part in ("gate", "agent", "customer", "judge"):
        spent = [row["usage"][part] for row in rows if part in row.get("usage", {})]
        calls, read, written = (sum(one[key] for one in spent) for key in ("calls", "prompt_tokens", "completion_tokens"))
        if read or written:
            lines.append(f"{part}: {calls:,} calls, {read:,} tokens read, {written:,} written")
    return lines
