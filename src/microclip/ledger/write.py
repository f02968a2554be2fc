"""The Ledger: the object that users record steps with.

Each rank has a writer (`RankWriter`), which buffers steps in memory and writes many at a time.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self, overload

import torch
from torch import Tensor
from torch import distributed as dist

from microclip.ledger import storage
from microclip.ledger.loss_calls import LossCalls
from microclip.ledger.plain_step import one_each, plain_step
from microclip.ledger.predictions import as_tensor, expect_values, predictions
from microclip.ledger.rank_writer import Options, RankWriter, close_all, flush_all
from microclip.ledger.tables import TABLES
from microclip.outcome import Outcome


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
        self._writers: dict[int, RankWriter] = {}
        self._rank: int | None = None  # of this process; known once something is recorded
        self._receive: Callable[[Tensor, int], None] | None = None  # predictions, for a Clipper
        self._process = os.getpid()
        self._next_step = 0  # of plain training, as of the last checkpoint that was loaded
        self._at_end = weakref.finalize(self, close_all, self._writers)

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

    def _writer(self, rank: int | None, step: int) -> RankWriter:
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
            writer = self._writers[rank] = RankWriter(self.path, rank, self._options)
            writer.next_step = self._next_step
        if world is not None:
            writer.ranks = world
            if rank == 0:
                self._remove_absent_ranks(world, step)
        return writer

    def flush(self) -> None:
        """Write everything recorded so far. If that fails, it is kept and tried again later."""
        flush_all(self._writers)

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


def _rank_and_world() -> tuple[int, int]:
    several = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
