"""The engine: record, differentiate once, ask the rule, add up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from microclip.engines.base import CannotFuseError, Engine
from microclip.engines.fused.anything import anything
from microclip.engines.fused.groups import Groups
from microclip.engines.fused.layers import HANDLERS
from microclip.engines.fused.record import Recorder
from microclip.engines.fused.uses import Formed, Rows, Use, squared_norms, sum_of
from microclip.engines.gradients import Gradients, add_multiple, set_aside
from microclip.engines.losses import LossFn, backward, call, unscale
from microclip.microbatches import Cuts, tensors_of


class Fused(Engine):
    """Visits all examples of a chunk at once."""

    name = "fused"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check(self.model, self.parameters)
        self._chunks: list[_Uses] = []

    def fold(self, loss_fn: LossFn, microbatches: Cuts, final: bool) -> None:
        """Differentiate the examples of all these micro-batches together."""
        groups = Groups([microbatch.size for microbatch in microbatches])
        batch = microbatches.whole
        examples = [leaf for _, leaf in tensors_of(batch)]
        recorder = Recorder(self.parameters, groups, examples, HANDLERS, anything)
        uses = _Uses(recorder)
        with set_aside(self.parameters):
            with recorder:
                losses = call(loss_fn, batch, groups.examples)
            if losses.shape != (groups.examples,):
                raise CannotFuseError(
                    "The single-pass engine needs one loss per example, but loss_fn gives their "
                    'mean. Return the losses themselves, as reduction="none" does.'
                )
            means = groups.sum(losses) / groups.sizes_like(losses)
            backward(means.sum(), self.scaler)
            uses.complete(self.parameters)
        norms = unscale(uses.norms(), self.scaler)
        each = torch.split(losses.detach(), groups.sizes)
        for row, microbatch in enumerate(microbatches):
            self.tally.add(microbatch, norms[row], means[row].detach(), each[row])
        self._chunks.append(uses)

    @torch.no_grad()
    def finish(self) -> Gradients:
        """Add up what is now known to be each gradient's share."""
        rows = self.tally.leave_out()
        coefficients = self.tally.coefficients()
        left_out = torch.zeros_like(coefficients, dtype=torch.bool)
        left_out[rows] = True
        one, sums = torch.ones_like(coefficients[0]), Gradients()
        start = 0
        for uses in self._chunks:
            stop = start + len(uses.groups)
            if rows:
                uses.leave_out(left_out[start:stop])
            add_multiple(sums, uses.weighted(coefficients[start:stop], self.parameters), one)
            start = stop
        return sums


class _Uses:
    """All that a backward pass delivered of a chunk; norms are taken as soon as they can be."""

    def __init__(self, recorder: Recorder) -> None:
        self.groups = recorder.groups
        self._expected = recorder.expected
        self._derived = recorder.derived
        self._of: dict[str, list[Use]] = {}
        self._squares: dict[str, Tensor] = {}
        recorder.on_use = self.add

    @torch.no_grad()
    def add(self, name: str, use: Use) -> None:
        """Take note of a use; with a parameter's last one its norms are known."""
        uses = self._of.setdefault(name, [])
        uses.append(use)
        if len(uses) == self._expected[name] and name not in self._derived:
            if len(uses) == 1 and isinstance(use, Rows) and use.forming_is_cheaper(self.groups):
                formed = Formed(use.form(self.groups))
                self._squares[name] = formed.squared_norms(self.groups)
                if formed.nbytes <= 2 * use.nbytes:  # else the rows are kept, and multiplied again
                    self._of[name] = [formed]
            else:
                self._squares[name] = squared_norms(uses, self.groups)

    @torch.no_grad()
    def complete(self, parameters: dict[str, nn.Parameter]) -> None:
        """Follow derived tensors back, and make sure that nothing went past the recorder."""
        for name, derived in self._derived.items():
            if name not in self._of:
                continue
            shape = (len(self.groups), *derived.value.shape)
            gradients = sum_of([use.form(self.groups).reshape(shape) for use in self._of.pop(name)])
            for origin, gradient in derived.pull_back(gradients).items():
                self._of.setdefault(origin, []).append(Formed(gradient))
                self._squares.pop(origin, None)
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                raise CannotFuseError(
                    f"Parameter {name!r} got a gradient in a way that the single-pass engine "
                    "cannot see, as reentrant checkpointing and custom functions have it."
                )
        for name in self._of.keys() - self._squares.keys():
            self._squares[name] = squared_norms(self._of[name], self.groups)

    def norms(self) -> Tensor:
        """Return the norm of every micro-batch's gradient over all parameters."""
        return sum_of(list(self._squares.values())).clamp(min=0).sqrt()

    def leave_out(self, left_out: Tensor) -> None:
        """Blank the micro-batches that are not to count."""
        for name, uses in self._of.items():
            self._of[name] = [use.without(self.groups, left_out) for use in uses]

    def weighted(self, coefficients: Tensor, parameters: dict[str, nn.Parameter]) -> Gradients:
        """Return sum_j coefficient_j g_j; complex gradients as pairs of real numbers."""
        found = {}
        for name, uses in self._of.items():
            shape = parameters[name].shape
            parts = [use.weighted(self.groups, coefficients).reshape(shape) for use in uses]
            total = sum_of(parts)
            found[name] = torch.view_as_real(total) if total.is_complex() else total
        return found


def _check(model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse what is known to go wrong, before any work is done."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise CannotFuseError(
                f"Module {name!r} is a {type(module).__name__} in training mode, which mixes "
                "examples; the single-pass engine would mix micro-batches. Use GroupNorm or "
                'LayerNorm, or engine="stream".'
            )
    for name, parameter in parameters.items():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CannotFuseError(
                f"Parameter {name!r} has a hook, which would not see the gradients of single "
                'micro-batches in a single pass. Remove it or use engine="stream".'
            )
