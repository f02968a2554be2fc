"""From the names in `Training` to objects: clipping rule, optimizer, learning rate schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from microclip import rules
from microclip.rules import Rule
from microclip_lab.training.config import SettingError, Training


def parse_rule(text: str) -> Rule:
    """Return the rule of this name, with the arguments in parentheses after it.

    >>> parse_rule("MinNorm"), parse_rule("Quantile(0.2)"), parse_rule("Median(rescale=True)")
    (MinNorm(), Quantile(q=0.2, rescale=False), Median(rescale=True))
    """
    try:
        return rules.parse_rule(text)
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"rule must be one of {', '.join(rules.KNOWN)}, with arguments in parentheses, "
            f'such as "Quantile(0.2)" or "Fixed(1.0)", but got {text!r} ({error}).'
        ) from error


def optimizer_of(training: Training, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer; parameters with fewer than two dimensions have no weight decay."""
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

        # no scaling of its own, so that learning rates of different runs compare
        adafactor: Any = Adafactor
        made: torch.optim.Optimizer = adafactor(
            groups, lr=rate, relative_step=False, scale_parameter=False
        )
        return made
    return torch.optim.AdamW(groups, lr=rate, betas=training.betas)


def schedule_of(
    training: Training, optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the learning rate schedule over this many steps."""
    from transformers import get_scheduler

    name = "constant_with_warmup" if training.schedule == "constant" else training.schedule
    schedule: torch.optim.lr_scheduler.LRScheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=round(training.warmup * steps),
        num_training_steps=steps,
    )
    return schedule
