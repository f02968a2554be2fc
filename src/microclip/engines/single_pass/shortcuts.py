"""Functions that leave the examples where they are: most of what nearly every model does.

The tracker would find the same, operation by operation; checking the arguments is faster. Each
entry tells, for a function whose first argument has the examples along its first axis, whether its
results have them there, too. It says no when in doubt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from microclip.engines.single_pass.owners import Owned
from microclip.losses import token_losses

if TYPE_CHECKING:
    from microclip.engines.single_pass.recorder import Recorder

Check = Callable[["Recorder", Owned, tuple[Any, ...], dict[str, Any]], bool]


def _always(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
    return True


def _two_other_axes(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
    """x.transpose(i, k)."""
    if kwargs or len(args) != 3 or not (type(args[1]) is type(args[2]) is int):
        return False
    dims = args[0].dim()
    return bool(args[1] % dims and args[2] % dims)


def _other_axis(place: int) -> Check:
    """Return a check that the axis given as argument number `place` is not the first."""

    def check(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
        if kwargs or len(args) <= place or type(args[place]) is not int:
            return False
        return bool(args[place] % args[0].dim())

    return check


def _images(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
    """Pooling of (examples, channels, height, width)."""
    return bool(args[0].dim() == 4)


def _same_owners(recorder: Recorder, state: Owned, other: Any, dims: int) -> bool:
    """Whether another tensor with `dims` dimensions has the same examples along its first axis."""
    if not isinstance(other, Tensor) or other.dim() != dims:
        return False
    found = recorder.tracker.state(other)
    return isinstance(found, Owned) and found.axis == 0 and found.owners is state.owners


def _two(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
    """x + y and the like, both of the same shape, or x + 1."""
    if kwargs or len(args) != 2:
        return False
    if not isinstance(args[1], Tensor):
        return type(args[1]) in (int, float)
    same = bool(args[0].shape == args[1].shape)
    return same and _same_owners(recorder, state, args[1], args[0].dim())


def _matrices(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
    """A batch of matrices, transposed."""
    return bool(args[0].dim() > 2)


def _products(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
    """Batched products, with matrices of the same example."""
    dims = args[0].dim()
    if kwargs or len(args) != 2 or dims < 3:
        return False
    return _same_owners(recorder, state, args[1], dims) and len(args[0]) == len(args[1])


def _same_first_size(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
    """x.view(len(x), ...): elements keep their order, so each row stays where it is."""
    if kwargs or len(args) < 2:
        return False
    first = args[1][0] if isinstance(args[1], list | tuple) and args[1] else args[1]
    return type(first) is int and first == args[0].shape[0]


def _first_stays(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
    """x.permute(0, ...)."""
    if kwargs or len(args) < 2:
        return False
    first = args[1][0] if isinstance(args[1], list | tuple) and args[1] else args[1]
    return type(first) is int and first == 0


def _attention(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
    """Without a mask and without dropout."""
    if len(args) != 3 or args[0].dim() != 4 or not kwargs.keys() <= {"is_causal", "scale"}:
        return False
    return all(_same_owners(recorder, state, other, 4) for other in args[1:])


def _cross_entropy(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
    """One loss for each row, with targets of the same examples."""
    if len(args) != 2 or kwargs.get("reduction") != "none" or args[0].dim() < 2:
        return False
    if any(kwargs.get(name) is not None for name in ("weight", "size_average", "reduce")):
        return False
    return _same_owners(recorder, state, args[1], args[0].dim() - 1)


def _frozen_head(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
    """One loss for each row, with labels of the same examples and a head that is not trained."""
    if any(recorder.is_recorded(each) or recorder.depends(each) for each in (args[1], *args[3:])):
        return False
    return _same_owners(recorder, state, args[2], args[0].dim() - 1)


SHORTCUTS: dict[Any, Check] = {
    torch.Tensor.transpose: _two_other_axes,
    torch.transpose: _two_other_axes,
    torch.Tensor.unflatten: _other_axis(1),
    torch.Tensor.flatten: _other_axis(1),
    torch.flatten: _other_axis(1),
    torch.Tensor.chunk: _other_axis(2),
    torch.chunk: _other_axis(2),
    torch.Tensor.softmax: _other_axis(1),
    torch.Tensor.mean: _other_axis(1),
    torch.Tensor.sum: _other_axis(1),
    torch.Tensor.mT.__get__: _matrices,  # type: ignore[attr-defined]
    torch.Tensor.view: _same_first_size,
    torch.Tensor.reshape: _same_first_size,
    torch.Tensor.permute: _first_stays,
    torch.Tensor.contiguous: _always,
    torch.matmul: _products,
    torch.Tensor.matmul: _products,
    torch.Tensor.__matmul__: _products,
    F.scaled_dot_product_attention: _attention,
    F.cross_entropy: _cross_entropy,
    token_losses: _frozen_head,
    F.adaptive_avg_pool2d: _images,
    F.avg_pool2d: _images,
    F.max_pool2d: _images,
}
for _activation in (
    torch.relu, torch.tanh, torch.sigmoid, F.relu, F.gelu, F.silu, F.leaky_relu, F.elu, F.mish,
    F.hardswish, F.softplus, F.relu6, F.selu, F.logsigmoid, torch.Tensor.relu, torch.Tensor.tanh,
    torch.Tensor.sigmoid,
):  # fmt: skip
    SHORTCUTS[_activation] = _always
for _name in ("add", "sub", "mul", "div"):
    for _space in (torch, torch.Tensor):
        SHORTCUTS[getattr(_space, _name)] = _two
for _name in ("__add__", "__sub__", "__mul__", "__truediv__"):
    SHORTCUTS[getattr(torch.Tensor, _name)] = _two
