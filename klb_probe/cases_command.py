"""``klb-probe cases``: list, show, check and export cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klb_probe.options import Cases, Domains, parse_names

if TYPE_CHECKING:
    from klb_probe.cases.explain import Finding, Reason
    from klb_probe.cases.load import Domain
    from klb_probe.cases.schema import Case, Policy

cases_app = typer.Typer(
    epilog="Example: klb-probe cases show airline/other-airport",
    help="The cases: what a customer is owed, and why.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_OWED = {True: "Owed", False: "Not owed"}
_NOT_SHOWN = "  (never shown to the model)"
_KINDS = ("all", "owed", "calibration")


@cases_app.command("list", epilog="Example: klb-probe cases list --domains airline,debt --kind calibration")
def list_cases(
    cases: Cases = "ours",
    domains: Domains = "all",
    kind: Annotated[str, typer.Option(help="all | owed | calibration.")] = "all",
) -> None:
    """One line a case: id, kind, difficulty, what it is about."""
    from rich.table import Table

    from klb_probe.cases.sources import load_cases
    from klb_probe.console import page, print_tables
    from klb_probe.errors import KlbError

    if kind not in _KINDS:
        raise KlbError(f"--kind {kind}; known: {', '.join(_KINDS)}")
    loaded = load_cases(cases, parse_names(domains))
    table = Table(box=None, pad_edge=False)
    for title in ("case", "kind", "difficulty", "situation"):
        table.add_column(title, no_wrap=title != "situation")
    shown = [case for domain in loaded for case in domain.cases if kind in ("all", case.kind)]
    for case in shown:
        table.add_row(case.id, case.kind, case.difficulty or "-", case.situation)
    # Into a pipe: one line a case, however long.
    print_tables(page(400), table)
    owed = sum(case.kind == "owed" for case in shown)
    typer.echo(f"{len(shown)} cases ({owed} owed, {len(shown) - owed} calibration) in {len(loaded)} domains")


@cases_app.command("show", epilog="Example: klb-probe cases show airline/late-arrival-domestic")
def show_case(
    case: Annotated[str, typer.Argument(help="Its id, such as airline/late-arrival-domestic (see klb-probe cases list).")],
    cases: Cases = "ours",
) -> None:
    """Print a case: record, requirements met and missed, label, the twin's flipped field, and its texts."""
    from klb_probe.cases.load import TWIN
    from klb_probe.cases.sources import load_cases
    from klb_probe.errors import KlbError

    wanted = case.removesuffix(TWIN)
    loaded = load_cases(cases, [wanted.partition("/")[0]])
    found = [(domain, one) for domain in loaded for one in domain.cases if one.id == wanted]
    if not found:
        import difflib

        near = difflib.get_close_matches(wanted, [one.id for domain in loaded for one in domain.cases], cutoff=0.4)
        raise KlbError(f"no case {case}; {'near: ' + ', '.join(near) if near else 'see klb-probe cases list'}")
    typer.echo("\n".join(case_lines(*found[0])))


@cases_app.command("check", epilog="Example: klb-probe cases check ours")
def check_cases(
    source: Annotated[str, typer.Argument(help="ours, a scenarios folder, knownliebench:PATH or hub:OWNER/NAME.")] = "ours",
) -> None:
    """Validate cases: every problem at once, with file, line, case and field; exit code 2 if there is any."""
    from klb_probe.cases.load import load_framings, read_domains
    from klb_probe.cases.sources import OURS, load_cases
    from klb_probe.errors import KlbError

    folder = Path(source)
    if source == OURS or (folder / "domains").is_dir():
        root = None if source == OURS else folder
        loaded, problems = read_domains(root=root)
        found = [str(problem) for problem in problems]
        try:
            load_framings(root)
        except KlbError as error:
            found.append(str(error))
        for line in found:
            typer.echo(line, err=True)
        if found:
            typer.echo(f"{len(found)} problem{'s' * (len(found) > 1)}", err=True)
            raise typer.Exit(2)
    else:
        loaded = load_cases(source)
    cases = [case for domain in loaded for case in domain.cases]
    twins = sum(case.twin is not None for case in cases)
    owed = sum(case.kind == "owed" for case in cases)
    said = f"{len(loaded)} domains, {len(cases)} cases ({owed} owed, {len(cases) - owed} calibration), {twins} twins"
    computed = source == OURS or (folder / "domains").is_dir()
    typer.echo(f"{said}: {'every label follows from its record, every twin turns it' if computed else 'labels as published'}")


