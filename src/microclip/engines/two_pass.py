"""The two-pass engine: norms first, without keeping a gradient; then the weighted sum.

In both passes a hook takes every parameter's gradient the moment autograd has it: the first takes
its norm and drops it, the second adds weight x gradient to what becomes `.grad`. So there is never
a second buffer of the model's size, and any rule will do, at the price of a second forward and
backward. The weight goes on the gradient and not on the loss: scaling the loss would let models
that calculate partly in lower precision round differently in the two passes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from microclip import multitensor
from microclip.engines.base import Engine
from microclip.engines.gradients import Gradients, add_multiple, set_aside, take
from microclip.engines.losses import LossFn, backward, evaluate, unscale
from microclip.engines.randomness import RandomState
from microclip.microbatches import Cuts, Microbatch


@dataclass(frozen=True)
class _Visit:
    """What it takes to come back to a micro-batch."""

    loss_fn: LossFn
    microbatch: Microbatch
    random_state: RandomState
    loss: Tensor


class TwoPass(Engine):
    """Visits every micro-batch twice."""

    name = "two_pass"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._devices = {parameter.device for parameter in self.parameters.values()}
        self._visits: list[_Visit] = []
        self._touched: set[str] = set()
        self._buffers = copies_of_buffers(self.model)

    def fold(self, loss_fn: LossFn, microbatches: Cuts, final: bool) -> None:
        """First pass: take the norms of these micro-batches, and remember how to come back."""
        norms: dict[str, Tensor] = {}

        def take_norm(name: str, gradient: Tensor) -> None:
            if name in norms:
                raise NotImplementedError(
                    f"Autograd delivered the gradient of parameter {name!r} in several parts, as "
                    "reentrant checkpointing does for a shared parameter, so its norm cannot be "
                    'taken without keeping it. Use engine="stream" or use_reentrant=False.'
                )
            norms[name] = multitensor.norm([gradient], gradient.device)

        with set_aside(self.parameters), self._each_gradient(take_norm):
            for microbatch in microbatches:
                state = RandomState.now(self._devices)
                loss, each = evaluate(loss_fn, microbatch)
                backward(loss, self.scaler)
                norm = unscale(multitensor.join(norms.values(), self.device), self.scaler)
                self.tally.add(microbatch, norm, loss.detach(), each)
                self._touched.update(norms)
                norms.clear()
                self._visits.append(_Visit(loss_fn, microbatch, state, loss.detach()))

    def finish(self) -> Gradients:
        """Second pass: add up what is now known to be each gradient's share."""
        coefficients = self.tally.coefficients()
        left_out = set(self.tally.leave_out())
        sums: Gradients = {}
        random_state, buffers = RandomState.now(self._devices), copies_of_buffers(self.model)
        put_back(self.model, self._buffers)
        try:
            with set_aside(self.parameters):
                for row, visit in enumerate(self._visits):
                    if row not in left_out:
                        self._revisit(visit, coefficients[row], sums)
        finally:
            # generators and buffers have already moved on once, in the first pass
            random_state.restore()
            put_back(self.model, buffers)
        for name in self._touched - set(sums):  # every micro-batch that reaches it was left out
            zero = torch.zeros_like(self.parameters[name])
            sums[name] = torch.view_as_real(zero) if zero.is_complex() else zero
        return sums

    def _revisit(self, visit: _Visit, coefficient: Tensor, sums: Gradients) -> None:
        def add(name: str, gradient: Tensor) -> None:
            if name not in sums:  # which keeps it, while autograd may give its memory to others
                gradient = gradient.clone()
            add_multiple(sums, {name: gradient}, coefficient)

        visit.random_state.restore()
        with self._each_gradient(add):
            loss, _ = evaluate(visit.loss_fn, visit.microbatch)
            _expect_same(visit.loss, loss.detach())
            backward(loss, self.scaler)

    @contextmanager
    def _each_gradient(self, receive: Callable[[str, Tensor], None]) -> Iterator[None]:
        """Hand every gradient over, inside the block, instead of keeping it in `.grad`."""

        def hook_for(name: str) -> Callable[[nn.Parameter], None]:
            @torch.no_grad()
            def hook(parameter: nn.Parameter) -> None:
                for gradient in take({name: parameter}).values():
                    receive(name, gradient)

            return hook

        handles = []
        try:
            for name, parameter in self.parameters.items():
                handle = parameter.register_post_accumulate_grad_hook(hook_for(name))  # type: ignore[no-untyped-call]
                handles.append(handle)
            yield
        finally:
            for handle in handles:
                handle.remove()


def copies_of_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return what forward passes may change: BatchNorm statistics and the like."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


@torch.no_grad()
def put_back(model: nn.Module, copies: dict[str, Tensor]) -> None:
    """Make the buffers what they were."""
    for name, buffer in model.named_buffers():
        if name in copies:
            buffer.copy_(copies[name])


def _expect_same(first: Tensor, second: Tensor) -> None:
    """Warn if a micro-batch's loss differs between passes; only where looking costs nothing."""
    if not multitensor.on_host(first) or torch.allclose(first, second, 1e-3, 1e-6, equal_nan=True):
        return
    warnings.warn(
        f"loss_fn gave {first.item():.6g} for a micro-batch and {second.item():.6g} when asked "
        "again, so its gradient is not the one whose norm was taken. Draw random numbers from "
        "torch only, inside loss_fn, or use a rule and engine that stream.",
        RuntimeWarning,
        stacklevel=4,
    )
