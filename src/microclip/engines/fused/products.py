"""Weights that multiply rows: linear layers in all their spellings, look-ups, attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from microclip import multitensor
from microclip.engines.base import CannotFuseError
from microclip.engines.fused import native
from microclip.engines.fused.plan import WRITING, WRITING_BESIDE_HALVES, Weight
from microclip.engines.fused.record import (
    Handler,
    Recorder,
    apply,
    without_dispatch,
)
from microclip.engines.fused.uses import Lines, Rows


class _Linear(torch.autograd.Function):
    """x W^T + bias."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        note: Handler,
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
        d = d.contiguous()  # once for all that is done with it
        ctx.note(x, d)
        dx = d @ weight if ctx.needs_input_grad[1] else None
        return None, dx, None, None, None


def linear(recorder: Recorder, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear; also what a tied head does with an embedding table."""
    return _product(recorder, input, weight, bias, transposed=False)


def addmm(recorder: Recorder, input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Tensor:
    """torch.addmm(bias, x, W): a linear layer whose weight lies on its side, as in GPT-2."""
    if options or not recorder.follows(mat1) or recorder.follows(input) or recorder.follows(mat2):
        name = recorder.name(input) or recorder.name(mat2) or recorder.name(mat1)
        raise CannotFuseError(f"The single-pass engine cannot take apart addmm() on {name!r}.")
    return _product(recorder, mat1, mat2, input, transposed=True)


def matmul(function: Any) -> Handler:
    """Return the handler of x @ W, a linear layer whose weight lies on its side."""

    def handler(recorder: Recorder, a: Any, b: Any, **options: Any) -> Any:
        if recorder.follows(a) and a.dim() > 1 and recorder.name(b) and b.dim() == 2:
            return _product(recorder, a, b, None, transposed=True)
        if recorder.follows(a) or recorder.follows(b):
            return recorder.anything(recorder, function, (a, b), options)
        return recorder.derive(function, (a, b), options)

    return handler


def _product(
    recorder: Recorder, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    w, b = recorder.name(weight), recorder.name(bias)
    if not recorder.follows(x) or (w is None and weight.requires_grad):
        raise CannotFuseError(f"Parameter {w or b!r} takes part in a product without examples.")
    recorder.check(x, w or b)
    recorder.expect(w, b)
    if w is not None:
        p, q = weight.shape if transposed else weight.shape[::-1]
        rows, added_up = math.prod(x.shape[:-1]), multitensor.accumulation_dtype(x)
        kept, each = rows * q * x.element_size(), rows // recorder.groups.examples
        short = each * recorder.groups.largest <= native.MOST_ROWS
        halved = short and native.knows(added_up, x.device)
        worth = WRITING_BESIDE_HALVES if halved else WRITING
        recorder.weights[w] = Weight(each, p, q, added_up.itemsize, kept, worth)
    arrange = recorder.arrangement

    def note(x: Tensor, d: Tensor) -> None:
        deltas = recorder.rows(arrange(d))
        if w is not None:
            recorder.on_use(w, Rows(recorder.rows(arrange(x)), deltas, transposed))
        if b is not None:
            recorder.on_use(b, recorder.formed(deltas))

    held = None if bias is None else bias.detach()
    seen = weight.detach().mT if transposed else weight.detach()
    if recorder.can_tap(x):
        return recorder.tap(F.linear(x, seen, held), note, x)
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
        deltas = recorder.rows(arrange(d))
        indices = arrange(input).reshape(deltas.shape[:2])
        if padding_idx is not None:
            deltas = deltas.masked_fill((indices == padding_idx % lines).unsqueeze(2), 0.0)
        recorder.on_use(name, Lines(indices, deltas, lines))

    return apply(_Embedding, recorder.anchor, input, weight.detach(), note)


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