@cases_app.command("export", epilog="Example: klb-probe cases export --out outputs/cases.jsonl")
def export_cases(
    out: Annotated[Path, typer.Option(help="A .jsonl or .parquet file.")],
    cases: Cases = "ours",
    domains: Domains = "all",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
) -> None:
    """Write cases and twins as a table, one row each, with computed labels."""
    from klb_probe.cases.sources import load_cases
    from klb_probe.errors import KlbError
    from klb_probe.files import replacing, write_text
    from klb_probe.outputs import check_writable

    if out.suffix not in (".jsonl", ".parquet"):
        raise KlbError(f"--out {out}: give a file that ends in .jsonl or .parquet")
    if out.exists() and not overwrite:
        raise KlbError(f"--out {out} exists; pass --overwrite to replace it")
    check_writable(out)
    rows = [row for domain in load_cases(cases, parse_names(domains)) for row in case_rows(domain)]
    if out.suffix == ".jsonl":
        write_text(out, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))
    else:
        import pandas as pd

        # A record's fields differ from domain to domain: one JSON column.
        table = pd.DataFrame([{**row, "record": json.dumps(row["record"], ensure_ascii=False, default=str)} for row in rows])
        with replacing(out) as path:
            table.to_parquet(path, index=False)
    typer.echo(f"{len(rows)} rows in {out}")


def case_rows(domain: Domain) -> list[dict[str, Any]]:
    """A domain's cases and twins as plain rows. Texts for the judge stand with the case only: a twin's truth differs."""
    rows = []
    for case in domain.cases:
        for twin in (False, True) if case.twin is not None else (False,):
            situation = domain.situation(case, twin=twin)
            rows.append(
                {
                    "id": situation.id,
                    "pair": situation.pair,
                    "domain": situation.domain,
                    "twin": twin,
                    "entitled": situation.entitled,
                    "kind": case.kind,
                    "difficulty": case.difficulty,
                    "situation": case.situation,
                    "record_id": case.record_id,
                    "record": {field.name: situation.record[field.name] for field in domain.policy.shown_fields},
                    "opening": situation.opening,
                    "flipped_field": case.twin.field if case.twin is not None else None,
                    "true_facts": [] if twin else list(case.true_facts),
                    "false_claim": None if twin else case.false_claim,
                    "denial_phrases": [] if twin else list(case.denial_phrases),
                    "disclosure_phrases": [] if twin else list(case.disclosure_phrases),
                    "owed_outcome": domain.policy.outcomes.owed.id,
                    "favored_outcome": domain.policy.outcomes.favored.id,
                }
            )
    return rows


def case_lines(domain: Domain, case: Case) -> list[str]:
    """What ``klb-probe cases show`` prints."""
    from klb_probe.cases.explain import explain

    policy = domain.policy
    fields = {field.name: field for field in policy.record_fields}
    original = domain.situation(case)
    lines = [
        f"{case.id}  ({case.kind}, {case.difficulty or 'difficulty not given'}; {policy.institution})",
        case.situation,
        "",
        f"Record {case.record_id}",
        *(
            f"  {field.label}: {field.render(original.record[field.name])}{_NOT_SHOWN if field.hidden else ''}"
            for field in policy.record_fields
        ),
        "",
        f'The {policy.customer_word} writes: "{original.opening}"',
        "",
        f"{_OWED[original.entitled]}: {policy.outcomes.owed.words}",
        *(line for finding in explain(policy, original.record) for line in _finding_lines(policy, finding)),
    ]
    if case.twin is not None:
        flip, field = domain.situation(case, twin=True), fields[case.twin.field]
        before, after = (field.render(value) for value in (original.record[field.name], case.twin.value))
        lines += ["", f"Twin {flip.id}", f"  {field.label}: {before} -> {after}"]
        if flip.opening != original.opening:
            lines.append(f'  The {policy.customer_word} then writes: "{flip.opening}"')
        lines.append(f"{_OWED[flip.entitled]}; what the flip turns:")
        pairs = zip(explain(policy, original.record), explain(policy, flip.record), strict=True)
        lines += [line for old, new in pairs if old.met != new.met for line in _finding_lines(policy, new)]
    for title, texts in (
        ("True facts", case.true_facts),
        ("A false claim here", (case.false_claim,) if case.false_claim else ()),
        ("Denial phrases (false here)", (", ".join(case.denial_phrases),) if case.denial_phrases else ()),
        ("Disclosure phrases", (", ".join(case.disclosure_phrases),) if case.disclosure_phrases else ()),
    ):
        if texts:
            lines += ["", title, *(f"  {text}" for text in texts)]
    return lines


def _finding_lines(policy: Policy, finding: Finding) -> list[str]:
    cites = {clause.id: f" (rule {number}, {clause.cite})" for number, clause in enumerate(policy.clauses, 1)}
    requirement = finding.requirement
    return [
        f"  {'met' if finding.met else 'MISSED'}: {requirement.says}{cites.get(requirement.clause or '', '')}",
        *_reason_lines(finding.reason, depth=2),
    ]


def _reason_lines(reason: Reason, depth: int) -> list[str]:
    inside = [line for one in reason.inside for line in _reason_lines(one, depth + 1)]
    return [f"{'  ' * depth}[{'x' if reason.holds else ' '}] {reason.words}{':' * bool(inside)}", *inside]
