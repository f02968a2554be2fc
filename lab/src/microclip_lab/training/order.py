"""Which examples each step sees, on each process: pure arithmetic of the seed and the step.

Nothing is remembered from step to step, so a run that is taken up again at any step, or on another
number of processes, sees the same mini-batches cut into the same micro-batches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from microclip_lab.training.config import SettingError, Training

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Order:
    """Shuffled epochs, one after the other, cut into mini-batches of B.

    >>> order = Order(examples=5, batch_size=4, seed=0)
    >>> sorted([*order.rows(0).tolist(), *order.rows(1).tolist()[:1]])  # an epoch has each once
    [0, 1, 2, 3, 4]
    """

    examples: int
    batch_size: int
    seed: int

    def rows(self, step: int) -> Rows:
        """Return the row numbers of a step's mini-batch."""
        start = step * self.batch_size
        first, last = start // self.examples, (start + self.batch_size - 1) // self.examples
        epochs = [_shuffled(self.seed, epoch, self.examples) for epoch in range(first, last + 1)]
        offset = start - first * self.examples
        return np.concatenate(epochs)[offset : offset + self.batch_size]


@dataclass(frozen=True)
class Part:
    """The examples of a mini-batch that one process takes at once."""

    step: int
    first: int  # the place of its first example in the mini-batch
    count: int
    is_last: bool  # whether this process then has had its whole share of the mini-batch


@dataclass(frozen=True)
class Share:
    """What one of several processes does of every mini-batch: a run of examples, in parts."""

    batch_size: int
    part_size: int
    rank: int = 0
    world: int = 1

    @classmethod
    def of(cls, training: Training, rank: int, world: int) -> Share:
        """Return the share of a process, or say why the batch cannot be shared so."""
        B, b, chunk = training.batch_size, training.microbatch_size, training.chunk_size
        if B % world:
            raise SettingError(
                f"batch_size is {B}, which {world} processes cannot share equally. "
                f"Choose a multiple of {world}."
            )
        own = B // world
        if b is not None and own % b:
            raise SettingError(
                f"Each of {world} processes has {own} of the {B} examples of a batch, which cannot "
                f"be cut into micro-batches of {b}. Let microbatch_size divide {own}."
            )
        if chunk is not None and (own % chunk or (b is not None and chunk % b)):
            raise SettingError(
                f"chunk_size must divide a process's {own} examples of a batch"
                + (f" and be a multiple of microbatch_size {b}" if b is not None else "")
                + f", but is {chunk}."
            )
        return cls(B, chunk or own, rank, world)

    def parts(self, step: int) -> list[Part]:
        """Return the parts of a step, in order."""
        own = self.batch_size // self.world
        begin = self.rank * own
        return [
            Part(step, begin + offset, self.part_size, offset + self.part_size == own)
            for offset in range(0, own, self.part_size)
        ]


@functools.lru_cache(maxsize=4)  # neighbouring steps are in the same epoch, or the next
def _shuffled(seed: int, epoch: int, examples: int) -> Rows:
    return np.random.default_rng((seed, epoch)).permutation(examples)
