"""What one use of a parameter contributes to its gradient, and which examples form a micro-batch.

A *contribution* belongs to one place where the forward pass used a parameter. It is known after the
backward pass. `Materialized` holds one gradient per micro-batch: for small parameters, and where
examples have many rows. `MaterializedParts` splits that over several tensors, and `SmallParameters`
puts many parameters into one. Contributions of weights that multiply rows are in `rows`, those of
convolutions in `convolution`. `Groups` are the micro-batches of a batch, as blocks of one size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from microclip import multitensor


@dataclass(frozen=True)
class Block:
    """`count` consecutive micro-batches of `size` examples each."""

    first_example: int
    first_microbatch: int
    count: int
    size: int
    is_all: bool  # this is the only block, as usual: nothing needs to be cut

    def of(self, values: Tensor) -> Tensor:
        """Return this block's part of (examples, ...) as (micro-batches, examples of each, ...)."""
        return self._examples_of(values).reshape(self.count, self.size, *values.shape[1:])

    def rows_of(self, rows: Tensor) -> Tensor:
        """Return this block's part of (examples, n, ...) as (micro-batches, rows of each, ...)."""
        chosen = self._examples_of(rows)
        if self.size == 1:
            return chosen
        return chosen.reshape(self.count, self.size * rows.shape[1], *rows.shape[2:])

    def sum(self, values: Tensor) -> Tensor:
        """Add this block's part of (examples, ...) up within each micro-batch."""
        return self._examples_of(values) if self.size == 1 else self.of(values).sum(1)

    def sum_rows(self, rows: Tensor) -> Tensor:
        """Add this block's part of (examples, n, ...) up within each micro-batch."""
        chosen = self.rows_of(rows)
        return chosen.squeeze(1) if chosen.shape[1] == 1 else chosen.sum(1)

    def per_example(self, values: Tensor) -> Tensor:
        """Return one value per example from this block's part of one per micro-batch."""
        chosen = self.microbatches_of(values)
        return chosen if self.size == 1 else chosen.repeat_interleave(self.size)

    def microbatches_of(self, values: Tensor) -> Tensor:
        """Return this block's part of (micro-batches, ...)."""
        if self.is_all:
            return values
        return values[self.first_microbatch : self.first_microbatch + self.count]

    def _examples_of(self, values: Tensor) -> Tensor:
        if self.is_all:
            return values
        return values[self.first_example : self.first_example + self.count * self.size]


@dataclass(frozen=True)
class Shares:
    """What each gradient is multiplied by, per micro-batch and per example."""

    of_microbatches: Tensor
    of_examples: Tensor

    @cached_property
    def single(self) -> Shares:
        """Return the same in single precision."""
        of_microbatches = self.of_microbatches.float()
        if self.of_examples is self.of_microbatches:
            return Shares(of_microbatches, of_microbatches)
        return Shares(of_microbatches, self.of_examples.float())

    def as_(self, dtype: torch.dtype) -> Shares:
        """Return the same in another precision."""
        if dtype == self.of_examples.dtype:
            return self
        if dtype == torch.float32:
            return self.single
        return Shares(self.of_microbatches.to(dtype), self.of_examples.to(dtype))


