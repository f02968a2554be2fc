"""From the names in `Training` to objects: clipping rule, optimizer, learning rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from microclip import rules
from microclip.rules import ExampleRule, Fixed, Rule
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


def rule_of(training: Training, steps: int, own: Rule | None = None) -> Rule:
    """Return the rule of a run of this many steps: the user's object, or the one that is named.

    Without a micro-batch size nothing is clipped, but examples may still be weighted.
    """
    rule = parse_rule(training.rule) if own is None else own
    if not isinstance(rule, ExampleRule):
        return Fixed(math.inf) if training.microbatch_size is None else rule
    if rule.needs_norms and training.microbatch_size != 1:
        raise SettingError(
            f"The rule {training.rule} needs the gradient norm of every example: use "
            f"--microbatch-size 1 instead of {training.microbatch_size}, or --rule loss-history."
        )
    if rule.total_steps is None:
        rule.total_steps = steps
    return rule


def weights_examples(rule: str) -> bool:
    """Whether the rule of this name weights single examples, so that b does not matter.

    >>> weights_examples("loss-history"), weights_examples("LossHistory(clip=Unit)")
    (True, False)
    """
    found = _example_rule(rule)
    return found is not None and found.clip is None


def is_plain(training: Training) -> bool:
    """Whether nothing is clipped or held back."""
    return training.microbatch_size is None and _example_rule(training.rule) is None


def _example_rule(text: str) -> ExampleRule | None:
    try:
        found = rules.parse_rule(text)
    except (TypeError, ValueError):  # the name of an object of the user's
        return None
    return found if isinstance(found, ExampleRule) else None


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
