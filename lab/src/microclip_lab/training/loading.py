"""From data to batches: which rows, by `order`; how they become tensors, by the recipe.

Whether other processes load them makes no difference to what is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from microclip_lab.training.batch_rng import Draws
from microclip_lab.training.order import Order, Part, Share
from microclip_lab.training.recipe import Data, Recipe

LARGEST_LOOK = 256  # examples judged at once: without gradients more would fit, but why


@dataclass(frozen=True)
class Loaded:
    """A part of a mini-batch, ready to be differentiated."""

    part: Part
    batch: Any
    ids: list[int | str]
    domains: list[str] | None


class TrainingParts(Dataset[Loaded]):
    """Gives the part of a mini-batch for its description."""

    def __init__(self, recipe: Recipe[Any, Any], data: Data[Any], order: Order) -> None:
        self.recipe, self.data, self.order = recipe, data, order

    def __getitem__(self, part: Part) -> Loaded:
        rows = self.order.rows(part.step)[part.first : part.first + part.count].tolist()
        draws = Draws(self.order.seed, part.step, self.order.batch_size, part.first, part.count)
        data = self.data
        return Loaded(
            part,
            self.recipe.collate([data.training[row] for row in rows], draws),
            rows if data.ids is None else [data.ids[row] for row in rows],
            None if data.domains is None else [data.domains[row] for row in rows],
        )


class Looks(Dataset[tuple[list[int], Any]]):
    """Gives the rows of examples to be judged, and their batch."""

    def __init__(self, recipe: Recipe[Any, Any], examples: Any) -> None:
        self.recipe, self.examples = recipe, examples

    def __getitem__(self, rows: list[int]) -> tuple[list[int], Any]:
        return rows, self.recipe.collate([self.examples[row] for row in rows], None)


def training_parts(
    recipe: Recipe[Any, Any],
    data: Data[Any],
    order: Order,
    share: Share,
    steps: range,
    workers: int,
) -> Iterator[Loaded]:
    """Yield the parts of these steps that are this process's own."""
    parts = (part for step in steps for part in share.parts(step))
    yield from _loader(TrainingParts(recipe, data, order), parts, workers)


def looks(
    recipe: Recipe[Any, Any], examples: Any, share: Share, workers: int
) -> Iterator[tuple[list[int], Any]]:
    """Yield what this process judges of the examples, row numbers first.

    Every process gets as many batches as any other, since models that are sharded must be called
    together: where rows run out, the first ones are judged again.
    """
    size = min(share.part_size, LARGEST_LOOK)
    own = [
        row % len(examples)
        for row in range(share.rank, _up(len(examples), share.world), share.world)
    ]
    yield from _loader(
        Looks(recipe, examples),
        (own[i : i + size] for i in range(0, len(own), size)),
        workers,
    )


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _loader(dataset: Dataset[Any], keys: Iterable[Any], workers: int) -> Iterable[Any]:
    return DataLoader(
        dataset,
        sampler=keys,
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,
        generator=torch.Generator(),  # else it would draw from the one that dropout draws from
    )


def _as_it_is(loaded: Any) -> Any:
    return loaded
