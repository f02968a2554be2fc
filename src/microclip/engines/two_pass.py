"""The two-pass engine: norms first, without keeping a gradient; then one weighted backward each.

Scaling the loss of micro-batch j by w_j scales its gradient by w_j, so the second pass can add up
straight into `.grad`: no gradient buffer beside the ordinary one, and any rule will do, at the
price of a second forward and backward. The way for rules that need all norms first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from microclip import multitensor
from microclip.engines.gradients import Gradients, set_aside, take
from microclip.engines.losses import LossFn, evaluate
from microclip.engines.randomness import RandomState
from microclip.engines.stream import backward, scale_of
from microclip.engines.tally import Tally
from microclip.microbatches import Microbatch


@dataclass(frozen=True)
class _Visit:
    """What it takes to come back to a micro-batch."""

    loss_fn: LossFn
    microbatch: Microbatch
    random_state: RandomState
    loss: Tensor


class TwoPass:
    """Visits every micro-batch twice."""

    name = "two_pass"

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        tally: Tally,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._model = model
        self.parameters = parameters
        self._devices = {parameter.device for parameter in parameters.values()}
        self._tally = tally
        self._scaler = scaler
        self._visits: list[_Visit] = []
        self._squares = _Squares(parameters)
        self._buffers = _copies(model)

    def fold(self, loss_fn: LossFn, microbatches: Sequence[Microbatch], final: bool) -> None:
        """First pass: take the norms of these micro-batches, and remember how to come back."""
        with set_aside(list(self.parameters.values())), self._squares.watching():
            for microbatch in microbatches:
                state = RandomState.now(self._devices)
                loss, each = evaluate(loss_fn, microbatch)
                backward(loss, self._scaler)
                norm = self._squares.norm()
                if self._scaler is not None:
                    norm = norm / scale_of(self._scaler, norm)
                self._tally.add(microbatch, norm, loss.detach(), each)
                self._visits.append(_Visit(loss_fn, microbatch, state, loss.detach()))

    def finish(self) -> Gradients:
        """Second pass: back through every micro-batch with its coefficient on the loss."""
        coefficients = self._tally.coefficients()
        left_out = set(self._tally.leave_out())
        random_state, buffers = RandomState.now(self._devices), _copies(self._model)
        _put_back(self._model, self._buffers)
        try:
            with set_aside(list(self.parameters.values())):
                for row, visit in enumerate(self._visits):
                    if row in left_out:
                        continue
                    visit.random_state.restore()
                    loss, _ = evaluate(visit.loss_fn, visit.microbatch)
                    _expect_same(visit.loss, loss.detach())
                    backward(_weighted(loss, coefficients[row]), self._scaler)
                gradients = take(self.parameters)
        finally:
            # generators and buffers have already moved on once, in the first pass
            random_state.restore()
            _put_back(self._model, buffers)
        return self._completed(gradients, coefficients)

    @torch.no_grad()
    def _completed(self, gradients: Gradients, coefficients: Tensor) -> Gradients:
        """Make NaN reach every element, and zero the gradients that were only ever left out."""
        for index, (name, parameter) in enumerate(self.parameters.items()):
            if gradients[index] is None and name in self._squares.touched:
                zero = torch.zeros_like(parameter)
                gradients[index] = torch.view_as_real(zero) if zero.is_complex() else zero
        poison = torch.where(coefficients.isnan().any(), torch.nan, 1.0)
        if not multitensor.on_host(poison) or poison.isnan():
            multitensor.multiply_([g for g in gradients if g is not None], poison)
        return gradients


class _Squares:
    """The squared norms of gradients, each taken and dropped as soon as autograd has it."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self._norms: dict[str, Tensor] = {}
        self.touched: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have autograd hand over every gradient of the parameters inside the block."""
        handles = []
        try:
            for name, parameter in self.parameters.items():
                handle = parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
                handles.append(handle)
            yield
        finally:
            for handle in handles:
                handle.remove()

    def norm(self) -> Tensor:
        """Return the norm of all that came in since the last call."""
        norms, self._norms = self._norms, {}
        if not norms:
            device = next(iter(self.parameters.values())).device
            return torch.zeros((), device=device, dtype=multitensor.widest(device))
        return multitensor.join(norms.values())

    def _hook(self, name: str) -> Callable[[nn.Parameter], None]:
        def hook(parameter: nn.Parameter) -> None:
            if name in self._norms:
                raise NotImplementedError(
                    f"Autograd delivered the gradient of parameter {name!r} in several parts, as "
                    "reentrant checkpointing does for a shared parameter, so its norm cannot be "
                    'taken without keeping it. Use engine="stream" or use_reentrant=False.'
                )
            (gradient,) = take({name: parameter})
            if gradient is not None:
                self._norms[name] = multitensor.norm([gradient])
                self.touched.add(name)

        return hook


def _weighted(loss: Tensor, coefficient: Tensor) -> Tensor:
    dtype = multitensor.accumulation_dtype(loss)  # a coefficient in half precision would be coarse
    return loss.to(dtype) * coefficient.to(dtype)


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


@torch.no_grad()
def _put_back(model: nn.Module, copies: dict[str, Tensor]) -> None:
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
