"""What ranks say to each other in a step: their norms, then the sum of their gradients.

The transport is torch.distributed. Per step: one small `all_gather` (a few numbers for every
micro-batch) and the `all_reduce` of the gradient that data parallelism does anyway, in buckets.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from microclip import multitensor
from microclip.distributed.domains import key
from microclip.engines.gradients import Gradients

BUCKET = 25 * 2**20  # bytes, as large as those of DistributedDataParallel
HEADER = 2  # step, number of micro-batches


class OutOfStepError(RuntimeError):
    """Ranks are not at the same step, or one of them does not answer."""


@dataclass(frozen=True)
class Everyone:
    """The micro-batches of all ranks, rank after rank; those of size 0 only fill up."""

    norms: Tensor
    sizes: Tensor
    domains: list[int]  # keys of labels; empty if there is only one
    starts: list[int]  # where each rank's micro-batches start
    mine: range  # which of them are this rank's

    def rows(self, key: int) -> Tensor | slice:
        """Return which micro-batches belong to a domain."""
        if not self.domains:
            return slice(None)
        rows = [row for row, domain in enumerate(self.domains) if domain == key]
        return torch.tensor(rows, dtype=torch.long, device=self.norms.device)

    def mine_of(self, key: int) -> Tensor | slice:
        """Return which of a domain's micro-batches are this rank's."""
        if not self.domains:
            return slice(self.mine.start, self.mine.stop)
        rows = [row for row, domain in enumerate(self.domains) if domain == key]
        places = [place for place, row in enumerate(rows) if row in self.mine]
        return torch.tensor(places, dtype=torch.long, device=self.norms.device)

    @property
    def keys(self) -> list[int]:
        """Return the keys of all domains."""
        return list(dict.fromkeys(self.domains)) or [0] * min(1, len(self.norms))

    def place(self, row: int) -> tuple[int, int]:
        """Return whose micro-batch a row is, and which one of that rank."""
        rank = max(rank for rank, start in enumerate(self.starts) if start <= row)
        return rank, row - self.starts[rank]


class Ranks:
    """The processes that share a mini-batch."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.count = dist.get_world_size(group)
        self._unread: Tensor | None = None
        self._capacity = 0  # micro-batches that a message has room for, on every rank alike

    def exchange(
        self, step: int, norms: Tensor, sizes: Sequence[int], domains: Sequence[Hashable]
    ) -> Everyone:
        """Tell this rank's norms and hear all the others'. All ranks call it, once per step."""
        rows = torch.zeros(3, len(sizes), dtype=multitensor.widest(self.device), device=self.device)
        rows[0] = norms
        rows[1] = torch.tensor(sizes, device=self.device)
        rows[2] = torch.tensor([key(domain) for domain in domains], device=self.device)
        labelled = any(domain is not None for domain in domains)  # a label may be 0
        if not multitensor.on_host(rows) and not labelled and len(sizes) <= self._capacity:
            return self._exchange_unread(step, rows)
        while True:
            heard = self._gather(step, rows)
            counts = self._check(heard[:, :HEADER])
            if max(counts) <= self._capacity:
                break
            self._capacity = max(counts)  # everybody heard the same, and asks again
        table = heard[:, HEADER:].view(self.count, 3, self._capacity)
        parts = torch.cat([table[r, :, :n] for r, n in enumerate(counts)], 1)
        keys = parts[2].long().tolist()
        starts = [sum(counts[:rank]) for rank in range(self.count)]
        mine = range(starts[self.rank], starts[self.rank] + counts[self.rank])
        return Everyone(parts[0], parts[1], keys if any(keys) else [], starts, mine)

    def _exchange_unread(self, step: int, rows: Tensor) -> Everyone:
        """The same without a look at what was heard, for which an accelerator would have to stop.

        Messages stay as they are, with micro-batches of size 0 at the end; whether the ranks are in
        step is read one step later, when it costs nothing.
        """
        if self._unread is not None:
            self._check(self._unread)
        heard = self._gather(step, rows)
        self._unread = heard[:, :HEADER]
        table = heard[:, HEADER:].view(self.count, 3, self._capacity)
        starts = [rank * self._capacity for rank in range(self.count)]
        mine = range(starts[self.rank], starts[self.rank] + rows.shape[1])
        return Everyone(table[:, 0].flatten(), table[:, 1].flatten(), [], starts, mine)

    def _check(self, headers: Tensor) -> list[int]:
        """Make sure that all ranks are at one step; return how many micro-batches they have."""
        steps, counts = (column.tolist() for column in headers.long().unbind(1))
        if len(set(steps)) > 1:
            where = ", ".join(f"rank {rank}: step {step}" for rank, step in enumerate(steps))
            raise OutOfStepError(
                f"The ranks are not at the same step ({where}). Every rank must call backward() or "
                "finish() once per optimizer step, also one without examples, and load the same "
                "checkpoint."
            )
        return counts

    def agree(self, step: int, count: int, sizes: Sequence[int] = ()) -> None:
        """Make sure that all ranks are about to do the same, before they wait for each other."""
        weighted = sum(place * size for place, size in enumerate(sizes, 1))  # tells orders apart
        message = torch.tensor([count, sum(sizes), weighted], device=self.device)
        heard = message.new_empty(self.count, len(message))
        with self._answered(step):
            dist.all_gather(list(heard.unbind()), message, group=self.group)
        if not bool((heard == message).all()):
            raise OutOfStepError(
                f"Step {step}: all ranks of a sharded model must have as many micro-batches"
                + (" of the same sizes" if sizes else "")
                + f", but they have {heard[:, 0].tolist()}"
                + (f", with {heard[:, 1].tolist()} examples" if sizes else "")
                + ". Drop or fill up the last batch of an epoch (drop_last=True)."
            )

    def _gather(self, step: int, rows: Tensor) -> Tensor:
        count = rows.shape[1]
        message = rows.new_zeros(HEADER + 3 * self._capacity)
        message[:HEADER] = torch.tensor([step, count], dtype=rows.dtype)
        if count <= self._capacity:
            message[HEADER:].view(3, -1)[:, :count] = rows
        heard = message.new_empty(self.count, len(message))
        with self._answered(step):
            dist.all_gather(list(heard.unbind()), message, group=self.group)
        return heard

    def sum(
        self, step: int, gradients: Gradients, parameters: dict[str, nn.Parameter]
    ) -> Gradients:
        """Add up the gradients of all ranks, which may be overwritten.

        What no rank has a gradient for has none in the sum; ranks that lack one add zero.
        """
        has = [float(name in gradients) for name in parameters]
        present = torch.tensor(has, device=self.device)
        found: Gradients = {}
        waiting = []
        with self._answered(step):
            waiting.append(dist.all_reduce(present, group=self.group, async_op=True))
            for names in _buckets(parameters):
                parts = [_part(gradients.pop(name, None), parameters[name]) for name in names]
                flat = torch.cat([part.reshape(-1) for part in parts])
                waiting.append(dist.all_reduce(flat, group=self.group, async_op=True))
                pieces = torch.split(flat, [part.numel() for part in parts])
                for name, part, piece in zip(names, parts, pieces, strict=True):
                    found[name] = piece.view(part.shape)
                del parts
            for work in waiting:
                if work is not None:
                    work.wait()
        if all(has):  # then nothing can be missing, and nothing needs to be read
            return found
        missing = [name for name, n in zip(parameters, present.tolist(), strict=True) if n == 0]
        return {name: gradient for name, gradient in found.items() if name not in missing}

    def copy_from_first(self, tensors: list[Tensor]) -> None:
        """Give every rank what the first one has."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # in one order everywhere
            here = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in here])
            dist.broadcast(flat, group=self.group, group_src=0)
            pieces = torch.split(flat, [tensor.numel() for tensor in here])
            for tensor, piece in zip(here, pieces, strict=True):
                tensor.copy_(piece.view_as(tensor))

    @contextmanager
    def _answered(self, step: int) -> Iterator[None]:
        """Explain what it means if another rank does not answer."""
        try:
            yield
        except RuntimeError as error:
            raise OutOfStepError(
                f"Rank {self.rank} of {self.count} could not exchange gradients with the others in "
                f"step {step}: another rank has died, has raised an error (look at its log), or "
                f"has made fewer or more steps. ({error})"
            ) from error


def _buckets(parameters: dict[str, nn.Parameter]) -> Iterator[list[str]]:
    """Yield names of parameters that travel together: of one dtype, and not too many."""
    names: list[str] = []
    size, dtype = 0, None
    for name, parameter in parameters.items():
        kind = _dtype(parameter)
        if names and (kind != dtype or size >= BUCKET):
            yield names
            names, size = [], 0
        dtype = kind
        names.append(name)
        size += parameter.numel() * kind.itemsize
    yield names


def _dtype(parameter: nn.Parameter) -> torch.dtype:
    if parameter.is_complex():
        return parameter.real.dtype
    return multitensor.accumulation_dtype(parameter)


def _part(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    if gradient is None:
        gradient = torch.zeros_like(parameter.detach())
        gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return gradient.to(_dtype(parameter))
