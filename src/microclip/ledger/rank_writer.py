"""The writer of one rank: buffers what is recorded, and writes it in whole parts.

A step is only appended to a list: nothing is read from the device, converted or written before a
flush. A lock makes sure that a rank has one writer.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from microclip.files import Lock
from microclip.ledger import storage
from microclip.ledger.arrays import TooMuchTextError
from microclip.ledger.plain_step import PlainStep, kept_rows, plain_tables
from microclip.ledger.storage import Part
from microclip.ledger.tables import (
    EXAMPLES,
    MICROBATCHES,
    TABLES,
    tables,
    with_metadata,
)
from microclip.outcome import Outcome
from microclip.user_warnings import warn

ROWS = 2**18  # buffered micro-batches and examples that force a flush, whatever flush_every says

logger = logging.getLogger("microclip.ledger")


@dataclass(frozen=True)
class Options:
    """The options of a ledger."""

    flush_every: int = 2000
    flush_seconds: float | None = 300.0
    every: int = 1
    keep_steps: int | None = None
    examples: bool = True

    def __post_init__(self) -> None:
        _positive("flush_every", self.flush_every)
        _positive("every", self.every)
        if self.keep_steps is not None:
            _positive("keep_steps", self.keep_steps, " or None, which keeps all")
        if not isinstance(self.examples, bool):
            raise ValueError(f"examples must be True or False, but got {self.examples!r}.")
        seconds = self.flush_seconds
        if seconds is not None and (
            not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds >= 0
        ):
            raise ValueError(
                f"flush_seconds must be a number of seconds, or None to flush by steps only, but "
                f"got {seconds!r}."
            )


class RankWriter:
    """Buffers what one rank records, and writes it."""

    def __init__(self, path: Path, rank: int, options: Options) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise ValueError(f"rank must be 0 or a positive integer, but got {rank!r}.")
        self._path, self._rank, self._options = path, rank, options
        self._lock = _lock(path, rank)
        self._folders = {table: path / table for table in TABLES}
        self.process = os.getpid()
        self._waiting: list[Any] = []  # outcomes, or plain steps
        self._plain: bool | None = None  # which of them; None: neither yet
        self.next_step = 0  # of plain training, unless its caller counts
        self.ranks = 0  # how many there are, this one included; 0: unknown
        self._notes: tuple[str, ...] = ()  # of steps that are not recorded
        self._rows = 0
        self._due = self._next_due()
        self._torn = False  # whether a flush failed and may have written only one table
        self._resumed = True  # nothing has been recorded by this writer yet
        try:
            self._last = self._written = self._tidy_up()
        except BaseException:
            self.release()
            raise

    def _tidy_up(self) -> int:
        """Remove what a killed writer left behind; return the last step that is written."""
        for folder in self._folders.values():
            storage.remove_leftovers(folder, self._rank)
        last = storage.last_step(self._folders[MICROBATCHES], self._rank)
        # examples without their micro-batches belong to an unfinished flush
        storage.cut_back(self._folders[EXAMPLES], self._rank, last + 1)
        return last

    def release(self) -> None:
        """Let others write what belongs to this rank."""
        self._lock.close()

    def resume_at(self, step: int) -> None:
        """Expect this step next, whatever has been recorded already."""
        self.next_step, self._resumed = step, True

    def add(self, entry: Outcome | PlainStep) -> None:
        """Take a step, and write what is buffered if it is time to."""
        step, plain = entry.step, isinstance(entry, PlainStep)
        if self._plain is not None and self._plain != plain:
            raise ValueError(
                f"The ledger {self._path} is filled by a Clipper, which records its steps itself, "
                "and by record(ids, losses): use one of them, or a ledger for each."
            )
        if step <= self._last:
            self._go_back(step)
        self._last, self._resumed, self._plain = step, False, plain
        self.next_step = step + 1
        rows = self._add_outcome(entry) if isinstance(entry, Outcome) else self._add_plain(entry)
        self._rows += rows
        if rows and (
            len(self._waiting) >= self._options.flush_every
            or self._rows >= ROWS
            or time.monotonic() >= self._due
        ):
            self.flush()

    def _add_outcome(self, outcome: Outcome) -> int:
        """Return how many rows it becomes, 0 if it is not recorded."""
        if outcome.step % self._options.every or not outcome.ids:
            self._notes += () if outcome.example_weights is None else outcome.notes
            return 0
        if self._notes:
            outcome = replace(outcome, notes=self._notes + outcome.notes)
            self._notes = ()
        self._waiting.append(outcome)
        of_examples = 0 if outcome.example_losses is None else outcome.example_losses.numel()
        return len(outcome.ids) + of_examples

    def _add_plain(self, entry: PlainStep) -> int:
        if entry.step % self._options.every or not len(entry):
            return 0
        self._waiting.append(entry)
        return 1 + len(entry)

    def _go_back(self, step: int) -> None:
        if step < 0:
            raise ValueError(f"step must be 0 or a positive integer, but got {step}.")
        if not self._resumed:
            warn(
                f"Step {step} of rank {self._rank} is recorded again in the ledger {self._path}: "
                "everything from that step on is replaced. If you have not gone back to a "
                "checkpoint, two Clippers or loops share this ledger: give each its own."
            )
        elif step == 0:
            logger.warning(
                "Rank %d restarts from step 0: its steps up to %d in the ledger %s are replaced.",
                self._rank,
                self._last,
                self._path,
            )
        self._waiting = [entry for entry in self._waiting if entry.step < step]
        self._notes = ()
        self._cut_back(step)

    def _cut_back(self, step: int) -> None:
        for table in TABLES:  # micro-batches first: without them, examples are ignored
            storage.cut_back(self._folders[table], self._rank, step)
        self._written = min(self._written, step - 1)

    def flush(self) -> None:
        """Write what is buffered. If that fails, it is kept."""
        waiting = self._waiting
        if not waiting:
            return
        try:
            if self._torn:
                self._cut_back(waiting[0].step)
            self._torn = True
            self._write(waiting)
            self._torn = False
        except OSError as error:
            raise OSError(
                error.errno,
                f"Could not write steps {waiting[0].step} to {waiting[-1].step} of the ledger "
                f"({error.strerror or error}). They are kept in memory: fix it and call flush()",
                str(self._path),
            ) from error
        self._waiting, self._rows, self._due = [], 0, self._next_due()
        self._remove_old_steps()

    def _write(self, entries: Sequence[Any]) -> None:
        make = plain_tables if self._plain else tables
        if self._plain:
            entries = kept_rows(entries)
            if not entries:
                return
        try:
            found = make(entries, self._rank, self._options.examples)
        except TooMuchTextError:
            half = len(entries) // 2
            self._write(entries[:half])
            self._write(entries[half:])
            return
        part = Part(entries[0].step, self._rank, entries[-1].step)
        after = "" if self._written < 0 else self._written
        for table in reversed(TABLES):  # micro-batches last: they complete the part
            if table in found:
                self._put(table, part, with_metadata(found[table], after=after, ranks=self.ranks))
        self._written = part.last

    def _put(self, table: str, part: Part, rows: pa.Table) -> None:
        if table == EXAMPLES:  # not every step has them
            steps = rows["step"]
            part = Part(part.first, part.rank, steps[-1].as_py())
        storage.write_part(self._folders[table], part, rows)

    def _remove_old_steps(self) -> None:
        if self._options.keep_steps is None:
            return
        oldest = self._last - self._options.keep_steps + 1
        for folder in self._folders.values():
            for part in storage.find_parts(folder, self._rank):
                if part.last < oldest:
                    (folder / part.name).unlink(missing_ok=True)

    def _next_due(self) -> float:
        seconds = self._options.flush_seconds
        return float("inf") if seconds is None else time.monotonic() + seconds


def flush_all(writers: dict[int, RankWriter]) -> None:
    """Flush what this process recorded; a fork also has copies of its parent's writers."""
    for writer in writers.values():
        if writer.process == os.getpid():
            writer.flush()


def close_all(writers: dict[int, RankWriter]) -> None:
    """Flush, and let others write, even if that fails."""
    try:
        flush_all(writers)
    finally:
        for writer in writers.values():
            writer.release()


def _lock(path: Path, rank: int) -> Lock:
    try:
        return storage.lock_rank(path, rank)
    except FileExistsError:
        gc.collect()  # a Ledger that nobody can reach, in a reference cycle, may hold it
        return storage.lock_rank(path, rank)


def _positive(name: str, value: object, more: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer{more}, but got {value!r}.")
