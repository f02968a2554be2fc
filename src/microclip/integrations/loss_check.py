"""What a Trainer would train on for a batch: its loss and gradient, without leaving a trace.

Each pass is run in training mode and from the same random numbers, so that two ways to the same
loss see the same dropout. Gradients do not pass through `.grad`; buffers, generators and modes are
put back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from microclip.engines.gradients import trainable
from microclip.engines.snapshot import undisturbed

VALUE = {32: 1e-5, 16: 1e-2}  # how far losses may differ, by the bits they are calculated with
GRADIENT = {32: 1e-4, 16: 3e-2}  # and each parameter's gradient
NOISE = {32: 3e-7, 16: 1e-3}  # of the whole gradient's norm, for those that cancel out to nothing

Gradient = list[Tensor | None]


@dataclass(frozen=True)
class Pass:
    """The loss of a batch and its gradient."""

    loss: Tensor
    gradient: Gradient  # empty if it was not asked for

    @property
    def is_finite(self) -> bool:
        """Whether there is something to compare."""
        return bool(self.loss.isfinite())

    def is_same(self, other: Pass, bits: int) -> bool:
        """Whether two ways lead to the same, but for rounding."""
        if not same_value(self.loss, other.loss):
            return False
        return same_gradient(self.gradient, other.gradient, bits)


class Passes:
    """Runs forward and backward passes of a Trainer's model on the side."""

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        self.trainer, self.model = trainer, model
        self.parameters = list(trainable(model).values())
        halves = any(parameter.element_size() < 4 for parameter in self.parameters)
        mixed = getattr(trainer.accelerator, "mixed_precision", "no") not in (None, "no")
        self.bits = 16 if halves or mixed else 32
        self.extra_losses: list[str] = []  # that the model reports beside its loss

    def loss(self, inputs: dict[str, Any]) -> Tensor:
        """Return the loss that the Trainer trains on."""
        loss = self.trainer.compute_loss(self.model, dict(inputs), num_items_in_batch=None)
        mean: Tensor = loss.mean()
        return mean

    def stock_loss(self, inputs: dict[str, Any]) -> Tensor:
        """Return the same from the Trainer's own `compute_loss`, and note what is added to it."""
        inputs = dict(inputs)
        loss: Tensor
        loss, outputs = self.trainer.compute_loss(self.model, inputs, True, None)
        if isinstance(outputs, dict):
            others = [name for name in outputs if name.endswith("_loss")]
            self.extra_losses = [name for name in others if outputs[name] is not None]
        return loss

    def of(
        self, loss_fn: Callable[[], Tensor], by_gradient: bool = True, value: Tensor | None = None
    ) -> Pass:
        """Return a loss and its gradient, from the present random numbers.

        If it is not the value that was expected, the gradient does not matter any more.
        """
        gradient: Gradient = []
        with undisturbed(self.model, trainable(self.model)), torch.set_grad_enabled(by_gradient):
            with self.trainer.compute_loss_context_manager():
                loss = loss_fn()
            if by_gradient and (value is None or same_value(loss.detach(), value)):
                gradient = list(torch.autograd.grad(loss, self.parameters, allow_unused=True))
        return Pass(loss.detach(), gradient)


def same_value(one: Tensor, other: Tensor) -> bool:
    """Whether two losses are the same but for rounding."""
    bits = 16 if min(one.element_size(), other.element_size()) < 4 else 32
    return bool((one.float() - other.float()).abs() <= VALUE[bits] * other.float().abs())


def same_gradient(one: Gradient, other: Gradient, bits: int, slack: float = 1.0) -> bool:
    """Whether two gradients are the same but for rounding, each parameter by itself."""
    pairs = [
        (_or_zeros(a, like=b), _or_zeros(b, like=a))
        for a, b in zip(one, other, strict=True)
        if a is not None or b is not None
    ]
    if not pairs:
        return True
    apart = torch.stack([norm(a - b) for a, b in pairs])
    lengths = torch.stack([torch.maximum(norm(a), norm(b)) for a, b in pairs])
    noise = slack * NOISE[bits] * norm(lengths)
    return bool((apart <= GRADIENT[bits] * lengths + noise).all())


def _or_zeros(gradient: Tensor | None, like: Tensor | None) -> Tensor:
    if gradient is not None:
        return gradient
    assert like is not None
    return torch.zeros_like(like)


def norm(tensor: Tensor) -> Tensor:
    """Return the length of a tensor, in 32 bits or more."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    length: Tensor = torch.linalg.vector_norm(tensor.to(wide))
    return length
