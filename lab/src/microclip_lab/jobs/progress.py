"""Progress of many runs: a bar in a terminal, an occasional line in a log."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

LONG = 600.0  # seconds without a line of output


@dataclass(frozen=True)
class Status:
    """How much is done, in runs and in work, since runs take very different times."""

    runs_done: int
    runs: int
    work_done: float
    work: float

    @property
    def share(self) -> float:
        """The finished share of the work."""
        return self.work_done / self.work

    def __str__(self) -> str:
        return f"{self.runs_done} of {self.runs} runs"


class Forecast:
    """Estimates the time left from the speed since the first status.

    Work done by an earlier process says nothing about the speed of this one. Runs end rarely and in
    groups, so only the average over the whole time is stable.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.first: tuple[float, Status] | None = None

    def __call__(self, status: Status) -> str:
        """Return the time left in words, or "" if it is unknown."""
        if self.first is None:
            self.first = self.clock(), status
        began, start = self.first
        done_since = status.work_done - start.work_done
        if not done_since or status.work_done == status.work:
            return ""
        seconds = (self.clock() - began) * (status.work - status.work_done) / done_since
        return f", about {seconds / 60:.1f} min left"


@contextlib.contextmanager
def progress(console: Console) -> Iterator[Callable[[Status], None]]:
    """Yield a function that shows a status."""
    if not console.is_terminal:
        yield Lines(console, Forecast()).show
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} % ({task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield Bar(bar, Forecast()).show


class Bar:
    """A progress bar."""

    def __init__(self, bar: Progress, forecast: Forecast) -> None:
        self.bar = bar
        self.forecast = forecast
        self.task = bar.add_task("starting)", total=None)

    def show(self, status: Status) -> None:
        """Move the bar."""
        self.bar.update(
            self.task,
            description=f"{status}){self.forecast(status)}",
            completed=status.work_done,
            total=status.work,
        )


class Lines:
    """One line per tenth of the work and every ten minutes, without control characters."""

    def __init__(self, console: Console, forecast: Forecast) -> None:
        self.console = console
        self.forecast = forecast
        self.tenths = -1
        self.last = -math.inf  # when the last line was printed

    def show(self, status: Status) -> None:
        """Print a line if another tenth is done, or after a long silence."""
        left = self.forecast(status)
        tenths, now = int(10 * status.share), self.forecast.clock()
        if tenths > self.tenths or now - self.last > LONG:
            self.tenths, self.last = tenths, now
            self.console.print(
                f"{100 * status.share:.0f} % ({status}){left}", soft_wrap=True, highlight=False
            )
