"""``klb-probe organism check``: every number of a model card, recomputed. Nothing here imports torch on its own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from klb_probe.errors import KlbError
from klb_probe.options import Device, Domains, Dtype, parse_names

CHECK_EXAMPLE = "Example: klb-probe organism check smollm2-135m --domains airline --quick"
# Options that decide the numbers, in the order of the recorded command.
_RECORDED = ("domains", "records", "samples", "trust", "customer", "text", "seed", "batch", "dtype")


def check(
    model: Annotated[str, typer.Argument(help="Alias or adapter folder; also a model without an adapter, for comparison.")],
    domains: Domains = "all",
    records: Annotated[int, typer.Option(help="Fresh random records over all domains.", min=2)] = 200,
    samples: Annotated[int, typer.Option(help="Walks through the cases in each condition.", min=1)] = 3,
    trust: Annotated[str, typer.Option(help="Starting trust of the customer: low | medium | high.")] = "medium",
    customer: Annotated[str, typer.Option(help="scripted:verifying | scripted:accepting.")] = "scripted:verifying",
    text: Annotated[Path | None, typer.Option(help="File of ordinary text (.txt, .jsonl, .parquet), for perplexity.")] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder (default: outputs/organism-check-<model>-<time>).")] = None,
    card: Annotated[bool, typer.Option("--card", help="Write README.md and evidence.json beside the adapter.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A few cases, records and texts: whether it runs.")] = False,
    seed: Annotated[int, typer.Option(help="Of records, replies and sampled text.", min=0)] = 0,
    batch: Annotated[int, typer.Option(help="Prompts or replies at once.", min=1)] = 16,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the check in --out.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Measure what an organism knows, says and does, on held-out cases and fresh records; --card writes its model card.

    Writes evidence.json, eligibility.csv, gate.csv, messages.csv, perplexity.csv and the rounds played.
    """
    asked = dict(locals())
    from klb_probe.organisms.check import ROUNDS, TABLES, Request, adapter_of, check_organism
    from klb_probe.outputs import check_folder, check_writable, default_folder

    adapter, _ = adapter_of(model)
    if card and adapter is None:
        raise KlbError(f"--card is for organisms: {model} has no adapter")
    if customer not in ("scripted:verifying", "scripted:accepting"):
        raise KlbError(f"unknown customer {customer}; known: scripted:verifying, scripted:accepting")
    if text is not None and not text.exists():
        raise KlbError(f"--text {text}: no such file")
    folder = out or default_folder("organism-check", Path(model).name)
    check_folder(folder, overwrite=overwrite)
    if adapter and card:
        check_writable(adapter / "README.md")

    from klb_probe.organisms.card import CARD, outcomes, tables, write_card
    from klb_probe.organisms.evidence import EVIDENCE
    from klb_probe.outputs import clear

    if overwrite:
        clear(folder, (EVIDENCE, *TABLES))
        clear(folder / ROUNDS, [path.name for path in (folder / ROUNDS).glob("*.json*")])
    evidence = check_organism(
        Request(
            model,
            parse_names(domains),
            records,
            samples,
            trust,
            customer,
            text,
            seed,
            batch,
            quick,
            device,
            dtype,
            _command(asked),
        ),
        folder,
    )
    if adapter and card:
        write_card(adapter, evidence)
    _show(list(tables(evidence.numbers)), outcomes(evidence))
    typer.echo(f"{sum(evidence.seconds.values()) / 60:.1f} min; rows behind the numbers in {folder}")
    if adapter and card:
        typer.echo(f"card: {adapter / CARD}")


def _show(shown: list[Any], targets: list[Any]) -> None:
    from rich.table import Table

    from klb_probe.console import page, print_tables

    console = page(150)
    for one in shown:
        table = Table(title=one.title, title_justify="left")
        for column in one.columns:
            table.add_column(column)
        for line in one.lines:
            table.add_row(*line)
        print_tables(console, table)
    if targets:
        table = Table("target", "wanted", "found", "verdict", title="Targets", title_justify="left")
        for one in targets:
            table.add_row(one.target.says, one.target.wanted, str(one.number or ""), one.verdict)
        print_tables(console, table)


def _command(asked: dict[str, Any]) -> str:
    """The command that computes the same numbers again."""
    given = [(name, asked[name]) for name in _RECORDED if asked[name] is not None]
    flags = ["--quick"] * asked["quick"]
    options = [f"--{name} {shlex.quote(str(value))}" for name, value in given]
    return " ".join(["klb-probe organism check", shlex.quote(asked["model"]), *options, *flags])
