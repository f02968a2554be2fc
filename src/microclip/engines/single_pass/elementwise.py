"""Parameters that meet every element: biases, scales, positions, class tokens.

The function gets copies of them, one for each row of the examples, and autograd does the rest: the
gradient of a copy belongs to the row's owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from microclip.engines.base import CannotFuseError
from microclip.engines.single_pass.derived import copies_per_row
from microclip.engines.single_pass.owners import DERIVED, Opaque, Owned, Owners, State
from microclip.engines.single_pass.propagation import combined
from microclip.engines.single_pass.recorder import Recorder
from microclip.engines.single_pass.torch_functions import map_tensors, tensors_in

_OPERATORS = {
    "add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor", "lshift",
    "rshift", "eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "pos", "invert",
}  # fmt: skip
_OTHERS = {
    "multiply", "subtract", "divide", "true_divide", "floor_divide", "negative", "masked_fill",
    "where", "lerp", "addcmul", "addcdiv", "clamp", "clip", "softplus", "hardswish", "not_equal",
    "greater", "less", "greater_equal", "less_equal", "logaddexp", "polar", "complex",
}  # fmt: skip


@cache
def _pointwise_names() -> frozenset[str]:
    """Return the names of all elementwise operations."""
    found = set(_OTHERS)
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket) and any(
            torch.Tag.pointwise in getattr(packet, overload).tags
            for overload in packet.overloads()  # type: ignore[no-untyped-call]
        ):
            found.add(name.removesuffix("_"))
    return frozenset(found - {"max", "min", "equal", "clone"})


@cache
def is_pointwise(func: Any) -> bool:
    """Whether a function works elementwise on arguments that are broadcast to one shape."""
    name = getattr(func, "__name__", "")
    if name.startswith("__") and name.endswith("__"):
        bare = name.strip("_")
        return bare in _OPERATORS or (bare[:1] in "ri" and bare[1:] in _OPERATORS)
    if name in ("maximum", "minimum"):
        return True
    return name.removesuffix("_") in _pointwise_names()


@cache
def _is_in_place(func: Any) -> bool:
    name: str = getattr(func, "__name__", "")
    if name.startswith("__"):
        bare = name.strip("_")
        return bare not in _OPERATORS and bare[:1] == "i"
    return name.endswith("_")


def pointwise(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Any elementwise function."""
    if kwargs.get("out") is not None:
        raise CannotFuseError(
            f"The single-pass engine cannot follow {func.__name__}(out=...) with parameter "
            f"{recorder.first_name((args, kwargs))!r}."
        )
    tensors = tensors_in((args, kwargs))
    in_place = _is_in_place(func)
    shape = (
        tensors[0].shape
        if in_place
        else torch.broadcast_shapes(*[tensor.shape for tensor in tensors])  # type: ignore[no-untyped-call]
    )
    others = [tensor for tensor in tensors if not recorder.is_recorded(tensor)]
    if in_place and recorder.is_recorded(tensors[0]) and recorder.any_depends(others):
        return refuse_writing(recorder, func, tensors[0])
    if not recorder.any_depends(others) and not in_place:
        adopted = {id(each): recorder.adopt(each) for each in others if each.shape[:1] == shape[:1]}
        args, kwargs = map_tensors(lambda each: adopted.get(id(each), each), (list(args), kwargs))
        others = [adopted.get(id(each), each) for each in others]
    state = common_state(recorder, func, others, shape)
    if state is None:
        return recorder.derive(func, args, kwargs)
    mine = owned_or_refused(recorder, state, func, (args, kwargs))
    args, kwargs = with_copies(recorder, (list(args), kwargs), shape, mine)
    return func(*args, **kwargs)


def common_state(
    recorder: Recorder, func: Any, tensors: list[Tensor], shape: Sequence[int]
) -> State | None:
    """Return who owns what these tensors are broadcast to."""
    label = _Label(getattr(func, "__name__", str(func)))
    return combined(
        recorder.tracker, label, [(each, recorder.state(each)) for each in tensors], shape
    )


class _Label:
    """What a rule needs of a function for its messages."""

    def __init__(self, name: str) -> None:
        self._schema = self
        self.name = name


