"""What ranks say to each other in a step: their norms, then the sum of their gradients.

The transport is torch.distributed. Per step: one small `all_gather` (a few numbers for every
micro-batch) and the `all_reduce` of the gradient that data parallelism does anyway, in buckets.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from microclip import multitensor
from microclip.distributed.agreement import Agreement, DisagreementError, digest_of, tell
from microclip.distributed.domains import key
from microclip.engines.gradients import Gradients

if TYPE_CHECKING:
    from microclip.engines.tally import Policy

BUCKET = 25 * 2**20  # bytes, as large as those of DistributedDataParallel
# of a message: step, what for, micro-batches, their examples, their order; digests of settings and
# of the parts of a sharded model that were used
HEADER = 7
# what for: to hear all norms (by domain), before a fold, before a part of a sharded model is sent
FINISH, FINISH_DOMAINS, FOLD, PART = range(4)


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
        self.parts: list[str] = []  # of a sharded model, by number
        self.used: list[str] = []  # in this step, one after the other
        self._agreement = Agreement()
        self._unread: Tensor | None = None
        self._capacity = 0  # micro-batches that a message has room for, on every rank alike

    def describe(
        self, policy: Policy, scaler: GradScaler | None, parameters: dict[str, nn.Parameter]
    ) -> None:
        """Say what this rank is about to do; the next message makes sure that all do the same."""
        if self.count > 1:
            self._agreement.describe(policy, scaler, parameters)

    def exchange(
        self, step: int, norms: Tensor, sizes: Sequence[int], domains: Sequence[Hashable]
    ) -> Everyone:
        """Tell this rank's norms and hear all the others'. All ranks call it, once per step."""
        rows = torch.zeros(3, len(sizes), dtype=multitensor.widest(self.device), device=self.device)
        rows[0] = norms
        rows[1] = torch.tensor(sizes, device=self.device)
        rows[2] = torch.tensor([key(domain) for domain in domains], device=self.device)
        labelled = any(domain is not None for domain in domains)  # a label may be 0
        purpose = FINISH_DOMAINS if labelled else FINISH
        unread = not multitensor.on_host(rows) and not self.used
        if unread and not labelled and 0 < len(sizes) <= self._capacity:
            return self._exchange_unread(step, rows)
        while True:
            heard = self._gather(step, purpose, rows)
            counts = self._check(heard[:, :HEADER], unread)
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
            self._check(self._unread, unread=True)
        heard = self._gather(step, FINISH, rows)
        self._unread = heard[:, :HEADER]
        table = heard[:, HEADER:].view(self.count, 3, self._capacity)
        starts = [rank * self._capacity for rank in range(self.count)]
        mine = range(starts[self.rank], starts[self.rank] + rows.shape[1])
        return Everyone(table[:, 0].flatten(), table[:, 1].flatten(), [], starts, mine)

    def _check(self, headers: Tensor, unread: bool = False) -> list[int]:
        """Make sure that all ranks do the same; return how many micro-batches they have.

        `unread`: some of them may not look at it now, and take all for one domain.
        """
        columns = (column.tolist() for column in headers.long().unbind(1))
        steps, purposes, counts, examples, order, digests, used = columns
        if len(set(steps)) > 1:
            where = ", ".join(f"rank {rank}: step {step}" for rank, step in enumerate(steps))
            raise OutOfStepError(
                f"The ranks are not at the same step ({where}). Every rank must call backward() or "
                "finish() once per optimizer step, also one without examples, and load the same "
                "checkpoint."
            )
        if len(set(digests)) > 1:
            with self._answered(steps[0]):
                error = self._agreement.settle(self.group, self.device)
            if error is not None:
                raise error
        if PART in purposes and len(set(zip(purposes, counts, examples, strict=True))) > 1:
            rows = zip(purposes, counts, examples, strict=True)
            parts = [self._part(n, size) if p == PART else "" for p, n, size in rows]
            raise self._different_parts(steps[0], parts)
        if len(set(used)) > 1:
            with self._answered(steps[0]):
                heard = tell(self.used, self.group, self.device)
            place = next(i for i, row in enumerate(zip_longest(*heard)) if len(set(row)) > 1)
            raise self._different_parts(
                steps[0], [(*row, *[""] * (place + 1))[place] for row in heard]
            )
        unlabelled = [r for r, n in enumerate(counts) if n and purposes[r] == FINISH]
        if unread and unlabelled and FINISH_DOMAINS in purposes:
            raise OutOfStepError(
                f"In step {steps[0]} rank {purposes.index(FINISH_DOMAINS)} gave domains, and rank "
                f"{unlabelled[0]} did not. Give them on every rank, or on none."
            )
        if FOLD not in purposes:
            return counts
        if len(set(zip(purposes, counts, examples, order, strict=True))) > 1:
            raise OutOfStepError(
                f"Step {steps[0]}: all ranks must have as many micro-batches"
                + (" of the same sizes" if any(examples) else "")
                + f", but they have {counts}"
                + (f", with {examples} examples" if any(examples) else "")
                + self._finished(purposes)
                + ". They wait for each other in each of them, since the model is sharded or the "
                "loss communicates. Drop or fill up the last batch of an epoch (drop_last=True)."
            )
        return counts

    def _different_parts(self, step: int, where: list[str]) -> DisagreementError:
        shown = ", ".join(f"rank {r}: {each or 'nothing more'}" for r, each in enumerate(where))
        return DisagreementError(
            f"Step {step}: the ranks use different parts of the sharded model in the same "
            f"micro-batch ({shown}), so they would mix up what they send to each other. Let every "
            "rank use every layer, if only with a factor of 0. For parameters that have no "
            "gradient on some ranks, model.set_reduce_scatter_unused_params(True) will do."
        )

    def _part(self, number: int, size: int) -> str:
        return self.parts[number] + (f" with {size} numbers" if size else "")

    def meet(self, step: int, part: int, size: int = 0) -> None:
        """Make sure that all ranks are about to send the same part of a sharded model."""
        nothing = torch.zeros(3, 0, dtype=multitensor.widest(self.device), device=self.device)
        self._check(self._gather(step, PART, nothing, (part, size, 0))[:, :HEADER])

    def _finished(self, purposes: list[int]) -> str:
        """Return which ranks expect no more micro-batches, in words."""
        done = [str(rank) for rank, purpose in enumerate(purposes) if purpose != FOLD]
        return f" (rank {', '.join(done)} has no more to come)" if done else ""

    def agree(self, step: int, count: int, sizes: Sequence[int] = ()) -> None:
        """Make sure that all ranks are about to do the same, before they wait for each other."""
        weighted = sum(place * size for place, size in enumerate(sizes, 1))  # tells orders apart
        nothing = torch.zeros(3, 0, dtype=multitensor.widest(self.device), device=self.device)
        heard = self._gather(step, FOLD, nothing, (count, sum(sizes), weighted))
        self._check(heard[:, :HEADER])

    def _gather(
        self, step: int, purpose: int, rows: Tensor, numbers: tuple[int, int, int] | None = None
    ) -> Tensor:
        count = rows.shape[1]
        message = rows.new_zeros(HEADER + 3 * self._capacity)
        used = digest_of(self.used) if self.used and purpose != PART else 0
        header = [step, purpose, *(numbers or (count, 0, 0)), self._agreement.digest, used]
        message[:HEADER] = torch.tensor(header, dtype=rows.dtype)
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
