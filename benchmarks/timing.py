"""Timing that the benchmark rows share."""

from __future__ import annotations

import time
from collections.abc import Callable


def timed(work: Callable[[], object]) -> tuple[float, object]:
    """Seconds of wall time, and the result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def ratio(seconds: list[float]) -> str:
    """How much faster the second is."""
    return f"{seconds[0] / seconds[1]:.1f}x faster"
