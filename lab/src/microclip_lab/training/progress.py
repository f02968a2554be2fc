"""Progress of a training run: a line per evaluation, and a bar in a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class StepProgress:
    """Shows steps, rates and time left; silent if the console is None."""

    def __init__(self, console: Console | None, steps: int, done: int, batch_size: int) -> None:
        self._console, self._steps, self._size = console, steps, batch_size
        self._began, self._start = time.monotonic(), done
        self._bar: Progress | None = None
        if console is not None and console.is_terminal:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=steps, completed=done)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, done: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=self._rate(done))

    def evaluated(self, done: int, figures: Mapping[str, float]) -> None:
        """Print the figures of an evaluation."""
        if self._console is not None:
            said = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
            line = f"step {done} of {self._steps}: {said} ({self._rate(done)})"
            self._console.print(line, soft_wrap=True, highlight=False)

    def _rate(self, done: int) -> str:
        seconds, since = time.monotonic() - self._began, done - self._start
        if not since or not seconds:
            return "starting"
        left = seconds / since * (self._steps - done)
        unit = f"{left / 60:.1f} min" if left < 5400 else f"{left / 3600:.1f} h"
        return f"{since * self._size / seconds:,.0f} examples/s, {unit} left"
