"""Asking `loss_fn` for the loss of one micro-batch, checking the answer, differentiating it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from microclip.microbatches import Microbatch

LossFn = Callable[[Any], Tensor]


def evaluate(loss_fn: LossFn, microbatch: Microbatch) -> tuple[Tensor, Tensor | None]:
    """Return the mean loss of a micro-batch and, if `loss_fn` gives them, the examples' losses."""
    loss = call(loss_fn, microbatch.batch, microbatch.size)
    if loss.dim() == 1 and loss.numel() == microbatch.size:
        return loss.mean(), loss.detach()
    return loss.reshape(()), None


def call(loss_fn: LossFn, batch: Any, size: int) -> Tensor:
    """Return what `loss_fn` gives for a batch, if it is a loss that can be worked with."""
    loss = loss_fn(batch)
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"loss_fn must return a tensor, but returned {type(loss).__name__}."
            + (" Return its .loss." if hasattr(loss, "loss") else "")
        )
    if loss.numel() != 1 and loss.shape != (size,):
        raise ValueError(
            "loss_fn must return a scalar (the mean loss) or one loss per example, but for "
            f"{size} examples it returned a tensor of shape {tuple(loss.shape)}."
        )
    if not loss.requires_grad:
        raise RuntimeError(
            "The loss that loss_fn returned has no graph to differentiate: it was detached, "
            "computed under torch.no_grad(), or does not depend on a trainable parameter."
        )
    return loss


def backward(loss: Tensor, scaler: GradScaler | None, retain_graph: bool = False) -> None:
    """Differentiate, through the loss scaling if there is one."""
    scaled = loss if scaler is None else scaler.scale(loss)
    scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


def unscale(norm: Tensor, scaler: GradScaler | None) -> Tensor:
    """Return the norm as if the loss had not been scaled, without reading the scale on the host."""
    if scaler is None:
        return norm
    return norm / scaler.scale(torch.ones_like(norm, dtype=torch.float32))
