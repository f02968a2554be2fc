"""Which examples belong to which micro-batch, as blocks of micro-batches of one size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby

import torch
from torch import Tensor


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
