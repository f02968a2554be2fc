"""What a run has recorded goes to a tracker: once it is over, or as it trains.

Knows ledgers and clients; which figures and examples there are is up to the other modules.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microclip.draggers.source import LedgerLike, Source
from microclip.ledger import Ledger, Record, open_ledger
from microclip.outcome import Outcome
from microclip.report.folder import LEDGER, RUN
from microclip.report.runs import find_ledger
from microclip.trackers.clients import client_for, started
from microclip.trackers.examples import Show, worst_examples
from microclip.trackers.figures import Figures, Steps, of_ledger, of_outcome

PROJECT = "microclip"


@dataclass(frozen=True)
class Tracked:
    """What one call has logged."""

    steps: int
    examples: int
    notes: tuple[str, ...] = ()
    """What to know about it, in sentences."""


class Tracker:
    """Logs what a ledger records, during training, to the tracker that you already use.

    >>> import microclip, tempfile, torch
    >>> from torch.utils.tensorboard import SummaryWriter
    >>> folder = tempfile.TemporaryDirectory()
    >>> writer = SummaryWriter(f"{folder.name}/curves")
    >>> ledger, tracker = microclip.Ledger(f"{folder.name}/ledger"), microclip.Tracker(writer)
    >>> for epoch in range(3):
    ...     for ids in torch.randperm(60).split(20):
    ...         ledger.record(ids, torch.rand(20))
    ...     tracked = tracker.update(ledger)
    >>> tracked.steps, tracked.examples
    (3, 50)
    >>> writer.close(), ledger.close(), folder.cleanup()
    (None, None, None)

    Args:
        to: The tracker's own object: a `SummaryWriter`, a run of Weights & Biases, MLflow or
            Trackio (or these modules, for the run that they have started).
        every: Log only steps whose number is a multiple of this.
        start: Log no steps before this one, if a run is resumed.
        most: How many examples the table holds.
        show: A function that returns the text or the pixels of an example by its id, for instance
            `lambda i: dataset[i][0]`. By default, what `RunFolder.example` was given.
    """

    def __init__(
        self,
        to: Any,
        *,
        every: int = 1,
        start: int = 0,
        most: int = 50,
        show: Show | None = None,
    ) -> None:
        _check("every", every, 1)
        _check("start", start, 0)
        _check("most", most, 0)
        if isinstance(to, str):
            raise TypeError(
                f"A Tracker needs the tracker's own object, but got the name {to!r}. Start its run "
                "yourself, or, after training, use microclip.track(), which takes names too."
            )
        self._client = client_for(to)
        self._every, self._next, self._most, self._show = every, start, most, show
        self._ranks: tuple[int, ...] = ()  # that had written when update() last looked
        self._shown: tuple[int, int] | None = None  # steps and rows when the table was last logged

    def log(self, outcome: Outcome) -> None:
        """Log the step that a `Clipper` has just finished, with its noise scale if that is known.

        This reads the device. `update` then leaves the step out.
        """
        if not isinstance(outcome, Outcome):
            raise TypeError(
                f"log() takes the Outcome of a step, but got {type(outcome).__name__}. In a loop "
                "without a Clipper, record losses in a Ledger and call update(ledger)."
            )
        if outcome.step >= self._next and outcome.step % self._every == 0 and len(outcome):
            self._client.log_steps(iter([(outcome.step, of_outcome(outcome))]))
        self._next = max(self._next, outcome.step + 1)

    def update(self, ledger: LedgerLike, *, examples: bool = True, whole: bool = False) -> Tracked:
        """Log what is new in a ledger: the figures of its steps, and the worst examples so far.

        Args:
            ledger: A `Ledger`, its folder or that of its run, or the result of `open_ledger`.
            examples: Whether to log the table. It takes reading the whole ledger.
            whole: Log all steps there are. By default, only those that all ranks have written, and
                nothing before each of them has written something.
        """
        record = _open(ledger)
        last, there = record.complete.stop - 1, record.steps.stop - 1
        notes = (*self._late(record), *_unfinished(record, whole))
        if last < record.steps.start and not whole:
            return Tracked(0, 0, notes)
        last = there if whole else last
        counted = _Counted(of_ledger(Source.open(record), self._next, last, self._every))
        self._client.log_steps(iter(counted))
        self._next, self._ranks = max(self._next, last + 1), record.ranks
        if not examples or not self._most or self._shown == (there, record.rows):
            return Tracked(counted.steps, 0, notes)
        table = worst_examples(record, self._most, self._show)
        if table.rows:
            self._client.log_examples(there, table)
        self._shown = there, record.rows
        return Tracked(counted.steps, len(table.rows), notes + table.notes)

    def _late(self, record: Record) -> Iterator[str]:
        """Say which ranks have written steps that were logged without them."""
        new = [rank for rank in record.ranks if self._ranks and rank not in self._ranks]
        if new and record.steps.start < self._next:
            yield (
                f"Steps before {self._next} were logged before {_named(new)} had written anything: "
                "their figures may lack it. microclip.track() logs them whole, after training."
            )


def track(
    ledger: LedgerLike,
    to: Any,
    *,
    every: int = 1,
    most: int = 50,
    show: Show | None = None,
    project: str = PROJECT,
    name: str | None = None,
) -> Tracked:
    """Log a recorded run to a tracker: the figures of its steps, and a table of the worst examples.

    >>> microclip.track("runs/first", to=wandb.run)  # doctest: +SKIP
    Tracked(steps=348, examples=50, notes=())

    Args:
        ledger: A `Ledger`, its folder or that of its run, or the result of `open_ledger`.
        to: The tracker's own object, as for `Tracker`. Or "tensorboard", "wandb", "mlflow" or
            "trackio", which starts a run and ends it; TensorBoard's files go to the folder
            `tensorboard` inside the run.
        every: Log only steps whose number is a multiple of this.
        most: How many examples the table holds.
        show: A function that returns the text or the pixels of an example by its id.
        project: If `to` is a name: the project or experiment that the run belongs to.
        name: If `to` is a name: that of the run. By default that of its folder, or of the one
            around a folder called "ledger".
    """
    options: dict[str, Any] = {"every": every, "most": most, "show": show}
    if not isinstance(to, str):
        return Tracker(to, **options).update(ledger, whole=True)
    record = _open(ledger)  # before a run is started for nothing
    around = record.path.resolve()
    around = around.parent if around.name == LEDGER else around
    is_run = (around / RUN).exists()
    if isinstance(ledger, str | os.PathLike):
        is_run |= Path(ledger).resolve() == around
    run = around if is_run else record.path
    with started(to, project, name or around.name, run / "tensorboard") as client:
        return Tracker(client, **options).update(record, whole=True)


def _unfinished(record: Record, whole: bool) -> Iterator[str]:
    """Say which steps some ranks have not written."""
    last, there = record.complete.stop - 1, record.steps.stop - 1
    if last == there:
        return
    steps = f"Steps {max(last + 1, record.steps.start)} to {there}"
    absent = [rank for rank in range(record.world) if rank not in record.ranks]
    who = (
        f"{_named(absent)} of {record.world} wrote nothing yet"
        if absent
        else "some ranks lag behind"
    )
    if whole:
        yield f"{steps} are not complete: {who}."
    elif absent:
        yield (
            f"{steps} are not logged yet: {who}. A rank writes with flush() and as often as the "
            "Ledger's flush_every and flush_seconds say; whole=True does not wait for those that "
            "record nothing."
        )
    else:
        yield f"{steps} are not logged yet: {who}."


def _named(ranks: Sequence[int]) -> str:
    """Return ranks in words, the first of them if there are many."""
    shown = ", ".join(map(str, ranks[:3])) + ", ..." * (len(ranks) > 3)
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


class _Counted:
    """Steps that are counted as they pass by."""

    def __init__(self, steps: Steps) -> None:
        self._inner, self.steps = steps, 0

    def __iter__(self) -> Iterator[tuple[int, Figures]]:
        for each in self._inner:
            self.steps += 1
            yield each


def _open(ledger: LedgerLike) -> Record:
    if isinstance(ledger, Record):
        return ledger
    if isinstance(ledger, Ledger):
        ledger.flush()
        return open_ledger(ledger.path)
    if not isinstance(ledger, str | os.PathLike):
        raise TypeError(
            "ledger must be the folder of a run or ledger, a microclip.Ledger or the result of "
            f"open_ledger(), but got an object of type {type(ledger).__name__}."
        )
    folder = Path(ledger)
    return open_ledger(find_ledger(folder) or folder)


def _check(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, but got {value!r}.")
