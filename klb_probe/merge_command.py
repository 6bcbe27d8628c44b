"""``klb-probe merge``: finished shards of a run, of its signals, or of a lens, put together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from klb_probe.errors import KlbError

# Blank lines make a line of each command.
MERGE_EXAMPLE = """Example:

klb-probe run --agent scripted:honest --quick --shard 1/2 --out outputs/part1

klb-probe run --agent scripted:honest --quick --shard 2/2 --out outputs/part2

klb-probe merge outputs/part1 outputs/part2 --out outputs/honest"""


def merge(
    shards: Annotated[list[Path], typer.Argument(help="What run, rounds or fit wrote with --shard: all of them.")],
    out: Annotated[Path, typer.Option(help="Folder (or lens file) to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what --out holds.")] = False,
) -> None:
    """Put shards together: what one process would have written, in the order of the shards.

    Shards of another model, seed or setting are refused, and missing ones are named.
    """
    from klb_probe.outputs import check_folder
    from klb_probe.sharding import merge as merge_shards

    if all(path.is_file() for path in shards):
        from klb_probe.fit import merge as merge_lenses

        return merge_lenses(shards, out, overwrite)
    whole = out.resolve()
    for shard in (path.resolve() for path in shards):
        if shard == whole or whole in shard.parents or shard in whole.parents:
            raise KlbError(f"--out {out} is, holds or lies in shard {shard}; name another folder, or rounds would count twice")
    check_folder(out, overwrite=overwrite)
    typer.echo(f"merged {len(shards)} shards: {merge_shards(shards, out)}\n{out}")
    return None
