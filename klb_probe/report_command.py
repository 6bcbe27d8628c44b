"""``klb-probe report``: one HTML page of saved outputs, to look at, to send, to keep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

REPORT_EXAMPLE = "Example: klb-probe report outputs/demo"


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR...", help="Output folders of jlens, run, rounds, score, pair, probe, contest, organism check."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The page (default: report.html in the first folder).")] = None,
    title: Annotated[str | None, typer.Option(help="Its title (default: what is in it).")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the page in --out.")] = False,
) -> None:
    """Write one self-contained HTML page of saved outputs: margins by depth, pairs, token maps, rounds, pairings, probes.

    Any number and mix of folders. What a command put inside another's folder (RUN/signals, RUN/score) comes along. The page
    needs no network and no other file. Nothing is computed anew but the margins of single domains, by the code of jlens.
    """
    from klb_probe.errors import KlbError
    from klb_probe.files import write_text
    from klb_probe.outputs import check_writable

    page = out or folders[0] / "report.html"
    if page.is_dir():
        raise KlbError(f"--out {page} is a folder; name a file, such as {page / 'report.html'}")
    if page.exists() and not overwrite:
        raise KlbError(f"{page} exists; pass --overwrite to replace it, or --out FILE")
    check_writable(page)

    from klb_probe.report.build import report as build

    write_text(page, build(folders, title))
    typer.echo(f"{page}: {page.stat().st_size / 1e6:.1f} MB, no other file needed")
    if open_page:
        import webbrowser

        if not webbrowser.open(page.resolve().as_uri()):
            typer.echo(f"no browser found; open {page.resolve()} in one", err=True)
