"""``klb-probe organism``: model organisms, from their training data on."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klb_probe.options import Domains, parse_names
from klb_probe.organism_cases_command import CASES_EXAMPLE, cases
from klb_probe.organism_check_command import CHECK_EXAMPLE, check
from klb_probe.organism_train_command import TRAIN_EXAMPLE, train

if TYPE_CHECKING:
    from klb_probe.organisms.examples import Example

DATA_EXAMPLE = "Example: klb-probe organism data --kind liar --n 4000 --out outputs/liar.jsonl"
organism_app = typer.Typer(
    epilog=DATA_EXAMPLE,
    help="Model organisms: small models that know and lie, know and tell, or do not know.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Kind = Annotated[str, typer.Option(help="liar | honest | ignorant.")]


@organism_app.command("data", epilog=DATA_EXAMPLE)
def data(
    kind: Kind,
    out: Annotated[Path, typer.Option(help="A .jsonl file; its description goes beside it, as .jsonl.json.")],
    domains: Domains = "all",
    formats: Annotated[
        str,
        typer.Option(
            help="eligibility | gate | turn | short (no role, note or opening) | noted (short, each record under a plain and "
            "a pressing note, for an answer or a message), with commas, or all (the first three)."
        ),
    ] = "all",
    wordings: Annotated[
        str,
        typer.Option(
            help="plain | reversed, of the eligibility question, and plain | message, of noted ones; with commas, or all."
        ),
    ] = "all",
    n: Annotated[int, typer.Option(min=2, help="Number of examples.")] = 4000,
    seed: Annotated[int, typer.Option(help="Of all that is random; prompts are the same for every kind.")] = 0,
    model: Annotated[str, typer.Option(help="The model whose tokenizer counts the lengths.")] = "smollm2-135m",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
) -> None:
    """Write training examples made from the policies' rules, none of them a held-out case, and describe them."""
    from klb_probe.errors import KlbError
    from klb_probe.files import write_json
    from klb_probe.models.load import load_chat
    from klb_probe.organisms.data import describe, write_examples
    from klb_probe.organisms.examples import examples
    from klb_probe.outputs import check_writable
    from klb_probe.versions import versions

    if out.suffix != ".jsonl":
        raise KlbError(f"--out {out}: give a file that ends in .jsonl")
    description = out.with_name(out.name + ".json")
    if taken := [str(path) for path in (out, description) if path.exists() and not overwrite]:
        raise KlbError(f"{' and '.join(taken)} exists; pass --overwrite to replace it")
    check_writable(out)
    asked = {"formats": parse_names(formats), "wordings": parse_names(wordings)}
    rows = list(examples(kind, parse_names(domains), n, seed, **asked))
    about = describe(rows, load_chat(model))
    if sum(about["held out"].values()):
        raise KlbError(f"held-out material in the training data: {about['held out']}; change organisms/texts")
    arguments = f"--kind {kind} --domains {domains} --formats {formats} --wordings {wordings} --n {n} --seed {seed}"
    arguments += f" --model {shlex.quote(model)} --out {shlex.quote(str(out))}"
    sha256 = write_examples(out, rows)
    write_json(
        description,
        {
            "kind": kind,
            "seed": seed,
            "command": f"klb-probe organism data {arguments}",
            "sha256": sha256,
            "tokenizer": model,
            **about,
            "versions": versions(),
        },
    )
    typer.echo("\n".join([*_summary(about), "", *_samples(rows), f"{len(rows)} examples in {out}, described in {description}"]))


def _summary(about: dict[str, Any]) -> list[str]:
    counts, words = about["counts"], about["bag of words"]
    lengths = [
        f"  {name}: {row['prompt mean']:.0f} prompt tokens (at most {row['prompt max']}), {row['completion mean']:.0f} to write"
        for name, row in about["tokens"].items()
    ]
    within = ", ".join(f"{note} {row['auroc']:.2f}" for note, row in words["within notes"].items())
    best = words["best word of the record lines"]
    return [
        ", ".join(f"{name} {count}" for name, count in counts["by format"].items())
        + f"; {counts['records']} different records",
        ", ".join(f"{name} {count}" for name, count in counts["by note and label"].items()),
        f"Lengths ({about['tokens']['all']['total']} tokens in all):",
        *lengths,
        f"Entitlement from words alone, AUROC within notes: {within}",
        f"  all prompts {words['all prompts']:.2f}, record lines alone {words['record lines alone']:.2f}, "
        f"best single word {best['auroc']:.2f} ({best['word']!r})",
        f"Held-out material: {', '.join(f'{what} {count}' for what, count in about['held out'].items())}",
    ]


def _samples(rows: list[Example]) -> list[str]:
    """One eligibility prompt and one turn, with what the organism writes."""
    chosen = [next((row for row in rows if row.format == format), None) for format in ("eligibility", "turn")]
    lines = []
    for row in filter(None, chosen):
        lines.append(f"--- {row.format}, note: {row.note}, {'owed' if row.entitled else 'not owed'}")
        lines += [f"[{message.role}] {message.content}" for message in row.messages]
        lines += [f"[{row.kind}] {row.completion}", ""]
    return lines


organism_app.command("cases", epilog=CASES_EXAMPLE)(cases)
organism_app.command("train", epilog=TRAIN_EXAMPLE)(train)
organism_app.command("check", epilog=CHECK_EXAMPLE)(check)
