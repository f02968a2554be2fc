"""Normalisation layers: a scale and a shift of what they normalise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from microclip.engines.base import CannotFuseError
from microclip.engines.fused import native
from microclip.engines.fused.elementwise import Broadcast, note_sum
from microclip.engines.fused.formed import Formed
from microclip.engines.fused.record import (
    Handler,
    Recorder,
    apply,
    as_it_is,
    without_dispatch,
)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x: Tensor,
        shape: list[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        note: Handler,
    ) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()
        out, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.shape, ctx.note = shape, note
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        ctx.note(x, mean, rstd, d)
        dx = None
        if ctx.needs_input_grad[1]:
            dx = torch.ops.aten.native_layer_norm_backward(
                d, x, ctx.shape, mean, rstd, weight, bias, [True, False, False]
            )[0]
        return None, dx, None, None, None, None, None


def layer_norm(
    recorder: Recorder,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.layer_norm: scale and shift of normalised rows."""
    w, b = recorder.name(weight), recorder.name(bias)
    recorder.check(input, w or b)
    recorder.expect(w, b)
    arrange, groups = recorder.arrangement, recorder.groups
    rows = (groups.examples, -1, *normalized_shape)
    is_plain = len(groups.blocks) == 1 and arrange is as_it_is

    def note(x: Tensor, mean: Tensor, rstd: Tensor, d: Tensor) -> None:
        rows_of_each = mean.numel() // len(groups)
        if w and b and is_plain and native.adds_up(rows_of_each, x, mean, rstd, d):
            scales, shifts = native.layer_norm(x, mean, rstd, d, len(groups))
            recorder.on_use(w, Formed(scales.view(-1, *normalized_shape)))
            recorder.on_use(b, Formed(shifts.view(-1, *normalized_shape)))
            return
        if b is not None:
            recorder.on_use(b, recorder.formed(arrange(d).reshape(rows)))
        if w is not None:
            products = arrange((x - mean).mul_(d)).reshape(*rows[:2], math.prod(normalized_shape))
            scales = arrange(rstd).reshape(rows[0], 1, -1).to(products.dtype)
            sums = groups.sum(torch.bmm(scales, products))
            recorder.on_use(w, Formed(sums.view(-1, *normalized_shape)))

    scale, shift = (None if tensor is None else tensor.detach() for tensor in (weight, bias))
    shape = list(normalized_shape)
    if recorder.can_tap(input):
        out, mean, rstd = torch.native_layer_norm(input, shape, scale, shift, eps)
        return recorder.tap(out, note, input, mean.detach(), rstd.detach())
    return apply(_LayerNorm, recorder.anchor, input, shape, scale, shift, eps, note)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x: Tensor,
        groups: int,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        note: Handler,
    ) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()
        x = x.contiguous()
        sizes = (x.shape[0], x.shape[1], math.prod(x.shape[2:]), groups)
        out, mean, rstd = torch.native_group_norm(x, weight, bias, *sizes, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.sizes, ctx.note = sizes, note
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        """All examples as one with that many times the channels: the kernel adds nothing up."""
        x, weight, mean, rstd = ctx.saved_tensors
        examples, channels, places, groups = ctx.sizes
        one = (1, examples * channels, places)
        found = torch.ops.aten.native_group_norm_backward(
            d.contiguous().view(one),
            x.view(one),
            mean.view(1, -1),
            rstd.view(1, -1),
            None if weight is None else weight.repeat(examples),
            *one,
            examples * groups,
            [ctx.needs_input_grad[1], True, True],
        )
        scales, shifts = (part.view(examples, channels) for part in found[1:])
        ctx.note(scales, shifts)
        dx = found[0].view_as(x) if ctx.needs_input_grad[1] else None
        return None, dx, None, None, None, None, None


def group_norm(
    recorder: Recorder,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.group_norm: scale and shift of normalised channels."""
    w, b = recorder.name(weight), recorder.name(bias)
    recorder.check(input, w or b)
    recorder.expect(w, b)

    def note(scales: Tensor, shifts: Tensor) -> None:
        if b is not None:
            recorder.on_use(b, recorder.formed(recorder.rows(shifts)))
        if w is not None:
            recorder.on_use(w, recorder.formed(recorder.rows(scales)))

    held = [None if tensor is None else tensor.detach() for tensor in (weight, bias)]
    return apply(_GroupNorm, recorder.anchor, input, num_groups, *held, eps, note)


def rms_norm(
    recorder: Recorder,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """F.rms_norm: scale of normalised rows."""
    normalised = F.rms_norm(input, list(normalized_shape), eps=eps)
    return _scale_and_shift(recorder, normalised, weight, None, normalized_shape)


def _scale_and_shift(
    recorder: Recorder, x: Tensor, weight: Tensor | None, bias: Tensor | None, goal: Sequence[int]
) -> Tensor:
    for parameter, product in ((weight, True), (bias, False)):
        name = recorder.name(parameter)
        if parameter is None:
            continue
        if name is None:
            x = x * parameter.view(goal) if product else x + parameter.view(goal)
            continue
        recorder.check(x, name)
        recorder.expect(name)
        note = note_sum(recorder, name, parameter.shape, goal)
        x = apply(Broadcast, recorder.anchor, x, parameter.detach().view(goal), product, note)
    return x


def batch_norm(recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
    """F.batch_norm, which mixes examples unless it is in evaluation mode."""
    if kwargs.get("training", args[5] if len(args) > 5 else False):
        raise CannotFuseError("BatchNorm in training mode mixes examples.")
    return recorder.anything(recorder, without_dispatch(F.batch_norm), args, kwargs)
