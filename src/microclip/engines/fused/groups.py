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

    def of(self, rows: Tensor, per_example: int) -> Tensor:
        """Return this block's rows as (micro-batches, rows of each, ...)."""
        start = self.first_example * per_example
        chosen = rows[start : start + self.count * self.size * per_example]
        return chosen.view(self.count, self.size * per_example, *rows.shape[1:])


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
        return values.repeat_interleave(torch.tensor(self.sizes, device=values.device))

    def sum(self, values: Tensor) -> Tensor:
        """Add up along the first dimension, examples, within each micro-batch."""
        return torch.cat([block.of(values, 1).sum(1) for block in self])

    def sizes_like(self, values: Tensor) -> Tensor:
        """Return the sizes as numbers of the kind that `values` holds."""
        return torch.tensor(self.sizes, dtype=values.dtype, device=values.device)
