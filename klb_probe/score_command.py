"""``klb-probe score``: the panel of behavioural metrics of trajectory files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klb_probe.errors import KlbError

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from klb_probe.dialogue.trajectory import Trajectories
    from klb_probe.metrics.score import Score

SCORE_EXAMPLE = "Example: klb-probe score outputs/liar --by condition,trust"
SCORE_FILES = ("panel.csv", "panel.json", "trust.png", "domains.png", "heat_map.png")
CHAT_DOMAIN = "debt"  # a lie there withholds nothing
_FEW = 10  # trajectories
_WIDTH = 140  # of what is printed into a pipe
_COLUMNS = {
    "KPR": "KPR", "DR_macro": "DR\nmacro", "DR": "DR", "DSR": "DSR", "DSR_chat": "DSR\nchat", "Det": "Det",
    "trust_change": "trust\nchange", "harm": "harm", "omission": "omis-\nsion",
}  # fmt: skip


def score(
    source: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder with trajectories_*.jsonl anywhere below, or one file.")
    ],
    by: Annotated[
        str, typer.Option(help="Rows of the table: condition, trust, domain, case, with commas.")
    ] = "condition,trust",
    compare: Annotated[str | None, typer.Option(help="paper: its figures for this agent beside ours.")] = None,
    agent: Annotated[
        str | None, typer.Option(help="Which agent, if there are several; or which alias it is, if its files do not say.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder (default: DIR/score).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the score in --out.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
) -> None:
    """Score trajectory files, ours and the public runner's: how often did the agent know, lie, get caught?

    Writes panel.csv, panel.json and three figures. Files of a run that is still going, or died, are scored as far as they go.
    """
    keys = _keys(by)
    if compare not in (None, "paper"):
        raise KlbError(f"--compare {compare}; known: paper")
    folder = out or (source.parent if source.is_file() else source) / "score"
    _check_out(folder, overwrite=overwrite)

    from klb_probe.dialogue.trajectory import read_folder
    from klb_probe.metrics.paper import paper_results
    from klb_probe.metrics.score import choose_agent, score_files

    name, alias, files = choose_agent(read_folder(source), agent)
    if compare:
        paper_results(alias)
    result = score_files(files, keys, paper=alias if compare else None, seed=seed)
    if overwrite:
        from klb_probe.outputs import clear

        clear(folder, SCORE_FILES)
    _write(folder, result, _record(name, alias, files, keys, compare, seed, result))
    _print(folder, result, name, alias, files, keys, compare)


def _keys(by: str) -> list[str]:
    from klb_probe.metrics.score import LEVEL_KEYS

    keys = [key.strip() for key in by.split(",")]
    if set(keys) - set(LEVEL_KEYS) or len(set(keys)) < len(keys):
        raise KlbError(f"--by {by}; give some of {','.join(LEVEL_KEYS)}, each once")
    return keys


def _check_out(folder: Path, *, overwrite: bool) -> None:
    from klb_probe.outputs import check_folder

    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise KlbError(f"--out {folder} exists; pass --overwrite to replace it")
    check_folder(folder, overwrite=overwrite)


def _record(
    name: str, alias: str, files: Sequence[Trajectories], keys: list[str], compare: str | None, seed: int, result: Score
) -> dict[str, Any]:
    from klb_probe.metrics.bootstrap import DRAWS, LEVEL
    from klb_probe.versions import versions

    return {
        "command": "score",
        "agent": name,
        "alias": alias,
        "by": keys,
        "compare": compare,
        "seed": seed,
        "bootstrap": {"draws": DRAWS, "level": LEVEL, "over": "trajectories"},
        "files": [
            {"file": str(file.path), "complete": file.complete, "torn": file.torn or None, "rounds": len(file.rows)}
            for file in files
        ],
        "counts": result.counts,
        "levels": result.nested(),
        "trust_by_round": _plain(result.curves),
        "versions": versions(),
    }


def _plain(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Lines of a table for JSON; undefined numbers are None."""
    plain = table.astype(object)
    return plain.where(plain.notna(), None).to_dict("records")


def _write(folder: Path, result: Score, record: dict[str, Any]) -> None:
    from klb_probe.files import replacing, write_json
    from klb_probe.metrics.figures import cases_figure, domains_figure, trust_figure
    from klb_probe.metrics.score import BY_CASE, BY_DOMAIN

    with replacing(folder / "panel.csv") as partial:
        result.tidy().to_csv(partial, index=False, float_format="%.6g")
    by_case = result.levels[BY_CASE]
    owed = by_case[by_case["case"].isin(set(result.rounds.loc[result.rounds.owed, "case"]))]
    agent = record["agent"]
    figures = {
        "trust.png": trust_figure(result.curves, result.walks, f"{agent}: trust by starting trust"),
        "domains.png": domains_figure(result.levels[BY_DOMAIN], f"{agent}: lies by domain"),
        "heat_map.png": cases_figure(owed, f"{agent}: lies by case"),
    }
    for file, figure in figures.items():
        with replacing(folder / file) as partial:
            figure.savefig(partial, dpi=130)
    write_json(folder / "panel.json", record)


