"""Parameters that meet every element: biases, scales, positions, class tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from microclip.engines.fused.formed import Formed
from microclip.engines.fused.record import Handler, Recorder, apply


class Broadcast(torch.autograd.Function):
    """An elementwise product or sum of a tensor with examples and a parameter without."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, parameter: Tensor, product: bool, note: Handler
    ) -> Tensor:
        """Return x * parameter or x + parameter."""
        ctx.save_for_backward(*((x, parameter) if product else ()))
        ctx.note, ctx.shape, ctx.dtype = note, x.shape, x.dtype
        return x * parameter if product else x + parameter

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        """Note what the parameter would have got, and pass the rest on."""
        x, parameter = ctx.saved_tensors or (None, None)
        ctx.note(d if x is None else d * x)
        dx = None
        if ctx.needs_input_grad[1]:
            dx = (d if parameter is None else d * parameter).sum_to_size(ctx.shape).to(ctx.dtype)
        return None, dx, None, None, None


def broadcast(product: bool, fallback: Any) -> Handler:
    """Return the handler of x + p or x * p."""

    def handler(recorder: Recorder, a: Any, b: Any, **options: Any) -> Any:
        parameter, x = (a, b) if isinstance(a, Tensor) and recorder.name(a) else (b, a)
        name = recorder.names[id(parameter)]
        if not recorder.follows(x):
            return recorder.derive(fallback, (a, b), options)
        shape = torch.broadcast_shapes(x.shape, parameter.shape)  # type: ignore[no-untyped-call]
        aligned = len(shape) > parameter.dim() or (parameter.dim() > 0 and parameter.shape[0] == 1)
        if options or x.shape[:1] != shape[:1] or not aligned or parameter.is_complex():
            return recorder.anything(recorder, fallback, (a, b), options)
        recorder.check(x, name)
        recorder.expect(name)
        goal = parameter.shape if parameter.dim() < len(shape) else parameter.shape[1:]
        note = note_sum(recorder, name, parameter.shape, goal)
        return apply(Broadcast, recorder.anchor, x, parameter.detach(), product, note)

    return handler


def note_sum(recorder: Recorder, name: str, shape: torch.Size, goal: Sequence[int]) -> Handler:
    """Return what notes a gradient that is added up over all dimensions that `goal` lacks."""
    arrange = recorder.arrangement

    def note(d: Tensor) -> None:
        d = arrange(d)
        d = d.sum_to_size(len(d), *(1,) * (d.dim() - 1 - len(goal)), *goal)
        each = recorder.formed(d.reshape(recorder.groups.examples, -1, *d.shape[1:])).gradients
        recorder.on_use(name, Formed(each.reshape(len(each), *shape)))

    return note


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, parameter: Tensor, shape: Any, note: Handler) -> Tensor:
        ctx.note = note
        return parameter.expand(shape).clone()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        ctx.note(d)
        return None, None, None, None


def expand(recorder: Recorder, parameter: Tensor, *sizes: Any) -> Any:
    """p.expand(B, ...): a class token, given to every example."""
    shape = list(sizes[0]) if sizes and not isinstance(sizes[0], int) else list(sizes)
    name = recorder.names[id(parameter)]
    new = parameter.dim() < len(shape)
    if shape[0] != recorder.groups.examples or not (new or parameter.shape[0] == 1):
        return recorder.derive(torch.Tensor.expand, (parameter, *sizes), {})
    recorder.expect(name)
    note = note_sum(recorder, name, parameter.shape, parameter.shape[0 if new else 1 :])
    return recorder.follow(apply(_Expand, recorder.anchor, parameter.detach(), shape, note))
