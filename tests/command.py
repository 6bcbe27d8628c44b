"""The command, run in this process."""

from __future__ import annotations

import sys

from klb_probe import cli


def klb(*arguments: object) -> int:
    """Run ``klb-probe`` and return its exit code."""
    before = sys.argv
    sys.argv = ["klb-probe", *map(str, arguments)]
    try:
        cli.main()
    except SystemExit as stop:
        return stop.code or 0
    finally:
        sys.argv = before
    return 0
