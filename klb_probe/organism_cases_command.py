"""``klb-probe organism cases``: fresh held-out cases in the project's own format."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from klb_probe.options import Domains, parse_names

CASES_EXAMPLE = "Example: klb-probe organism cases --domains airline --n 24 --out outputs/fresh"


def cases(
    out: Annotated[Path, typer.Option(help="A scenarios folder, for --cases of the other commands.")],
    domains: Domains = "all",
    n: Annotated[int, typer.Option(min=2, help="Cases of each domain, half of them owed.")] = 40,
    seed: Annotated[int, typer.Option(help="Of all that is random; training data are made with small seeds.")] = 2_000_000,
    data: Annotated[
        list[Path] | None, typer.Option(help="Training file, whose records do not come up again; may be repeated.")
    ] = None,
    organisms: Annotated[
        str | None,
        typer.Option(help="Organisms whose training records stay out, with commas, or none (default: all that ship)."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace policies and cases of these domains.")] = False,
) -> None:
    """Write a scenarios folder of new cases under the brief policies, none of them held out or trained on."""
    from klb_probe.cases.load import load_domains
    from klb_probe.models.registry import registry
    from klb_probe.organisms.fresh_cases import fresh_cases, read_trained, write_cases
    from klb_probe.organisms.texts import load_organism_domains
    from klb_probe.outputs import check_folder

    check_folder(out, overwrite=overwrite)
    chosen = [alias for alias, entry in registry().items() if entry.adapter]
    if organisms is not None:
        chosen = [] if organisms == "none" else [name.strip() for name in organisms.split(",")]
    trained = read_trained(data or (), chosen)
    made = [fresh_cases(domain, texts, n, seed, trained) for domain, texts in load_organism_domains(parse_names(domains))]
    files = "".join(f" --data {shlex.quote(str(path))}" for path in data or ())
    command = f"klb-probe organism cases --domains {domains} --n {n} --seed {seed}{files}"
    command += f" --organisms {','.join(chosen) or 'none'} --out {shlex.quote(str(out))}"
    for fresh in made:
        write_cases(out, fresh, command=command, seed=seed, trained=trained)
    for domain, fresh in zip(load_domains([one.domain.policy.domain for one in made], out), made, strict=True):
        owed = sum(case.kind == "owed" for case in domain.cases)
        words = "openings not compared with training prompts (--data compares them)"
        if fresh.used_openings is not None:
            words = f"{fresh.used_openings} share story and request with a prompt of the training files"
        typer.echo(
            f"{domain.policy.domain}: {len(domain.cases)} cases ({owed} owed), each with a twin; {fresh.repeated} share what "
            f"the rules look at with a training record; {words}"
        )
    typer.echo(f"use them with --cases {out}")
