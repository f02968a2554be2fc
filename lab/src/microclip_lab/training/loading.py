"""Which examples each step sees, on each process, and how they are loaded.

The rows follow from the seed and the step alone. So a run that resumes at any step, or on another
number of processes, sees the same mini-batches, cut into the same micro-batches. The recipe turns
rows into tensors; loading them in worker processes does not change what is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from microclip_lab.training.batch_rng import BatchRng
from microclip_lab.training.config import SettingError, Training
from microclip_lab.training.recipe import Data, Recipe

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Order:
    """Shuffled epochs, one after the other, cut into mini-batches of B examples.

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
    """The examples of a mini-batch that one process handles at once."""

    step: int
    first: int  # index of its first example in the mini-batch
    count: int
    is_last: bool  # whether it completes this process's share of the mini-batch


@dataclass(frozen=True)
class Share:
    """The share of every mini-batch that one process handles: consecutive examples, in parts."""

    batch_size: int
    part_size: int
    rank: int = 0
    world: int = 1

    @classmethod
    def of(cls, training: Training, rank: int, world: int) -> Share:
        """Return the share of a process, or explain why the batch cannot be divided."""
        B, b, chunk = training.batch_size, training.microbatch_size, training.chunk_size
        if B % world:
            raise SettingError(
                f"batch_size {B} cannot be divided equally among {world} processes. "
                f"Choose a multiple of {world}."
            )
        own = B // world
        if b is not None and own % b:
            raise SettingError(
                f"Each of {world} processes has {own} of the {B} examples of a batch, which cannot "
                f"be cut into micro-batches of {b}. Choose a microbatch_size that divides {own}."
            )
        if chunk is not None and (own % chunk or (b is not None and chunk % b)):
            raise SettingError(
                f"chunk_size must divide the {own} examples of a batch that each process has"
                + (f" and be a multiple of microbatch_size {b}" if b is not None else "")
                + f", but got {chunk}."
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


@functools.lru_cache(maxsize=4)  # consecutive steps are in the same epoch or the next
def _shuffled(seed: int, epoch: int, examples: int) -> Rows:
    return np.random.default_rng((seed, epoch)).permutation(examples)


@dataclass(frozen=True)
class Loaded:
    """A loaded part of a mini-batch."""

    part: Part
    batch: Any
    ids: list[int | str]
    domains: list[str] | None


class TrainingParts(Dataset[Loaded]):
    """Loads parts of mini-batches."""

    def __init__(self, recipe: Recipe[Any, Any], data: Data[Any], order: Order) -> None:
        self.recipe, self.data, self.order = recipe, data, order

    def __getitem__(self, part: Part) -> Loaded:
        rows = self.order.rows(part.step)[part.first : part.first + part.count].tolist()
        rng = BatchRng(self.order.seed, part.step, self.order.batch_size, part.first, part.count)
        data = self.data
        return Loaded(
            part,
            self.recipe.collate([data.training[row] for row in rows], rng),
            rows if data.ids is None else [data.ids[row] for row in rows],
            None if data.domains is None else [data.domains[row] for row in rows],
        )


def training_parts(
    recipe: Recipe[Any, Any],
    data: Data[Any],
    order: Order,
    share: Share,
    steps: range,
    workers: int,
) -> Iterator[Loaded]:
    """Yield this process's parts of these steps."""
    parts = (part for step in steps for part in share.parts(step))
    yield from data_loader(TrainingParts(recipe, data, order), parts, workers)


def data_loader(dataset: Dataset[Any], keys: Iterable[Any], workers: int) -> Iterable[Any]:
    """Return a loader that yields `dataset[key]` for each key, in order."""
    return DataLoader(
        dataset,
        sampler=keys,
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,
        generator=torch.Generator(),  # else it would advance the generator that dropout uses
    )


def _as_it_is(loaded: Any) -> Any:
    return loaded