def owned_or_refused(recorder: Recorder, state: State | None, func: Any, arguments: Any) -> Owned:
    """Return a state that says who owns what, or refuse."""
    if isinstance(state, Opaque):
        raise CannotFuseError(
            "The single-pass engine cannot tell which example owns what: parameter "
            f"{recorder.first_name(arguments)!r} meets the result of {state.reason} in "
            f"{getattr(func, '__name__', func)}()."
        )
    assert isinstance(state, Owned)
    return state


def with_copies(recorder: Recorder, arguments: Any, shape: Sequence[int], state: Owned) -> Any:
    """Replace parameters by copies, one for each row."""

    def copies(tensor: Tensor) -> Tensor:
        if not recorder.is_recorded(tensor):
            return tensor
        name = recorder.name(tensor)
        assert name is not None
        return copies_per_row(recorder, tensor, name, shape, state)

    return map_tensors(copies, arguments)


def refuse_writing(recorder: Recorder, func: Any, target: Tensor) -> Any:
    """Refuse to write examples into a tensor made of parameters."""
    raise CannotFuseError(
        f"The single-pass engine cannot follow {getattr(func, '__name__', func)}(), which writes "
        f"examples into a tensor made of parameter {recorder.name(target)!r}, in place."
    )


def expand(recorder: Recorder, parameter: Tensor, *sizes: Any, **kwargs: Any) -> Any:
    """p.expand(B, ...): a class token for every example."""
    if kwargs:
        sizes = (kwargs["size"],)
    shape = list(sizes[0]) if sizes and not isinstance(sizes[0], int) else list(sizes)
    func = torch.Tensor.expand
    if not recorder.is_recorded(parameter):
        return func(parameter, *sizes)
    examples = recorder.groups.examples
    if recorder.adopts and examples > 1:
        for axis, size in enumerate(shape):
            place = axis - (len(shape) - parameter.dim())
            if size == examples and (place < 0 or parameter.shape[place] == 1):
                recorder.adopted = True
                state = Owned(axis, recorder.tracker.along_first.owners)
                full = [
                    parameter.shape[i - len(shape)] if size == -1 else size
                    for i, size in enumerate(shape)
                ]
                name = recorder.name(parameter)
                assert name is not None
                return copies_per_row(recorder, parameter, name, full, state).expand(full)
    return recorder.derive(func, (parameter, *sizes), {})


def expand_as(recorder: Recorder, tensor: Tensor, other: Tensor) -> Any:
    """p.expand_as(x)."""
    if not recorder.is_recorded(tensor):
        return recorder.derive(torch.Tensor.expand_as, (tensor, other), {})
    state = recorder.state(other)
    if not isinstance(state, Owned) or state.axis is None:
        return expand(recorder, tensor, *other.shape)
    name = recorder.name(tensor)
    assert name is not None
    return copies_per_row(recorder, tensor, name, other.shape, state).expand(other.shape)


def broadcast_to(recorder: Recorder, input: Tensor, size: Sequence[int]) -> Any:
    """torch.broadcast_to(p, size)."""
    return expand(recorder, input, *size)


def repeat(func: Any) -> Any:
    """Return the handler of p.repeat(B, ...) or p.tile(...)."""

    def handler(recorder: Recorder, parameter: Tensor, *sizes: Any, **kwargs: Any) -> Any:
        if kwargs:
            sizes = tuple(kwargs.values())
        repeats = list(sizes[0]) if sizes and not isinstance(sizes[0], int) else list(sizes)
        examples = recorder.groups.examples
        missing = len(repeats) - parameter.dim()
        if recorder.adopts and examples > 1 and examples in repeats and missing >= 0:
            axis = repeats.index(examples)
            recorder.adopted = True
            name = recorder.name(parameter)
            assert name is not None
            # (..., s, ...) as (..., B, s, ...), then merged into one axis again
            value = recorder.derive(
                torch.Tensor.reshape, (parameter, (1,) * missing + tuple(parameter.shape)), {}
            )
            value = recorder.derive(torch.Tensor.unsqueeze, (value, axis), {})
            sizes_ = list(value.shape)
            sizes_[axis] = examples
            state = Owned(axis, Owners(examples))
            inner = recorder.name(value)
            assert inner is not None
            copies = copies_per_row(recorder, value, inner, sizes_, state).expand(sizes_)
            rest = [*repeats[:axis], 1, *repeats[axis + 1 :]]
            return copies.flatten(axis, axis + 1).repeat(rest)
        return recorder.derive(func, (parameter, *sizes), {})

    return handler


