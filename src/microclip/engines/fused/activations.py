"""Activations after large linear layers: the gradient they pass back is written where it can stay.

A linear layer keeps what the backward pass brings it until norms are known. What an activation
brings would have to be copied for that, out of memory that the backward pass goes on with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from microclip.engines.fused.record import Handler, Recorder, apply
from microclip.engines.fused.workspace import Workspace

_aten = torch.ops.aten


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str, workspace: Workspace) -> Tensor:
        ctx.save_for_backward(x)
        ctx.approximate, ctx.workspace = approximate, workspace
        return F.gelu(x, approximate=approximate)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        out = ctx.workspace.empty(x.shape, x)
        _aten.gelu_backward.grad_input(d, x, approximate=ctx.approximate, grad_input=out)
        return out, None, None


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, workspace: Workspace) -> Tensor:
        y = F.relu(x)
        ctx.save_for_backward(y)
        ctx.workspace = workspace
        return y

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        out = ctx.workspace.empty(y.shape, y)
        _aten.threshold_backward.grad_input(d, y, 0, grad_input=out)
        return out, None


def gelu(recorder: Recorder, input: Tensor, approximate: str = "none") -> Tensor:
    """F.gelu."""
    if not _comes_from_linear_layer(recorder, input):
        return F.gelu(input, approximate=approximate)
    return apply(_Gelu, input, approximate, recorder.workspace)


def relu(recorder: Recorder, input: Tensor, inplace: bool = False) -> Tensor:
    """F.relu."""
    if inplace or not _comes_from_linear_layer(recorder, input):
        return F.relu(input, inplace)
    return apply(_Relu, input, recorder.workspace)


def _comes_from_linear_layer(recorder: Recorder, x: Tensor) -> bool:
    return x.requires_grad and recorder.workspace.holds(x.data_ptr()) and x.is_contiguous()


ACTIVATIONS: dict[Any, Handler] = {F.gelu: gelu, F.relu: relu, torch.relu: relu}
