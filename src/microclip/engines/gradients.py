"""Handling `.grad`: setting it aside during a step, taking it, giving the result back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Gradients = list[Tensor | None]  # one entry per trainable parameter; None: it got no gradient


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name, or say why there is nothing to clip."""
    if isinstance(model, DistributedDataParallel):
        raise NotImplementedError(
            "DistributedDataParallel averages gradients over ranks before they can be clipped. "
            "Give Clipper the wrapped module (ddp.module) on one rank, or train on one process."
        )
    chosen = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameters: no parameter has "
            "requires_grad=True, so there is no gradient to clip."
        )
    for name, parameter in chosen.items():
        if hasattr(parameter, "device_mesh"):
            raise NotImplementedError(
                f"Parameter {name!r} is sharded over ranks (a DTensor), which is not supported yet."
            )
    return chosen


@contextmanager
def set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Clear every `.grad` inside the block; afterwards each is what it was, also after an error."""
    kept = [parameter.grad for parameter in parameters]
    clear(parameters)
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient


def clear(parameters: Sequence[nn.Parameter]) -> None:
    """Drop every `.grad`."""
    for parameter in parameters:
        parameter.grad = None


def take(parameters: dict[str, nn.Parameter]) -> Gradients:
    """Take the gradients away from the parameters; complex ones as pairs of real numbers."""
    taken: Gradients = []
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is not None and gradient.layout != torch.strided:
            raise NotImplementedError(
                f"Parameter {name!r} got a sparse gradient, which cannot be rescaled and added up "
                "exactly here. Build the module with sparse=False."
            )
        if gradient is not None and gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        taken.append(gradient)
    clear(list(parameters.values()))
    return taken


def deposit(parameters: Sequence[nn.Parameter], gradients: Gradients) -> None:
    """Add the result to `.grad`, in place where there is one, exactly as `loss.backward()` does."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.is_complex():
            gradient = torch.view_as_complex(gradient)
        gradient = gradient.to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