class Groups:
    """The micro-batches of a batch, in order."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.examples = sum(sizes)
        self.largest = max(sizes, default=0)
        self.blocks: list[Block] = []
        example = microbatch = 0
        for size, run in groupby(sizes):  # few blocks, since ragged ends are rare
            count = len(list(run))
            self.blocks.append(Block(example, microbatch, count, size, count == len(self)))
            example += count * size
            microbatch += count

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    def examples_of(self, microbatch: int) -> slice:
        """Return where the examples of a micro-batch are."""
        start = sum(self.sizes[:microbatch])
        return slice(start, start + self.sizes[microbatch])

    def times(self, rows: int) -> Groups:
        """Return the same micro-batches, for examples that have several rows each."""
        return Groups([size * rows for size in self.sizes])

    def per_example(self, values: Tensor) -> Tensor:
        """Return one value per example from one per micro-batch."""
        return together([block.per_example(values) for block in self])

    def shares(self, coefficients: Tensor) -> Shares:
        """Return coefficients of micro-batches, also per example."""
        return Shares(coefficients, self.per_example(coefficients))

    def sum(self, values: Tensor) -> Tensor:
        """Add up along the first dimension, examples, within each micro-batch."""
        return together([block.sum(values) for block in self])

    def sum_rows(self, rows: Tensor) -> Tensor:
        """Add (examples, n, ...) up within each micro-batch."""
        return together([block.sum_rows(rows) for block in self])

    def means(self, values: Tensor) -> Tensor:
        """Return the means of one value per example, within each micro-batch."""
        if len(self.blocks) > 1:
            return self.sum(values) / self.sizes_like(values)
        return values if self.largest == 1 else self.sum(values) / self.largest

    def sizes_like(self, values: Tensor) -> Tensor:
        """Return the sizes in the dtype and on the device of `values`."""
        return torch.tensor(self.sizes, dtype=values.dtype, device=values.device)


@cache
def singles(count: int) -> Groups:
    """Return so many micro-batches of one example each."""
    return Groups([1] * count)


def together(parts: list[Tensor]) -> Tensor:
    """Concatenate what was found block by block."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Contribution(ABC):
    """The gradients of all micro-batches with respect to one parameter, in some representation."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return the parameter's shape."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the memory it holds."""

    @abstractmethod
    def squared_norms(self, groups: Groups) -> Tensor:
        """Return the squared norm of every micro-batch's gradient."""

    @abstractmethod
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        """Return total + sum_j share_j g_j, in place if there is a total."""

    @abstractmethod
    def materialize(self, groups: Groups) -> Tensor:
        """Return the gradients of all micro-batches: (micro-batches, *shape)."""

    def gradient_of(self, groups: Groups, microbatch: int) -> Tensor:
        """Return the gradient of one micro-batch."""
        return self.materialize(groups)[microbatch]

    def nonzero(self, groups: Groups) -> Tensor:
        """Return, for every micro-batch, whether its gradient has a nonzero element."""
        return self.materialize(groups).flatten(1).any(1)

    def materialized(self, groups: Groups) -> Contribution:
        """Return the same contribution with materialized gradients."""
        return Materialized(self.materialize(groups))

    @abstractmethod
    def without(self, left_out: Shares) -> Contribution:
        """Blank what is left out: a share of 0 would not do, since 0 x NaN is NaN."""

    def kept(self, groups: Groups) -> Contribution:
        """Return the same contribution in the representation to keep until the sum is taken."""
        return self

    def columns(
        self, groups: Groups, start: int, stop: int, table_rows: Tensor | None = None
    ) -> Tensor:
        """Return (micro-batches, elements) of rows `start` to `stop` of the parameter.

        Complex numbers count as pairs of real ones. If `table_rows` is given, rows are numbered
        within it: only those rows of an embedding table are looked at.
        """
        gradients = self.materialize(groups)
        if gradients.is_complex():
            gradients = torch.view_as_real(gradients)
        rows = gradients if self.shape else gradients.unsqueeze(1)
        return multitensor.widened(rows[:, start:stop].flatten(1))


@dataclass(frozen=True)
class Materialized(Contribution):
    """The gradients of all micro-batches: (micro-batches, *shape of the parameter)."""

    gradients: Tensor

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.gradients.shape[1:]

    @property
    @override
    def nbytes(self) -> int:
        return self.gradients.nbytes

    @override
    def squared_norms(self, groups: Groups) -> Tensor:
        return multitensor.squared_norms(self.gradients)

    @override
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        lying = multitensor.in_memory_order(self.gradients)
        flat = multitensor.widened(multitensor.as_rows(lying))
        sum_ = (shares.as_(flat.dtype).of_microbatches @ flat).view(lying.shape[1:])
        sum_ = multitensor.from_memory_order(sum_, self.gradients)
        return sum_.contiguous() if total is None else total.view_as(sum_).add_(sum_)

    @override
    def materialize(self, groups: Groups) -> Tensor:
        return self.gradients

    @override
    def without(self, left_out: Shares) -> Materialized:
        mask = left_out.of_microbatches.view(-1, *(1,) * (self.gradients.dim() - 1))
        return Materialized(self.gradients.masked_fill(mask, 0.0))


