"""What each rank runs in the tests of rules that weight examples, in all three stacks.

Child processes import this module by name. Steps are those of `stack_cells`; beside them stand the
keys that the rule was shown in each, sorted, and the length of training that it was told.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import stack_cells as cells
from example_weights import ByKey

SIZE, ACCUMULATED = 4, 2  # examples of a batch, batches of a step

Found = tuple[list[cells.Step], ByKey]
Shown = tuple[list[cells.Step], list[list[int]], int | None]


def losses(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def every(rank: int, world: int, folder: str) -> dict[str, Shown]:
    """Return what each stack found."""
    cells.launched(rank, world)
    warnings.simplefilter("ignore")
    found = {
        "accelerate": accelerate(),
        "lightning": lightning(world, folder),
        "transformers": transformers(folder),
    }
    return {
        name: (steps, [sorted(seen.keys.tolist()) for seen in rule.seen], rule.total_steps)
        for name, (steps, rule) in found.items()
    }


def accelerate() -> Found:
    from accelerate import Accelerator

    from microclip.integrations.accelerate import AcceleratedClipper

    from accelerate_runs import fresh_state

    fresh_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model = cells.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(cells.Rows(), batch_size=SIZE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    rule = ByKey()
    clipper = AcceleratedClipper(accelerator, model, rule=rule)

    def backward(batch: Any) -> Any:
        return clipper.backward(lambda batch: losses(model, batch), batch, ids=batch[2])

    return cells.accelerated_epoch(accelerator, model, optimizer, loader, backward), rule


def lightning(world: int, folder: str) -> Found:
    from microclip.integrations.lightning import MicrobatchClip

    rule = ByKey()
    callback = MicrobatchClip(rule, microbatch_size=3, ids=lambda batch: batch[2])
    steps = cells.lightning_epoch(
        world, folder, callback, SIZE, losses, accumulate_grad_batches=ACCUMULATED
    )
    return steps, rule


def transformers(folder: str) -> Found:
    rule = ByKey()
    return cells.trainer_epoch(folder, SIZE, ACCUMULATED, {"rule": rule}), rule
