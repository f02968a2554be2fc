"""Operations that reshape or move elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from microclip.engines.single_pass.owners import NO_OWNER, Owned, Owners, State
from microclip.engines.single_pass.propagation.registry import (
    by_elements,
    combined,
    label,
    mixed,
    named,
    owned_rule,
    rule,
    tensors_in,
    unknown,
)
from microclip.engines.single_pass.tracker import Tracker
from microclip.multitensor import widest


@owned_rule("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten")
def reshape(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """A new shape for the same elements in the same order."""
    x = args[0]
    if args[0].dtype != result.dtype:  # view(dtype)
        if x.element_size() != result.element_size() and state.axis == x.dim() - 1:
            return mixed(tracker, func)
        return state
    return reshaped(tracker, func, state, x.shape, result.shape)


def reshaped(
    tracker: Tracker, func: Any, state: Owned, old: Sequence[int], new: Sequence[int]
) -> State | None:
    """Return the state of a tensor after a change of its shape."""
    axis, owners = state.axis, state.owners
    assert axis is not None
    if old[: axis + 1] == new[: axis + 1]:
        return state
    length = owners.base_length
    before = math.prod(old[:axis]) * owners.outer
    after = math.prod(old[axis + 1 :]) * owners.inner
    if not (length and before and after):
        empty = next((i for i, size in enumerate(new) if size == 0), None)
        return None if empty is None else Owned(empty, Owners(owners.examples, base=_none()))
    passed = 1
    for index, size in enumerate(new):
        if before % passed == 0:
            outer = before // passed
            inner, rest = divmod(size, outer * length)
            if not rest and inner and inner * math.prod(new[index + 1 :]) == after:
                if index == axis and (outer, inner) == (owners.outer, owners.inner):
                    return state
                return Owned(index, Owners(owners.examples, outer, inner, owners.base))
        passed *= size
        if passed > before:
            break
    if owners.is_regular:
        return tracker.opaque(f"{label(func)}, which splits the batch into two dimensions,")
    return by_elements(tracker, func, state.elements(old, owners.vector().device).reshape(new))


def _none() -> Tensor:
    return torch.zeros(0, dtype=torch.long)


@owned_rule("permute")
def permute(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """Axes in another order."""
    dims = [dim % len(args[1]) for dim in args[1]]
    return state.at(dims.index(state.axis))


@owned_rule("transpose")
def transpose(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """Two axes that are swapped."""
    dims = args[0].dim()
    one, two = args[1] % dims, args[2] % dims
    if state.axis == one:
        return state.at(two)
    return state.at(one) if state.axis == two else state


@owned_rule("t")
def t(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """A transposed matrix."""
    return state.at(1 - state.axis) if args[0].dim() == 2 else state  # type: ignore[operator]


@owned_rule("unsqueeze")
def unsqueeze(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """One more axis."""
    dim = args[1] % result.dim()
    return state.at(state.axis + 1) if dim <= state.axis else state  # type: ignore[operator]


@owned_rule("squeeze")
def squeeze(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """Axes of size 1 removed."""
    x = args[0]
    dims = args[1] if len(args) > 1 else range(x.dim())
    dims = [dims] if isinstance(dims, int) else dims
    gone = {dim % x.dim() for dim in dims if x.shape[dim] == 1}
    if state.axis in gone:
        return Owned(None, state.owners)
    assert state.axis is not None
    return state.at(state.axis - sum(1 for dim in gone if dim < state.axis))


@owned_rule("expand")
def expand(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """Copies without memory."""
    return combined(tracker, func, [(args[0], state)], result.shape)


def _range_of(size: int, start: Any, stop: Any) -> tuple[int, int]:
    start = 0 if start is None else start
    stop = size if stop is None else stop
    start, stop = (value + size if value < 0 else value for value in (start, stop))
    return min(max(start, 0), size), min(max(stop, 0), size)


@owned_rule("slice")
def slice_(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """A range of an axis."""
    x = args[0]
    dim, start, stop, step = named(func, args, kwargs, "dim", "start", "end", "step")
    if dim % x.dim() != state.axis or x.shape == result.shape:
        return state
    tracker.by_place = True
    return _part(state, state.owners.sliced(*_range_of(x.shape[dim], start, stop), step))


def _part(state: Owned, owners: Owners) -> Owned:
    """Return the state of a part along the examples' axis, which may belong to a single one."""
    return Owned(state.axis, owners).alone


