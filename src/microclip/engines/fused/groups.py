"""Which examples belong to which micro-batch, as blocks of micro-batches of one size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """`count` neighbouring micro-batches of `size` examples each."""

    first_example: int
    first_microbatch: int
    count: int
    size: int

    def of(self, values: Tensor) -> Tensor:
        """Return this block's part of (examples, ...) as (micro-batches, examples of each, ...)."""
        chosen = values[self.first_example : self.first_example + self.count * self.size]
        return chosen.reshape(self.count, self.size, *values.shape[1:])

    def rows_of(self, rows: Tensor) -> Tensor:
        """Return this block's part of (examples, n, ...) as (micro-batches, rows of each, ...)."""
        return self.of(rows).flatten(1, 2)

    def microbatches_of(self, values: Tensor) -> Tensor:
        """Return this block's part of (micro-batches, ...)."""
        return values[self.first_microbatch : self.first_microbatch + self.count]


@dataclass(frozen=True)
class Shares:
    """What each gradient is multiplied with, by micro-batch and by example."""

    of_microbatches: Tensor
    of_examples: Tensor


class Groups:
    """The micro-batches of a batch, in order."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.examples = sum(sizes)
        self.blocks: list[Block] = []
        example = microbatch = 0
        for size, run in groupby(sizes):  # ragged ends are rare, so there are few blocks
            count = len(list(run))
            self.blocks.append(Block(example, microbatch, count, size))
            example += count * size
            microbatch += count

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    def per_example(self, values: Tensor) -> Tensor:
        """Return one value per example from one per micro-batch."""
        parts = [
            block.microbatches_of(values).unsqueeze(1).expand(-1, block.size).reshape(-1)
            for block in self
        ]
        return torch.cat(parts)

    def shares(self, coefficients: Tensor) -> Shares:
        """Return coefficients of micro-batches in both forms."""
        return Shares(coefficients, self.per_example(coefficients))

    def sum(self, values: Tensor) -> Tensor:
        """Add up along the first dimension, examples, within each micro-batch."""
        return torch.cat([block.of(values).sum(1) for block in self])

    def sizes_like(self, values: Tensor) -> Tensor:
        """Return the sizes as numbers of the kind that `values` holds."""
        return torch.tensor(self.sizes, dtype=values.dtype, device=values.device)
