"""Deferring Ctrl-C while several things that belong together are changed.

Knows nothing about what is changed.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class uninterrupted:  # noqa: N801 (reads like a statement, as contextlib's do)
    """Inside the block, Ctrl-C waits; at its end, the signal goes to the usual handler.

    >>> with uninterrupted():
    ...     pass

    Does nothing outside the main thread, where Python runs no signal handlers.
    """

    def __init__(self) -> None:
        self._noted: tuple[int, FrameType | None] | None = None
        self._before: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGINT)
        if callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Let signals through again; after an error on the way in or out, `with` does not."""
        before = self._before
        if before is None:
            return
        signal.signal(signal.SIGINT, before)
        self._before = None
        if self._noted is not None:
            before(*self._noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number, frame
