"""Ctrl-C and SIGTERM during a long fit: both raise KeyboardInterrupt, but never in the middle of a sum or a file."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Interrupts:
    """Interrupts of this process, held back while something must not be torn."""

    def __init__(self) -> None:
        self._holding = self._pending = False

    @classmethod
    @contextlib.contextmanager
    def caught(cls, wanted: bool = True) -> Iterator[Interrupts]:
        """Handle SIGINT and SIGTERM inside the context. Signals belong to the main thread; elsewhere nothing changes."""
        interrupts = cls()
        before: dict[int, Any] = {}
        if wanted and threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, interrupts._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield interrupts
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, _number: int, _frame: Any) -> None:
        if self._holding:
            self._pending = True
        else:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Put interrupts off until the end of the context."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            pending, self._pending = self._pending, False
        if pending:
            raise KeyboardInterrupt
