"""Functions that leave the examples where they are: what nearly every model mostly does.

The tracker would find the same, operation by operation; a look at the arguments takes less time.
Each entry says, of a function whose first argument has the examples along its first axis, whether
its results have them there, too. It may say no where it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from microclip.engines.fused.owners import Owned

if TYPE_CHECKING:
    from microclip.engines.fused.record import Recorder

Question = Callable[["Recorder", Owned, tuple[Any, ...], dict[str, Any]], bool]


def _always(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
    return True


def _two_other_axes(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
    """x.transpose(i, k)."""
    if kwargs or len(args) != 3 or not (type(args[1]) is type(args[2]) is int):
        return False
    dims = args[0].dim()
    return bool(args[1] % dims and args[2] % dims)


def _other_axis(place: int) -> Question:
    """Return the question whether the axis given at some place is another than the first."""

    def question(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
        if kwargs or len(args) <= place or type(args[place]) is not int:
            return False
        return bool(args[place] % args[0].dim())

    return question


def _images(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
    """Pooling of (examples, channels, height, width)."""
    return bool(args[0].dim() == 4)


def _same_owners(recorder: Recorder, state: Owned, other: Any, dims: int) -> bool:
    """Whether another tensor has the same examples along its first axis of as many."""
    if not isinstance(other, Tensor) or other.dim() != dims:
        return False
    found = recorder.tracker.state(other)
    return isinstance(found, Owned) and found.axis == 0 and found.owners is state.owners


def _sum(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
    """x + y, both of the same shape."""
    if kwargs or len(args) != 2 or not isinstance(args[1], Tensor):
        return False
    same = bool(args[0].shape == args[1].shape)
    return same and _same_owners(recorder, state, args[1], args[0].dim())


def _attention(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
    """Without a mask and without dropout."""
    if len(args) != 3 or args[0].dim() != 4 or not kwargs.keys() <= {"is_causal", "scale"}:
        return False
    return all(_same_owners(recorder, state, other, 4) for other in args[1:])


def _cross_entropy(recorder: Recorder, state: Owned, args: Any, kwargs: Any) -> bool:
    """One loss for each row, by targets of the same examples."""
    if len(args) != 2 or kwargs != {"reduction": "none"} or args[0].dim() < 2:
        return False
    return _same_owners(recorder, state, args[1], args[0].dim() - 1)


SHORTCUTS: dict[Any, Question] = {
    torch.Tensor.transpose: _two_other_axes,
    torch.transpose: _two_other_axes,
    torch.Tensor.unflatten: _other_axis(1),
    torch.Tensor.flatten: _other_axis(1),
    torch.flatten: _other_axis(1),
    torch.Tensor.chunk: _other_axis(2),
    torch.chunk: _other_axis(2),
    torch.Tensor.softmax: _other_axis(1),
    torch.Tensor.__add__: _sum,
    torch.add: _sum,
    F.scaled_dot_product_attention: _attention,
    F.cross_entropy: _cross_entropy,
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
