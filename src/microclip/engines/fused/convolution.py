"""Convolutions: the weight gradients of all micro-batches come out of one grouped convolution."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from microclip.engines.base import CannotFuseError
from microclip.engines.fused.record import Handler, Recorder, apply
from microclip.engines.fused.uses import Formed


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, bias: Any, *rest: Any
    ) -> Tensor:
        stride, padding, dilation, groups, note = rest
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight)
        ctx.options, ctx.note = (stride, padding, dilation, groups), note
        zeros = [0] * len(stride)
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, zeros, groups)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.options
        ctx.note(x, d)
        dx = None
        if ctx.needs_input_grad[1]:
            zeros = [0] * len(stride)
            mask = [True, False, False]
            dx = torch.ops.aten.convolution_backward(
                d, x, weight, None, stride, padding, dilation, False, zeros, groups, mask
            )[0]
        return (None, dx, *(None,) * 7)


def convolution(dimensions: int) -> Handler:
    """Return the handler of F.conv1d, F.conv2d or F.conv3d.

    A micro-batch's weight gradient is itself a convolution; all of them together are one with
    micro-batches as groups.
    """

    def many(value: Any) -> list[int]:
        return [value] * dimensions if isinstance(value, int) else list(value)

    def handler(
        recorder: Recorder,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        w, b = recorder.name(weight), recorder.name(bias)
        recorder.check(input, w or b)
        strides, dilations = many(stride), many(dilation)
        if isinstance(padding, str):
            spans = [(k - 1) * d for k, d in zip(weight.shape[2:], dilations, strict=True)]
            if padding == "same" and any(span % 2 for span in spans):
                raise CannotFuseError(f"Convolution {w!r} pads unevenly.")
            padding = [span // 2 if padding == "same" else 0 for span in spans]
        paddings = many(padding)
        if input.dim() != dimensions + 2 or input.shape[0] != recorder.groups.examples:
            raise CannotFuseError(
                f"Convolution {w or b!r} gets a tensor of shape {tuple(input.shape)}, not one "
                f"with {recorder.groups.examples} examples along its first dimension."
            )
        recorder.expect(w, b)

        def note(x: Tensor, d: Tensor) -> None:
            if b is not None:
                recorder.on_use(b, recorder.formed(d.flatten(2).sum(2)))
            if w is not None:
                recorder.on_use(w, Formed(form(x, d)))

        def form(x: Tensor, d: Tensor) -> Tensor:
            options = (strides, paddings, dilations, groups)
            return torch.cat(
                [
                    _weight_gradients(block.of(x, 1), block.of(d, 1), weight.shape, *options)
                    for block in recorder.groups
                ]
            )

        held = None if bias is None else bias.detach()
        return apply(
            _Convolution,
            recorder.anchor,
            input,
            weight.detach(),
            held,
            strides,
            paddings,
            dilations,
            groups,
            note,
        )

    return handler


def _weight_gradients(
    x: Tensor, d: Tensor, shape: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """Return (micro-batches, *weight shape) from (micro-batches, b, channels, ...).

    Micro-batches become groups of channels of one convolution, and its weight gradient holds
    theirs one after the other.
    """
    count, b, channels = x.shape[:3]
    wide_x = x.transpose(0, 1).reshape(b, count * channels, *x.shape[3:])
    wide_d = d.transpose(0, 1).reshape(b, count * d.shape[2], *d.shape[3:])
    weight = x.new_empty(count * shape[0], *shape[1:])
    zeros = [0] * len(stride)
    gradient = torch.ops.aten.convolution_backward(
        wide_d,
        wide_x,
        weight,
        None,
        stride,
        padding,
        dilation,
        False,
        zeros,
        groups * count,
        [False, True, False],
    )[1]
    return cast(Tensor, gradient).view(count, *shape)