def concatenation(func: Any) -> Any:
    """Return the handler of torch.cat or torch.stack, with parameters among the tensors."""

    def handler(
        recorder: Recorder, tensors: Any, dim: Any = 0, *, axis: Any = None, out: Any = None
    ) -> Any:
        if out is not None:
            raise CannotFuseError(f"The single-pass engine cannot follow {func.__name__}(out=...).")
        dim = dim if axis is None else axis
        tensors = list(tensors)
        others = [each for each in tensors if not recorder.is_recorded(each)]
        if not recorder.any_depends(others):
            return recorder.derive(func, (tensors, dim), {})
        place = dim % (tensors[0].dim() + (func is torch.stack))
        owned = next(each for each in others if recorder.depends(each))
        state = recorder.state(owned)
        if func is torch.cat and isinstance(state, Owned) and state.axis in (None, place):
            raise CannotFuseError(
                "The single-pass engine cannot follow cat(), which puts parameter "
                f"{recorder.first_name(tensors)!r} between examples."
            )
        mine = owned_or_refused(recorder, state, func, tensors)
        parts = [
            with_copies(recorder, each, each.shape, mine) if recorder.is_recorded(each) else each
            for each in tensors
        ]
        return func(parts, dim)

    return handler


def set_item(recorder: Recorder, target: Tensor, index: Any, value: Any) -> None:
    """x[index] = p, for instance at a mask."""
    write = torch.Tensor.__setitem__
    if not recorder.is_recorded(value):  # then the target is
        if recorder.is_recorded(target) and recorder.any_depends([value]):
            refuse_writing(recorder, write, target)
        recorder.derive(write, (target, index, value), {})
        return
    state = recorder.state(target)
    if state is None or state is DERIVED:
        recorder.derive(write, (target, index, value), {})
        return
    owned_or_refused(recorder, state, write, [value])
    chosen = target.detach()[index]
    if not chosen.numel():
        return
    mine = recorder.state(chosen)
    if mine is None:
        raise CannotFuseError(
            f"Parameter {recorder.name(value)!r} is written into rows that belong to no example."
        )
    mine = owned_or_refused(recorder, mine, write, [value])
    write(target, index, with_copies(recorder, value, chosen.shape, mine))


def masked_fill(recorder: Recorder, input: Tensor, mask: Tensor, value: Any = None) -> Tensor:
    """x.masked_fill(mask, p)."""
    return cast(Tensor, pointwise(recorder, torch.where, (mask, value, input), {}))


def masked_fill_(recorder: Recorder, input: Tensor, mask: Tensor, value: Any = None) -> Tensor:
    """x.masked_fill_(mask, p)."""
    set_item(recorder, input, mask.expand(input.shape), value)
    return input


def copy_(recorder: Recorder, target: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
    """x.copy_(p)."""
    set_item(recorder, target, ..., source)
    return target


def index_put_(
    recorder: Recorder, target: Tensor, indices: Any, values: Tensor, accumulate: bool = False
) -> Tensor:
    """x.index_put_(indices, p)."""
    if accumulate:
        raise CannotFuseError(
            "The single-pass engine cannot follow index_put_(accumulate=True) with parameter "
            f"{recorder.first_name([target, values])!r}."
        )
    set_item(recorder, target, tuple(indices), values)
    return target


def prelu(recorder: Recorder, input: Tensor, weight: Tensor) -> Tensor:
    """F.prelu: a slope for each channel."""
    slope = weight
    if input.dim() > 1 and weight.numel() > 1:
        slope = recorder.derive(
            torch.Tensor.view, (weight, (weight.numel(), *(1,) * (input.dim() - 2))), {}
        )
    product = pointwise(recorder, torch.mul, (input, slope), {})
    return torch.where(input > 0, input, product)