@dataclass(frozen=True)
class MaterializedParts(Contribution):
    """Materialized gradients in several tensors, each small enough for the allocator to reuse."""

    parts: tuple[Materialized, ...]

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape

    @property
    @override
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @override
    def squared_norms(self, groups: Groups) -> Tensor:
        return torch.cat([part.squared_norms(groups) for part in self.parts])

    @override
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        for part, each in zip(self.parts, self._split(shares), strict=True):
            total = part.add_to(total, each)
        assert total is not None
        return total

    @override
    def materialize(self, groups: Groups) -> Tensor:
        return torch.cat([part.gradients for part in self.parts])

    @override
    def without(self, left_out: Shares) -> MaterializedParts:
        pairs = zip(self.parts, self._split(left_out), strict=True)
        return MaterializedParts(tuple(part.without(each) for part, each in pairs))

    def _split(self, shares: Shares) -> list[Shares]:
        """Return each part's shares; the parts only look at those of micro-batches."""
        each = torch.split(shares.of_microbatches, [len(part.gradients) for part in self.parts])
        return [Shares(of_microbatches, shares.of_examples) for of_microbatches in each]


class SmallParameters:
    """Materialized gradients of many small parameters in one tensor: biases, scales, ..."""

    LARGEST = 2**13  # elements of a parameter

    def __init__(self, parts: dict[str, Materialized]) -> None:
        self._shapes = {name: part.shape for name, part in parts.items()}
        self._all = Materialized(torch.cat([_flat(part.gradients) for part in parts.values()], 1))

    @classmethod
    def takes(cls, contribution: Materialized, device: torch.device) -> bool:
        """Whether a parameter's only contribution is small enough and on the right device."""
        gradients = contribution.gradients
        small = gradients.numel() <= cls.LARGEST * gradients.shape[0]
        return small and not gradients.is_complex() and gradients.device == device

    def squared_norms(self, groups: Groups) -> Tensor:
        """Return the squared norms over all these parameters."""
        return self._all.squared_norms(groups)

    def nonzero(self, groups: Groups) -> Tensor:
        """Return, for every micro-batch, whether any of its gradients is nonzero."""
        return self._all.nonzero(groups)

    def gradients_of(self, microbatch: int) -> dict[str, Tensor]:
        """Return the gradients of one micro-batch."""
        row = self._all.gradients[microbatch]
        parts = torch.split(row, [math.prod(shape) for shape in self._shapes.values()])
        return {
            name: part.view(shape)
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def leave_out(self, left_out: Shares) -> None:
        """Blank micro-batches."""
        self._all = self._all.without(left_out)

    def add_to(self, totals: dict[str, Tensor], shares: Shares) -> None:
        """Add sum_j share_j g_j to the totals."""
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        parts: Any = torch.split_with_sizes_copy(self._all.add_to(None, shares), sizes)  # type: ignore[func-returns-value]
        for (name, shape), part in zip(self._shapes.items(), parts, strict=True):
            if len(shape) != 1:
                part = part.view(shape)
            totals[name] = totals[name].add_(part) if name in totals else part


def empty_gradients(groups: Groups, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return memory for one gradient per micro-batch, in a precision to add up in."""
    dtype = multitensor.accumulation_dtype(like)
    return torch.empty((len(groups), *shape), dtype=dtype, device=like.device)


def _flat(gradients: Tensor) -> Tensor:
    """Return one row per micro-batch."""
    return gradients if gradients.dim() == 2 else gradients.reshape(len(gradients), -1)