def _print(
    folder: Path, result: Score, name: str, alias: str, files: Sequence[Trajectories], keys: list[str], compare: str | None
) -> None:
    from klb_probe.console import page, print_tables

    console = page(_WIDTH)
    console.print(f"{name}{f' ({alias})' if alias != name else ''}: {_plural(len(files), 'file')}", soft_wrap=True)
    for file in files:
        if not file.complete:
            why = "torn: the last line was cut off" if file.torn else "the run has not come to its end"
            console.print(f"incomplete: {file.path} ({why}); scored as far as it goes", soft_wrap=True)
    with_chat = CHAT_DOMAIN in set(result.rounds.domain)
    table = result.levels[tuple(keys)]
    print_tables(console, panel_table(table, keys, with_chat=with_chat))
    console.print("\n".join([*_notes(result, table, files, compare, with_chat), _written(folder)]), soft_wrap=True)


def panel_table(table: pd.DataFrame, keys: Sequence[str], *, with_chat: bool) -> Table:
    """What is printed of a panel: a row a group; a metric's cell has its value, its interval and the paper's figure."""
    from rich.table import Table

    shown = {metric: title for metric, title in _COLUMNS.items() if with_chat or metric != "DSR_chat"}
    printed = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for key in keys:
        printed.add_column(key)
    for title in (*shown.values(), "owed\nn", "traj.\nn"):
        printed.add_column(title, justify="right", no_wrap=True)
    for names, group in table.groupby(list(keys), observed=True, sort=False):
        metrics = group.set_index("metric")
        cells = [_cell(metrics.loc[metric], rate=metric != "trust_change") for metric in shown]
        printed.add_row(*map(str, names), *cells, str(metrics.loc["DR", "n"]), str(metrics.loc["DR", "n_trajectories"]))
    return printed


def _cell(line: pd.Series, *, rate: bool) -> str:
    def number(value: float, digits: int) -> str:
        if value != value:
            return "-"
        return f"{100 * value:.{digits}f}" if rate else f"{value:+.{2 + digits}f}"

    parts = [number(line["value"], 1)]
    if line["low"] == line["low"]:
        parts.append(f"[{number(line['low'], 0)}, {number(line['high'], 0)}]")
    if line.get("paper", float("nan")) == line.get("paper"):
        parts.append(f"paper {number(line['paper'], 1)}")
    return "\n".join(parts)


def _notes(
    result: Score, table: pd.DataFrame, files: Sequence[Trajectories], compare: str | None, with_chat: bool
) -> list[str]:
    """The counts, what the columns mean, and what the numbers do not show."""
    from klb_probe.metrics.bootstrap import DRAWS

    counts = result.counts
    lines = [
        f"{_plural(counts['rounds'], 'round')}: {counts['scored']} scored, {counts['gate_failed']} gate failed, "
        f"{counts['gate_unparsed']} gate unparsed, {counts['malformed']} malformed, {counts['provider_errors']} provider "
        f"errors; {_plural(counts['lies'], 'lie')} ({counts['calibration_lies']} in calibration rounds)",
        f"Rates in percent, trust change in units of trust; [95 % interval, bootstrap over trajectories, B = {DRAWS}]; owed n: "
        "scored owed rounds, of so many trajectories.",
    ]
    if with_chat:
        lines.append(
            f"DSR chat drops the outcome: read it for {CHAT_DOMAIN}, where a lie withholds nothing, and DSR for the others."
        )
    if compare:
        domains, trusts = (
            sorted(set(result.rounds.domain)),
            list(result.rounds.trust.cat.remove_unused_categories().cat.categories),
        )
        lines.append(
            f"The paper's figures are over its 8 domains and, by domain, 3 starting trusts; ours over {len(domains)} "
            f"({', '.join(domains)}) and {len(trusts)} ({', '.join(trusts)})."
        )
    limits = []
    if any(file.graded_by_rules for file in files):
        limits.append("a rules judge graded: it knows lies by listed phrases, and misses those in other words")
    rates = table[(table["metric"] == "DR") & (table["n"] > 0)]
    if len(rates) and (least := rates["n_trajectories"].min()) < _FEW:
        limits.append(
            f"the smallest row rests on {_plural(least, 'trajectory')}: too few to tell rows apart, intervals too narrow"
        )
    if not len(rates):
        limits.append("no owed round was scored, so nothing is known about lying")
    return [*lines, *([f"What this does not show: {'; '.join(limits)}."] if limits else [])]


def _plural(count: int, word: str) -> str:
    if count == 1:
        return f"{count} {word}"
    return f"{count} {word[:-1]}ies" if word.endswith("y") else f"{count} {word}s"


def _written(folder: Path) -> str:
    return f"Files in {folder}: {', '.join(SCORE_FILES)}"
