"""Per-example gradients, one pass per example: for models that a single pass cannot follow.

Also checks that per-example gradients exist at all: that an example's loss does not depend on the
rest of its batch. No table of all gradients is held, only as many parameters at a time as fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from microclip import multitensor
from microclip.engines.losses import LossFn, call
from microclip.engines.randomness import RandomState
from microclip.microbatches import cut

Parameters = dict[str, nn.Parameter]
MIXING = 0.02  # of the largest loss; less than that is rounding


def losses_of(loss_fn: LossFn, batch: Any, examples: int) -> Tensor:
    """Return one loss per example, or say that there must be one."""
    losses = call(loss_fn, batch, examples)
    if losses.shape != (examples,):
        raise ValueError(
            f"The probe needs one loss per example, but for {examples} examples loss_fn returned "
            f"a tensor of shape {tuple(losses.shape)}. Return the unreduced losses, as with "
            'reduction="none".'
        )
    return losses


def refuse_mixing(
    loss_fn: LossFn, batch: Any, size: int, before: RandomState, devices: set[torch.device]
) -> None:
    """Refuse losses that depend on the other examples of the batch.

    Args:
        loss_fn: Returns one loss per example.
        batch: A few examples.
        size: How many.
        before: The state of the random generators, to go back to.
        devices: Where parameters are.
    """
    with torch.enable_grad():
        together = losses_of(loss_fn, batch, size).detach()
        alone = torch.cat([losses_of(loss_fn, part.batch, 1).detach() for part in cut(batch, 1)])
    if not RandomState.now(devices).equals(before):
        before.restore()
        return  # the model adds noise, which is not the same twice
    difference = (together - alone).abs().max() / alone.abs().max().clamp(min=1e-12)
    if difference > MIXING:
        raise ValueError(
            f"The loss of an example changes with its neighbors in the batch (from "
            f"{alone.tolist()} alone to {together.tolist()} together), so it has no gradient of "
            "its own, and a micro-batch's gradient is not the mean over its examples. BatchNorm, "
            "in-batch negatives and losses normalized over the batch do this; probe without them."
        )


def one_by_one(
    parameters: Parameters, loss_fn: LossFn, batches: list[Any], table_bytes: float
) -> Iterator[Tensor]:
    """Yield (examples, columns) for some parameters at a time, repeating all passes for each."""
    examples = [part.batch for batch in batches for part in cut(batch, 1)]
    wide = {name: 8 if p.dtype == torch.float64 else 4 for name, p in parameters.items()}
    portions: list[list[str]] = [[]]
    taken = 0
    for name, parameter in parameters.items():
        size = parameter.numel() * wide[name] * (1 + parameter.is_complex()) * len(examples)
        if portions[-1] and taken + size > table_bytes:
            portions.append([])
            taken = 0
        portions[-1].append(name)
        taken += size
    state = RandomState.now({parameter.device for parameter in parameters.values()})
    for portion in portions:
        state.restore()  # the same gradients for all portions
        chosen = [parameters[name] for name in portion]
        yield torch.stack([_row(parameters, chosen, loss_fn, example) for example in examples])


def _row(
    parameters: Parameters, chosen: list[nn.Parameter], loss_fn: LossFn, example: Any
) -> Tensor:
    # .backward(), since reentrant checkpointing does not support torch.autograd.grad
    losses_of(loss_fn, example, 1).sum().backward()  # type: ignore[no-untyped-call]
    parts = []
    for parameter in chosen:
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        parts.append(real.to(multitensor.accumulation_dtype(real)).flatten())
    clear(parameters)
    widest = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    return torch.cat([part.to(widest) for part in parts])


def clear(parameters: Parameters) -> None:
    """Drop all gradients."""
    for parameter in parameters.values():
        parameter.grad = None
