"""Writing a ledger: steps are buffered in memory and written many at a time.

A step is only appended to a list: nothing is read from the device, converted or written before a
flush. Every rank writes its own files and has one writer, which a lock makes sure of.
"""

from __future__ import annotations

import gc
import logging
import os
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, overload

import pyarrow as pa
import torch
from torch import Tensor
from torch import distributed as dist

from microclip.files import Lock
from microclip.ledger import storage
from microclip.ledger.arrays import TooMuchTextError
from microclip.ledger.loss_calls import LossCalls
from microclip.ledger.plain_step import PlainStep, kept_rows, one_each, plain_step, plain_tables
from microclip.ledger.predictions import as_tensor, expect_values, predictions
from microclip.ledger.storage import Part
from microclip.ledger.tables import (
    EXAMPLES,
    MICROBATCHES,
    TABLES,
    tables,
    with_metadata,
)
from microclip.outcome import Outcome

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


class Ledger:
    """Records the losses of every example, or what clipping did to it, as Parquet files.

    In a plain training loop:

    >>> import microclip, tempfile, torch
    >>> folder = tempfile.TemporaryDirectory()
    >>> with microclip.Ledger(folder.name) as ledger:
    ...     logits, labels = torch.randn(4, 10), torch.tensor([3, 1, 4, 1])
    ...     losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    ...     ledger.record([11, 12, 13, 14], losses, logits=logits, labels=labels)
    >>> folder.cleanup()

    With a `Clipper`, which also knows norms:

    >>> import microclip, tempfile, torch
    >>> folder = tempfile.TemporaryDirectory()
    >>> model = torch.nn.Linear(3, 1)
    >>> with microclip.Ledger(folder.name) as ledger:
    ...     clipper = microclip.Clipper(model, 2, ledger=ledger)
    ...     outcome = clipper.backward(lambda x: model(x).square().mean(1), torch.randn(8, 3))
    >>> microclip.ledger.open_ledger(folder.name).rows
    4
    >>> folder.cleanup()

    An existing ledger is continued. If training resumes from a checkpoint, so that the first
    recorded step is in it already, the rows from that step on are replaced. A ledger belongs to one
    `Clipper`, or one training loop, per process.

    Args:
        path: The folder, created if it does not exist.
        flush_every: Write to disk after this many steps. Rows are also written by
            `Clipper.state_dict()`, `flush()` and `close()`, at the end of the process, and once a
            quarter of a million of them are buffered.
        flush_seconds: Also write when this much time has passed since the last flush; None turns
            that off.
        every: Record only every n-th step: those whose number is a multiple of n.
        keep_steps: Delete files whose steps are all older than this many. None keeps everything.
        examples: Whether to record the loss of every example, if loss_fn returns one per example,
            and its weight, if the rule weights examples.
    """

    # without a __dict__, so that engines do not copy it with everything else that loss_fn holds
    __slots__ = (
        "__weakref__", "_at_end", "_next_step", "_options", "_process", "_rank", "_receive",
        "_writers", "path",
    )  # fmt: skip

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        flush_every: int = 2000,
        flush_seconds: float | None = 300.0,
        every: int = 1,
        keep_steps: int | None = None,
        examples: bool = True,
    ) -> None:
        self._options = Options(flush_every, flush_seconds, every, keep_steps, examples)
        self.path = Path(path)
        storage.create_ledger(self.path, asdict(self._options))
        storage.read_manifest(self.path)
        self._writers: dict[int, _RankWriter] = {}
        self._rank: int | None = None  # of this process; known once something is recorded
        self._receive: Callable[[Tensor, int], None] | None = None  # predictions, for a Clipper
        self._process = os.getpid()
        self._next_step = 0  # of plain training, as of the last checkpoint that was loaded
        self._at_end = weakref.finalize(self, _close_all, self._writers)

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r})"

    def __reduce__(self) -> Any:  # for processes that get a ledger as an argument
        return partial(Ledger, str(self.path), **asdict(self._options)), ()

    @overload
    def record(self, outcome: Outcome, /, *, rank: int | None = None) -> None: ...

    @overload
    def record(
        self,
        ids: Tensor | Sequence[Hashable],
        losses: Tensor | Sequence[float],
        /,
        *,
        logits: Tensor | Sequence[Any] | None = None,
        labels: Tensor | Sequence[int] | None = None,
        domains: Tensor | Sequence[Hashable] | None = None,
        where: Tensor | Sequence[bool] | None = None,
        step: int | None = None,
        rank: int | None = None,
    ) -> None: ...

    def record(
        self,
        ids: Any,
        losses: Any = None,
        /,
        *,
        logits: Tensor | Sequence[Any] | None = None,
        labels: Any = None,
        domains: Any = None,
        where: Any = None,
        step: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Record a step of plain training. (A `Clipper` records its outcomes by itself.)

        Tensors are copied on their device, so nothing waits for it, and may be changed afterwards.

        Args:
            ids: The ids of the examples, such as row numbers of the data set: see
                `microclip.with_ids`. Or, alone, the `Outcome` of a step.
            losses: The loss of each example (reduction="none").
            logits: For classification: a row of logits for each example, or a single logit for
                class 1 of two. Only two probabilities and a class are kept of them.
            labels: For classification: the given class of each example. With logits and labels,
                `microclip.find_issues` can suggest other labels.
            domains: A label of each example's origin; losses are then compared within domains.
            where: Which of the examples to record, True or False for each; by default all.
            step: The number of this step, by default one more than in the last call, from 0. Pass
                it if training resumes: everything recorded from that step on is replaced.
            rank: The rank that the examples belong to; by default that of this process in
                torch.distributed, or 0 without it.
        """
        if isinstance(ids, Outcome):
            writer = self._writer(rank, ids.step)
            writer.add(ids)
            return
        if losses is None:
            raise TypeError(
                "record() takes ids and losses, or an Outcome alone, but got one argument of type "
                f"{type(ids).__name__}."
            )
        writer = self._writer(rank, self._next_step if step is None else step)
        number = writer.next_step if step is None else step
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(f"step must be 0 or a positive integer, but got {step!r}.")
        writer.add(plain_step(number, ids, losses, logits, labels, domains, where))

    @contextmanager
    def recording(
        self,
        ids: Tensor | Sequence[Hashable],
        *,
        domains: Tensor | Sequence[Hashable] | None = None,
        step: int | None = None,
    ) -> Iterator[None]:
        """Record a step of plain training whose code computes a mean loss, as it is.

        >>> import microclip, tempfile, torch
        >>> folder = tempfile.TemporaryDirectory()
        >>> model, x, y = torch.nn.Linear(3, 5), torch.randn(4, 3), torch.tensor([3, 1, 4, 1])
        >>> with microclip.Ledger(folder.name) as ledger:
        ...     with ledger.recording([11, 12, 13, 14]):
        ...         loss = torch.nn.functional.cross_entropy(model(x), y)
        ...     loss.backward()
        >>> folder.cleanup()

        Inside the block, the call of torch's loss function is seen and left as it is: results and
        gradients are the same bit for bit. It must be the only one, with a row per example, in the
        order of the ids; several calls, or one of other rows, are refused. What is not a call of
        torch's cannot be seen: if that is the main loss, or part of it, and inside compiled code,
        use `record`.

        The loss of an example is the mean that torch would return for it alone, whatever the
        reduction ("sum" and "batchmean" as well): over its tokens or pixels, weighted by class
        weights, if there are any. (A single class's weight therefore cancels out.) An example whose
        targets are all ignored (-100) has no loss, and is not recorded in that step. With
        reduction="none" and several values per example, which of them count is not known here: use
        `record`.

        Args:
            ids: As in `record`.
            domains: As in `record`.
            step: As in `record`.
        """
        names = one_each(ids, "ids")
        with LossCalls() as seen:
            yield
        call = seen.of(len(names))
        self.record(
            names,
            call.losses,
            logits=call.logits,
            labels=call.labels,
            domains=domains,
            where=call.counts,
            step=step,
        )

    def record_predictions(
        self, logits: Tensor | Sequence[Any], labels: Tensor | Sequence[int] | None = None
    ) -> None:
        """Record what a classifier predicts; for the loss function of this ledger's `Clipper`.

        `microclip.find_issues` can then suggest other labels. Call it once per call of the loss
        function, which must return one loss per example, in the order of the batch:

            def loss_fn(batch):
                logits = model(batch[0])
                ledger.record_predictions(logits, batch[1])
                return F.cross_entropy(logits, batch[1], reduction="none")

        It changes neither gradient nor loss, reads nothing from the device, and does nothing under
        `torch.no_grad()`, so that evaluation can use the same function. In a loop that calls
        `clipper.fold()` after its own backward pass, call it before each `fold()`.

        Args:
            logits: As in `record`.
            labels: As in `record`.
        """
        if self._receive is None:
            raise ValueError(
                "record_predictions() is for the loss function of a Clipper, but no Clipper has "
                "this ledger: Clipper(model, ledger=ledger). In a plain training loop, use "
                "record(ids, losses, logits=logits, labels=labels)."
            )
        if not torch.is_grad_enabled():
            return
        expect_values(logits=logits, labels=labels)
        with torch._C.DisableTorchFunction():  # a single pass tracks what a model does, not this
            scores = as_tensor(logits, "logits")
            size = len(scores) if scores.dim() else 0
            self._receive(*predictions(size, scores, labels))

    def send_predictions_to(self, receive: Callable[[Tensor, int], None]) -> None:
        """Let a `Clipper` receive what `record_predictions` is given."""
        self._receive = receive

    def state_dict(self) -> dict[str, Any]:
        """Write everything to disk, and return what a checkpoint must hold: the next step.

        For plain training; a `Clipper` and the Trainers count their steps themselves. With
        Accelerate: `accelerator.register_for_checkpointing(ledger)`.
        """
        self.flush()
        writer = self._writers.get(0 if self._rank is None else self._rank)
        return {"next_step": self._next_step if writer is None else writer.next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the checkpoint: what was recorded from there on will be replaced."""
        if not isinstance(state, dict) or set(state) != {"next_step"}:
            raise ValueError(f"A Ledger's state has the entry 'next_step', but got {state!r:.200}.")
        self._next_step = state["next_step"]
        for writer in self._writers.values():
            writer.resume_at(self._next_step)

    def _writer(self, rank: int | None, step: int) -> _RankWriter:
        """Return the writer of a rank, made when it is first needed."""
        if not self._at_end.alive:
            raise ValueError(f"{self!r} is closed: create a new Ledger to continue its folder.")
        if os.getpid() != self._process:  # a fork: the parent writes what it recorded
            self._writers.clear()
            self._rank, self._process = None, os.getpid()
        world = None
        if rank is None:
            if self._rank is None:
                self._rank, world = _rank_and_world()
            rank = self._rank
        writer = self._writers.get(rank)
        if writer is None:
            writer = self._writers[rank] = _RankWriter(self.path, rank, self._options)
            writer.next_step = self._next_step
        if rank == 0 and world is not None:
            self._remove_absent_ranks(world, step)
        return writer

    def flush(self) -> None:
        """Write everything recorded so far. If that fails, it is kept and tried again later."""
        _flush_all(self._writers)

    def close(self) -> None:
        """Flush, and accept no more steps."""
        self.flush()
        self._at_end.detach()
        for writer in self._writers.values():
            writer.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _remove_absent_ranks(self, world: int, step: int) -> None:
        """Remove rows from this step on of ranks that no longer exist, now there are fewer."""
        for table in TABLES:
            folder = self.path / table
            for rank in {part.rank for part in storage.find_parts(folder) if part.rank >= world}:
                storage.cut_back(folder, rank, step)


class _RankWriter:
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
            warnings.warn(
                f"Step {step} of rank {self._rank} is recorded again in the ledger {self._path}: "
                "everything from that step on is replaced. If you have not gone back to a "
                "checkpoint, two Clippers or loops share this ledger: give each its own.",
                RuntimeWarning,
                stacklevel=5,
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
                self._put(table, part, with_metadata(found[table], after=after))
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


def _flush_all(writers: dict[int, _RankWriter]) -> None:
    """Flush what this process recorded; a fork also has copies of its parent's writers."""
    for writer in writers.values():
        if writer.process == os.getpid():
            writer.flush()


def _close_all(writers: dict[int, _RankWriter]) -> None:
    try:
        _flush_all(writers)
    finally:
        for writer in writers.values():
            writer.release()


def _lock(path: Path, rank: int) -> Lock:
    try:
        return storage.lock_rank(path, rank)
    except FileExistsError:
        gc.collect()  # a Ledger that nobody can reach, in a reference cycle, may hold it
        return storage.lock_rank(path, rank)


def _rank_and_world() -> tuple[int, int]:
    several = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if several else (0, 1)


def _positive(name: str, value: object, more: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer{more}, but got {value!r}.")
