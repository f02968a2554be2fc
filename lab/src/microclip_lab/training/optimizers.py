"""What takes the steps, and how the learning rate moves: from torch and transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from microclip_lab.training.config import Training


def optimizer_of(training: Training, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer; what has fewer than two dimensions (biases, norms) does not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    rate = training.learning_rate
    if training.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=training.momentum)
    if training.optimizer == "adafactor":
        from transformers import Adafactor

        # steps as large as the learning rate says, so that rates of different runs compare
        adafactor: Any = Adafactor
        made: torch.optim.Optimizer = adafactor(
            groups, lr=rate, relative_step=False, scale_parameter=False
        )
        return made
    return torch.optim.AdamW(groups, lr=rate, betas=training.betas)


def schedule_of(
    training: Training, optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the schedule of the learning rate over so many steps."""
    from transformers import get_scheduler

    name = "constant_with_warmup" if training.schedule == "constant" else training.schedule
    schedule: torch.optim.lr_scheduler.LRScheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=round(training.warmup * steps),
        num_training_steps=steps,
    )
    return schedule
