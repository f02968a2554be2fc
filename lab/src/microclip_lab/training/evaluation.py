"""Judging a model: every process judges its part, and all of them hear the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from microclip_lab.training.loading import looks
from microclip_lab.training.order import Share
from microclip_lab.training.recipe import Recipe


@torch.no_grad()
def evaluate(
    accelerator: Any,
    recipe: Recipe[Any, Any],
    model: nn.Module,
    examples: Any,
    share: Share,
    workers: int,
) -> dict[str, float]:
    """Return the recipe's figures for these examples; the model is left in the mode it was in."""
    from accelerate.utils import gather_object, send_to_device

    plain = accelerator.unwrap_model(model)
    was_training = plain.training
    plain.eval()
    records: list[tuple[int, Any]] = []
    try:
        for rows, batch in looks(recipe, examples, share, workers):
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
    by_row = dict(records)  # those that were judged twice, to keep processes in step, count once
    found = recipe.summary([by_row[row] for row in sorted(by_row)])
    if recipe.headline not in found:
        raise ValueError(
            f"summary must return the headline {recipe.headline!r}, but returned {sorted(found)}."
        )
    return {name: float(value) for name, value in found.items()}
