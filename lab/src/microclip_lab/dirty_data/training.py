"""One training run: the loop that all arms share. How gradients are computed is up to the arm.

The runs of a seed share data, initial weights and batches, whatever the arm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from microclip_lab.dirty_data.task import Data, Task

WARM_UP = 0.05  # of all steps

Engine = Literal["auto", "stream", "fused"]
Batch = tuple[Tensor, Tensor]  # inputs and targets
Backward = Callable[[Tensor, Batch], object]  # gets the rows of a batch too; fills .grad


@dataclass
class Setup:
    """What an arm gets to work with, and may add to.

    Args:
        task: The task.
        data: Its data; `data.wrong` is for the oracle only.
        model: The network to train.
        seed: Of data, network and batches.
        rate: The learning rate.
        plain_rate: The tuned rate of plain training.
        also_trained: More networks for the optimizer to train.
        after_step: Called after each optimizer step.
        evaluated: The network to evaluate, if it is not `model`.
        held: Whether each training example was held back at its last visit, if the arm says so.
        notes: Figures to keep in the record.
        engine: The clipper's; "auto" takes the faster one, and they differ in the last bits.
    """

    task: Task
    data: Data
    model: nn.Module
    seed: int
    rate: float
    plain_rate: float
    also_trained: list[nn.Module] = field(default_factory=list)
    after_step: list[Callable[[], None]] = field(default_factory=list)
    evaluated: nn.Module | None = None
    held: Tensor | None = None
    notes: dict[str, float] = field(default_factory=dict)
    engine: Engine = "auto"

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches only; which examples are left over changes from epoch to epoch."""
        return len(self.data.training) // self.task.batch_size

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.steps_per_epoch * self.task.epochs

    def losses(self, batch: Batch) -> Tensor:
        """Return the task's loss for each example of a batch."""
        inputs, targets = batch
        return self.task.losses(self.model(inputs), targets)


Start = Callable[[Setup], Backward]


def train(setup: Setup, start: Start, after_epoch: Callable[[int], None] | None = None) -> None:
    """Train `setup.model`; `after_epoch` is called with the number of each epoch, from 1."""
    task, part = setup.task, setup.data.training
    backward = start(setup)
    networks = [setup.model, *setup.also_trained]
    optimizer = torch.optim.AdamW(
        [parameter for network in networks for parameter in network.parameters()],
        lr=setup.rate,
        weight_decay=task.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor(setup.steps))
    draw = torch.Generator().manual_seed(setup.seed)
    for epoch in range(1, task.epochs + 1):
        order = torch.randperm(len(part), generator=draw)
        used = order[: setup.steps_per_epoch * task.batch_size]
        for rows in used.view(-1, task.batch_size):
            optimizer.zero_grad()
            backward(rows, (part.inputs[rows], part.targets[rows]))
            optimizer.step()
            schedule.step()
            for hook in setup.after_step:
                hook()
        if after_epoch is not None:
            after_epoch(epoch)


def rate_factor(steps: int) -> Callable[[int], float]:
    """Return the schedule: a short linear warm-up, then a linear decay to zero.

    >>> factor = rate_factor(100)
    >>> factor(0), factor(4), factor(5), factor(100)
    (0.2, 1.0, 1.0, 0.0)
    """
    warm_up = max(1, round(WARM_UP * steps))
    return lambda step: min((step + 1) / warm_up, (steps - step) / (steps - warm_up), 1.0)
