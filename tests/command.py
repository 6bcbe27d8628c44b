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


# A probe run of seconds on a tiny model.
SMALL_PROBE = (
    "--quick",
    *("--domains", "airline,deposit,refund"),
    *("--estimators", "mean_difference"),
    *("--shuffles", 1),
    *("--lens", "logit"),
)
