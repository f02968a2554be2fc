"""Evaluating a model: every process takes its share, and all of them get the whole result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from microclip_lab.training.loading import Share, data_loader
from microclip_lab.training.recipe import Recipe

MAX_BATCH = 256  # examples evaluated at once; more would fit, but gain nothing


class EvaluationBatches(Dataset[tuple[list[int], Any]]):
    """Gives the row numbers of examples to evaluate, and their batch."""

    def __init__(self, recipe: Recipe[Any, Any], examples: Any) -> None:
        self.recipe, self.examples = recipe, examples

    def __getitem__(self, rows: list[int]) -> tuple[list[int], Any]:
        return rows, self.recipe.collate([self.examples[row] for row in rows], None)


@torch.no_grad()
def evaluate(
    accelerator: Any,
    recipe: Recipe[Any, Any],
    model: nn.Module,
    examples: Any,
    share: Share,
    workers: int,
) -> dict[str, float]:
    """Return the recipe's figures for these examples, and restore the mode of the model."""
    from accelerate.utils import gather_object, send_to_device

    plain = accelerator.unwrap_model(model)
    was_training = plain.training
    plain.eval()
    records: list[tuple[int, Any]] = []
    try:
        for rows, batch in evaluation_batches(recipe, examples, share, workers):
            said = list(recipe.judge(plain, send_to_device(batch, accelerator.device)))
            if len(said) != len(rows):
                raise ValueError(
                    f"judge must return one record per example, but returned {len(said)} for "
                    f"{len(rows)} examples."
                )
            records += zip(rows, said, strict=True)
    finally:
        plain.train(was_training)
    if share.world > 1:
        records = gather_object(records)
    by_row = dict(records)  # padding rows were evaluated twice, and count once
    found = recipe.summary([by_row[row] for row in sorted(by_row)])
    if recipe.headline not in found:
        raise ValueError(
            f"summary must return the headline {recipe.headline!r}, but returned {sorted(found)}."
        )
    return {name: float(value) for name, value in found.items()}


def evaluation_batches(
    recipe: Recipe[Any, Any], examples: Any, share: Share, workers: int
) -> Iterator[tuple[list[int], Any]]:
    """Yield the batches that this process evaluates, row numbers first.

    Every process gets the same number of batches, since sharded models must be called together:
    where rows run out, the first ones are repeated.
    """
    size = min(share.part_size, MAX_BATCH)
    own = [
        row % len(examples)
        for row in range(share.rank, _up(len(examples), share.world), share.world)
    ]
    yield from data_loader(
        EvaluationBatches(recipe, examples),
        (own[i : i + size] for i in range(0, len(own), size)),
        workers,
    )


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