@owned_rule("select")
def select(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """One index of an axis."""
    x, dim, index = args[0], args[1] % args[0].dim(), args[2]
    assert state.axis is not None
    if dim != state.axis:
        return state.at(state.axis - 1) if dim < state.axis else state
    tracker.by_place = True
    return whole(tracker, state.owners.vector()[index % x.shape[dim]])


def whole(tracker: Tracker, owner: Tensor) -> Owned | None:
    """Return the state of a tensor that belongs to one example."""
    if int(owner) == NO_OWNER:
        return None
    return Owned(None, Owners(tracker.examples, base=owner.view(1)))


@owned_rule("unbind")
def unbind(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """Every index of an axis as a tensor."""
    dim = (args[1] if len(args) > 1 else 0) % args[0].dim()
    assert state.axis is not None
    if dim == state.axis:
        return [whole(tracker, owner) for owner in state.owners.vector()]
    kept = state.at(state.axis - 1) if dim < state.axis else state
    return [kept] * len(result)


@owned_rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk",
             "split_copy", "tensor_split", "unsafe_chunk")  # fmt: skip
def split(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """An axis split into parts."""
    (dim,) = named(func, args, kwargs, "dim")
    if dim % args[0].dim() != state.axis:
        return [state] * len(result)
    parts, start = [], 0
    for part in result:
        size = part.shape[dim]
        parts.append(_part(state, state.owners.sliced(start, start + size)))
        start += size
    return parts


def _reaches_out(tracker: Tracker, source: Tensor, view: Tensor) -> bool:
    """Whether a view shows memory outside the tensor it was made from."""
    with tracker.paused():
        count = source.untyped_storage().nbytes() // source.element_size() + 1
        places = torch.arange(count, device=source.device)
        shown, there = (
            places.as_strided(each.shape, each.stride(), each.storage_offset()).reshape(-1)
            for each in (view, source)
        )
        return not bool(torch.isin(shown, there).all())


@rule("any view")
def any_view(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """A view of any kind, by its place in memory."""
    state = tracker.state(args[0])
    if func is torch.ops.aten.as_strided.default and _reaches_out(tracker, args[0], result):
        base = args[0]._base
        known = tracker.state(base) if base is not None else None
        if state is None and known is None:
            return None
        return tracker.opaque("as_strided(), which reaches beyond its tensor,")
    if not isinstance(state, Owned) or state.axis is None:
        return state
    found = []
    memory = args[0].untyped_storage()._cdata
    for each in tensors_in(result):
        shares = each.untyped_storage()._cdata == memory
        if not shares or each.element_size() != args[0].element_size():
            return unknown(tracker, func, args, kwargs, result)
        found.append(tracker.through_memory(args[0], state, each))
    return found


@owned_rule("as_strided_")
def as_strided_(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """Strides changed in place, as pooling does for axes of size 1."""
    assert tracker.before is not None
    shape, stride, offset = tracker.before
    x = args[0]
    kept = shape == x.shape and offset == x.storage_offset()
    if kept and all(a == b or n == 1 for a, b, n in zip(stride, x.stride(), shape, strict=True)):
        return state
    return mixed(tracker, func)


@owned_rule("squeeze_")
def squeeze_(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """Axes of size 1 removed in place."""
    assert tracker.before is not None
    before = args[0].new_empty(()).expand(tracker.before[0])
    return squeeze.__wrapped__(tracker, func, (before, *args[1:]), kwargs, result, state)  # type: ignore[attr-defined]


@owned_rule("view_as_real")
def view_as_real(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """One more axis, at the end."""
    return state


@owned_rule("view_as_complex")
def view_as_complex(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """The last axis removed."""
    return mixed(tracker, func) if state.axis == result.dim() else state


def _moved(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """Operations that only move elements: apply them to the owners."""
    x = args[0]
    shadow = state.elements(x.shape, x.device)
    if "out" in kwargs:
        kwargs = {**kwargs, "out": shadow.new_empty(0)}  # and not the user's
    try:
        moved = func(shadow.contiguous(), *args[1:], **kwargs)
    except RuntimeError:  # not for integers
        moved = func(shadow.to(widest(x.device)), *args[1:], **kwargs)
    moved = moved[0] if isinstance(moved, tuple) else moved
    state_ = by_elements(tracker, func, moved.long())
    return (
        state_ if isinstance(result, Tensor) else [state_] + [None] * (len(tensors_in(result)) - 1)
    )


owned_rule("roll", "flip", "rot90", "take", "unfold_copy", "pixel_shuffle", "pixel_unshuffle",
            "channel_shuffle", "native_channel_shuffle", "diagonal_copy", "diag",
            "_pack_padded_sequence")(_moved)  # fmt: skip


@owned_rule("repeat_interleave")
def repeat_interleave(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """Row indices, each repeated as often as its row will be."""
    if result.dtype not in (torch.long, torch.int) or args[0].dim() != 1 or len(args) > 1:
        return unknown(tracker, func, args, kwargs, result)
    return Owned(0, state.owners.taken(result.long()))


@owned_rule("repeat")
def repeat(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """The tensor repeated along its axes."""
    x, repeats = args[0], args[1]
    assert state.axis is not None
    axis = state.axis + len(repeats) - x.dim()
    if not repeats[axis]:
        return Owned(axis, Owners(tracker.examples, base=_none()))
    return Owned(axis, state.owners.widened(repeats[axis], 1))


@owned_rule("constant_pad_nd")
def constant_pad(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """Constants around the tensor, which have no owner."""
    x, pad = args[0], args[1]
    assert state.axis is not None
    place = 2 * (x.dim() - 1 - state.axis)
    left, right = pad[place : place + 2] if place < len(pad) else (0, 0)
    if not (left or right):
        return state
    vector = torch.nn.functional.pad(state.owners.vector(), (left, right), value=NO_OWNER)
    return Owned(state.axis, Owners.of(vector, tracker.examples))


@owned_rule("_pad_packed_sequence")
def pad_packed(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """Packed rows unpacked to (time, examples, ...), in the order they were packed."""
    data, sizes, batch_first = args[:3]
    if state.axis != 0:
        return mixed(tracker, func)
    with tracker.paused():
        rows = (state.owners.vector(data.device) + 1).to(widest(data.device)).unsqueeze(1)
        padded = func(rows, sizes, batch_first, 0.0, args[4])[0]
        found = by_elements(tracker, func, padded.squeeze(2).long() - 1)
    return [found, None]
