"""Stop requests (Ctrl-C, a scheduler's SIGTERM): honored after a step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """Training was stopped by a signal, after writing a checkpoint."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(number, step)
        self.number, self.step = number, step

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process ended by this signal."""
        return 128 + self.number

    def __str__(self) -> str:
        return (
            f"Stopped by {signal.Signals(self.number).name} after step {self.step}, with a "
            "checkpoint. To continue from there, run the same command with --resume."
        )


class StopRequests:
    """Catches signals inside a `with` block; a second one has its usual effect.

    Does nothing outside the main thread, where Python does not allow signal handlers.
    """

    def __init__(self) -> None:
        self.number = 0  # of the received signal; 0 if there was none
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._step_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._step_back()

    def _step_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
