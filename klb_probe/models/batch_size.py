"""How much goes through one pass of a model, and what happens when memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from klb_probe.errors import KlbError

log = logging.getLogger(__name__)
T = TypeVar("T")
_SAID = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "cublas_status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of an accelerator or of the host, ran out."""
    said = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in said for words in _SAID)


class BatchSize:
    """How many items go through one pass; halved for good whenever memory runs out, which is said once.

    Args:
        size: To begin with.
        remedy: What to say when one item alone is too much; without it, the error that says so goes on as it is.
    """

    def __init__(self, size: int, remedy: str | None = None) -> None:
        self.size = size
        self._remedy = remedy
        self._told = False

    def attempt(self, function: Callable[..., T], *args: Any, tried: int) -> T | None:
        """What a function of ``tried`` items returns; None where memory ran out and fewer are to be tried."""
        try:
            return function(*args)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if tried <= 1:
                if self._remedy is None:
                    raise
                raise KlbError(self._remedy) from error
        # Only here, without the error and its frames, is what the attempt held free again.
        self.size = tried // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        (log.debug if self._told else log.warning)("out of memory with --batch %d: going on with %d", tried, self.size)
        self._told = True
        return None
