"""Normalization layers: the gradients of their scale and shift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from microclip.engines.base import CannotFuseError
from microclip.engines.single_pass import native
from microclip.engines.single_pass.contributions import Materialized
from microclip.engines.single_pass.owners import refuse_unowned_gradients
from microclip.engines.single_pass.recorder import Recorder
from microclip.engines.single_pass.torch_functions import Handler, apply


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
    """F.layer_norm: scale and shift of normalized rows."""
    state = recorder.common_case(input, weight, bias)
    parameters = [each for each in (weight, bias) if each is not None]
    if state is None and (recorder.any_depends(parameters) or not recorder.depends(input)):
        plain = _plainly(recorder, F.layer_norm, input, list(normalized_shape), eps=eps)
        with recorder:
            return _scaled_and_shifted(plain, weight, bias)
    w, b = recorder.name(weight), recorder.name(bias)
    state = state or recorder.owned(input, w or b)
    if state.axis is None or state.axis >= input.dim() - len(normalized_shape):
        raise CannotFuseError(f"LayerNorm {w or b!r} normalizes over the examples.")
    recorder.expect(w, b)
    groups = recorder.groups
    owners = state.owners
    regular = owners.base is None and state.axis == 0 and owners.outer == 1
    is_plain = len(groups.blocks) == 1 and regular
    shape = list(normalized_shape)
    leading = input.dim() - len(shape)

    def note(x: Tensor, mean: Tensor, rstd: Tensor, d: Tensor) -> None:
        refuse_unowned_gradients(d, state.axis, owners, w or b)
        rows_of_each = mean.numel() // len(groups)
        if w and b and is_plain and native.adds_up(rows_of_each, x, mean, rstd, d):
            scales, shifts = native.layer_norm(x, mean, rstd, d, len(groups))
            recorder.on_contribution(w, Materialized(scales.view(-1, *shape)))
            recorder.on_contribution(b, Materialized(shifts.view(-1, *shape)))
            return

        def rows(tensor: Tensor) -> Tensor:
            width = math.prod(tensor.shape[leading:])
            return recorder.rows(tensor.reshape(*tensor.shape[:leading], width), state)

        if b is not None:
            recorder.on_contribution(
                b, Materialized(recorder.materialized(rows(d)).gradients.view(-1, *shape))
            )
        if w is not None:
            products = rows((x - mean).mul_(d))
            sums = groups.sum(torch.bmm(rows(rstd).mT.to(products.dtype), products))
            recorder.on_contribution(w, Materialized(sums.view(-1, *shape)))

    with recorder.untracked():
        scale, shift = (None if tensor is None else tensor.detach() for tensor in (weight, bias))
        if recorder.can_hook_output(input):
            out, mean, rstd = torch.native_layer_norm(input, shape, scale, shift, eps)
            result = recorder.hook_output(out, note, input, mean.detach(), rstd.detach())
        else:
            noted = recorder.final_only(note)
            result = apply(_LayerNorm, recorder.anchor, input, shape, scale, shift, eps, noted)
    return recorder.own(result, state)


def _plainly(recorder: Recorder, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Normalize without scale and shift."""
    if recorder.is_recorded(input):
        return cast(Tensor, recorder.derive(func, (input, *args), kwargs))
    return cast(Tensor, func(input, *args, **kwargs))


def _scaled_and_shifted(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x * weight + bias, of any kind of tensors; called inside the recorder."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


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
        """Treat all examples as one with many channels, so that the kernel adds nothing up."""
        x, weight, mean, rstd = ctx.saved_tensors
        examples, channels, places, groups = ctx.sizes
        one = (1, examples * channels, places)
        found = torch.ops.aten.native_group_norm_backward(
            d.contiguous().view(one),
            x.view(one),
            mean.view(1, -1),
            rstd.view(1, -1),
            None if weight is None else weight.expand(examples, channels).flatten(),
            *one,
            examples * groups,
            [ctx.needs_input_grad[1], True, True],
        )
        dx, scales, shifts = found
        ctx.note(scales.view(examples, channels), shifts.view(examples, channels))
        dx = dx.view_as(x) if ctx.needs_input_grad[1] else None
        return None, dx, None, None, None, None, None


def group_norm(
    recorder: Recorder,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.group_norm: scale and shift of normalized channels."""
    state = recorder.common_case(input, weight, bias)
    parameters = [each for each in (weight, bias) if each is not None]
    if state is None and (recorder.any_depends(parameters) or not recorder.depends(input)):
        plain = _plainly(recorder, F.group_norm, input, num_groups, eps=eps)
        with recorder:
            return _by_channel(plain, weight, bias)
    w, b = recorder.name(weight), recorder.name(bias)
    state = state or recorder.owned(input, w or b)
    if state.axis != 0:
        raise CannotFuseError(
            f"GroupNorm {w or b!r} gets a tensor whose first dimension is not that of the examples."
        )
    recorder.expect(w, b)

    def note(scales: Tensor, shifts: Tensor) -> None:
        refuse_unowned_gradients(shifts, 0, state.owners, w or b)
        if b is not None:
            recorder.on_contribution(b, recorder.materialized(recorder.rows(shifts, state)))
        if w is not None:
            recorder.on_contribution(w, recorder.materialized(recorder.rows(scales, state)))

    with recorder.untracked():
        held = [None if tensor is None else tensor.detach() for tensor in (weight, bias)]
        noted = recorder.final_only(note)
        result = apply(_GroupNorm, recorder.anchor, input, num_groups, *held, eps, noted)
    return recorder.own(result, state)


def rms_norm(
    recorder: Recorder,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """F.rms_norm: scale of normalized rows."""
    plain = _plainly(recorder, F.rms_norm, input, list(normalized_shape), eps=eps)
    with recorder:
        return _scaled_and_shifted(plain, weight, None)


def _by_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x with a scale and a shift for each channel; called inside the recorder."""
    shape = (-1, *(1,) * (x.dim() - 2))
    return _scaled_and_shifted(
        x,
        None if weight is None else weight.view(shape),
        None if bias is None else bias.view(shape),
    )


def instance_norm(
    recorder: Recorder,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.instance_norm: separate statistics for every example."""
    options = (running_mean, running_var, None, None, use_input_stats, momentum, eps)
    plain = _plainly(recorder, F.instance_norm, input, *options)
    with recorder:
        return _by_channel(plain, weight, bias)


def batch_norm(
    recorder: Recorder,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """F.batch_norm, which mixes examples except in evaluation mode."""
    if training and recorder.depends(input):
        raise CannotFuseError("BatchNorm in training mode mixes examples.")
    options = (running_mean, running_var, None, None, training, momentum, eps)
    plain = _plainly(recorder, F.batch_norm, input, *options)
    with recorder:
        return _by_channel(plain, weight, bias)


def torch_batch_norm(
    recorder: Recorder,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """torch.batch_norm: the same with its arguments in another order."""
    stats = (running_mean, running_var)
    return batch_norm(recorder, input, *stats, weight, bias, training, momentum, eps)
