"""The layers that have an algebra of their own: products of rows, look-ups, norms, biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from microclip.engines.fused.record import (
    CannotFuseError,
    Handler,
    Recorder,
    apply,
    without_dispatch,
)
from microclip.engines.fused.uses import Formed, Rows


class _Linear(torch.autograd.Function):
    """x W^T + bias."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, note: Handler
    ) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight)
        ctx.note = note
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.note(x, d)
        return None, d @ weight if ctx.needs_input_grad[1] else None, None, None, None


def linear(recorder: Recorder, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear; also what a tied head does with an embedding table."""
    return _product(recorder, input, weight, bias, transposed=False)


def addmm(recorder: Recorder, input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Tensor:
    """torch.addmm(bias, x, W): a linear layer whose weight lies on its side, as in GPT-2."""
    if options or not recorder.follows(mat1) or recorder.follows(input) or recorder.follows(mat2):
        name = recorder.name(input) or recorder.name(mat2) or recorder.name(mat1)
        raise CannotFuseError(f"The single-pass engine cannot take apart addmm() on {name!r}.")
    return _product(recorder, mat1, mat2, input, transposed=True)


def _product(
    recorder: Recorder, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    w, b = recorder.name(weight), recorder.name(bias)
    if not recorder.follows(x) or (w is None and weight.requires_grad):
        raise CannotFuseError(f"Parameter {w or b!r} takes part in a product without examples.")
    recorder.check(x, w or b)
    recorder.expect(w, b)
    arrange = recorder.arrangement

    def note(x: Tensor, d: Tensor) -> None:
        d = arrange(d)
        if w is not None:
            left, right = _rows(d), _rows(arrange(x))
            if transposed:
                left, right = right, left
            recorder.on_use(w, Rows(left, right, (left.shape[1], right.shape[1])))
        if b is not None:
            recorder.on_use(b, recorder.formed(_rows(d)))

    held = None if bias is None else bias.detach()
    seen = weight.detach().mT if transposed else weight.detach()
    return apply(_Linear, recorder.anchor, x, seen, held, note)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, indices: Tensor, weight: Tensor, note: Handler) -> Tensor:
        ctx.note = note
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        ctx.note(d)
        return None, None, None, None


def embedding(
    recorder: Recorder,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """F.embedding: a linear layer of one-hot rows."""
    name = recorder.names[id(weight)]
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise CannotFuseError(
            f"Embedding {name!r} uses max_norm, scale_grad_by_freq or sparse gradients."
        )
    expanded = input.dim() > 1 and input.shape[0] == recorder.groups.examples > 1
    if expanded and input.stride(0) == 0:
        recorder.follow(input)  # one line of positions or types, repeated for every example
    if not recorder.follows(input):  # the same lines for all examples
        return recorder.derive(F.embedding, (input, weight), {"padding_idx": padding_idx})
    recorder.check(input, name)
    recorder.expect(name)
    arrange, lines = recorder.arrangement, weight.shape[0]

    def note(d: Tensor) -> None:
        left, right = arrange(input).reshape(-1), _rows(arrange(d))
        if padding_idx is not None:
            right = right.masked_fill((left == padding_idx % lines).unsqueeze(1), 0.0)
        recorder.on_use(name, Rows(left, right, (lines, right.shape[1])))

    return apply(_Embedding, recorder.anchor, input, weight.detach(), note)


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
        ctx.note(lambda: (x - mean) * rstd, d)
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
    over = tuple(range(1, input.dim() - len(normalized_shape)))
    arrange = recorder.arrangement

    def note(normalised: Handler, d: Tensor) -> None:
        for name, values in ((w, lambda: normalised() * d), (b, lambda: d)):
            if name is not None:
                summed = arrange(values()).sum(over) if over else arrange(values())
                recorder.on_use(name, recorder.formed(summed))

    held = [None if tensor is None else tensor.detach() for tensor in (weight, bias)]
    return apply(_LayerNorm, recorder.anchor, input, list(normalized_shape), *held, eps, note)


class _Broadcast(torch.autograd.Function):
    """An elementwise product or sum of a tensor with examples and a parameter without."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, parameter: Tensor, product: bool, note: Handler
    ) -> Tensor:
        ctx.save_for_backward(*((x, parameter) if product else ()))
        ctx.note, ctx.shape, ctx.dtype = note, x.shape, x.dtype
        return x * parameter if product else x + parameter

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
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
        arrange = recorder.arrangement
        goal = parameter.shape if parameter.dim() < len(shape) else parameter.shape[1:]

        def note(d: Tensor) -> None:
            each = recorder.formed(arrange(d)).gradients
            each = each.sum_to_size(len(each), *(1,) * (each.dim() - 1 - len(goal)), *goal)
            recorder.on_use(name, Formed(each.reshape(len(each), *parameter.shape)))

        return apply(_Broadcast, recorder.anchor, x, parameter.detach(), product, note)

    return handler


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
    goal = parameter.shape if new else parameter.shape[1:]

    def note(d: Tensor) -> None:
        each = recorder.formed(d).gradients
        each = each.sum_to_size(len(each), *(1,) * (each.dim() - 1 - len(goal)), *goal)
        recorder.on_use(name, Formed(each.reshape(len(each), *parameter.shape)))

    return recorder.follow(apply(_Expand, recorder.anchor, parameter.detach(), shape, note))


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


def attention(recorder: Recorder, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """F.multi_head_attention_forward, inside of which the examples are the second dimension."""
    if query.dim() != 3:
        raise CannotFuseError("The single-pass engine needs attention to be given batches.")
    examples = recorder.groups.examples

    def arrangement(tensor: Tensor) -> Tensor:
        if tensor.dim() < 3:  # (positions x examples, features)
            tensor = tensor.view(-1, examples, *tensor.shape[1:])
        return tensor.transpose(0, 1)

    with recorder.arranged(arrangement), recorder:
        return without_dispatch(F.multi_head_attention_forward)(query, *args, **kwargs)


def batch_norm(recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
    """F.batch_norm, which mixes examples unless it is in evaluation mode."""
    if kwargs.get("training", args[5] if len(args) > 5 else False):
        raise CannotFuseError("BatchNorm in training mode mixes examples.")
    return recorder.anything(recorder, without_dispatch(F.batch_norm), args, kwargs)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


HANDLERS: dict[Any, Handler] = {
    F.linear: linear,
    torch.addmm: addmm,
    F.embedding: embedding,
    F.layer_norm: layer_norm,
    F.conv1d: convolution(1),
    F.conv2d: convolution(2),
    F.conv3d: convolution(3),
    F.multi_head_attention_forward: attention,
    torch.Tensor.expand: expand,
    F.batch_norm: batch_norm,
}
for _sum in (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__):
    HANDLERS[_sum] = broadcast(False, _sum)
for _scale in (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__):
    HANDLERS[_scale] = broadcast(True, _scale)
