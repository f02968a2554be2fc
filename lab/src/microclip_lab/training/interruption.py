"""Being asked to stop (Ctrl-C, a scheduler's SIGTERM): at the end of a step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """Training ended because it was asked to, after writing a checkpoint."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(number, step)
        self.number, self.step = number, step

    @property
    def exit_code(self) -> int:
        """What a shell reports of a process that such a signal ended."""
        return 128 + self.number

    def __str__(self) -> str:
        return (
            f"Stopped by {signal.Signals(self.number).name} after step {self.step}; the checkpoint "
            "is written. The same command with --resume goes on from there."
        )


class StopRequests:
    """Listens inside a `with` block; asked a second time, it lets the signal do what it did before.

    Outside the main thread nothing is listened to, for Python does not allow it.
    """

    def __init__(self) -> None:
        self.number = 0  # of the signal that came, 0 as long as none has
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
