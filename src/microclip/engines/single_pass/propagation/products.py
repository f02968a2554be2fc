"""Products of matrices, where no parameter is taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from microclip.engines.single_pass.owners import Owned, State
from microclip.engines.single_pass.propagation.registry import (
    combined,
    mixed,
    rule,
    settled,
    unknown,
)
from microclip.engines.single_pass.tracker import Tracker


def _product(
    tracker: Tracker, func: Any, a: Tensor, b: Tensor, batched: bool, shape: Sequence[int]
) -> State | None:
    """The product of two matrices, or of two rows of matrices."""
    states = [tracker.state(a), tracker.state(b)]
    special, done = settled(tracker, func, states)
    if done:
        return special
    found: list[tuple[Tensor, State | None]] = []
    like = a.new_empty(()).expand(tuple(shape))
    for tensor, state, inner in ((a, states[0], a.dim() - 1), (b, states[1], max(0, b.dim() - 2))):
        if not isinstance(state, Owned):
            continue
        if state.axis is None:
            found.append((like, state))
            continue
        if state.axis == inner:
            return mixed(tracker, func)
        if batched and state.axis == 0:
            found.append((like, state))
        elif tensor is a and state.axis == a.dim() - 2:
            found.append((like, state.at(len(shape) - (2 if b.dim() > 1 else 1))))
        else:  # a column of the second
            found.append((like, state.at(len(shape) - 1)))
    return combined(tracker, func, found, shape)


@rule("mm", "mv", "_int_mm")
def mm(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Matrices."""
    return _product(tracker, func, args[0], args[1], False, result.shape)


@rule("bmm")
def bmm(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Rows of matrices."""
    return _product(tracker, func, args[0], args[1], True, result.shape)


@rule("_cdist_forward", "_euclidean_dist")
def distances(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Rows of one matrix with rows of another."""
    a, b = args[0], args[1]
    states = [tracker.state(a), tracker.state(b)]
    special, done = settled(tracker, func, states)
    if done:
        return special
    found: list[tuple[Tensor, State | None]] = []
    like = result.new_empty(()).expand(result.shape)
    for tensor, state, last in ((a, states[0], 2), (b, states[1], 1)):
        if isinstance(state, Owned) and state.axis is not None:
            place = state.axis - tensor.dim()
            if place == -1:
                return mixed(tracker, func)
            axis = result.dim() + (place if place < -2 else -last)
            if result.shape[axis] != tensor.shape[state.axis]:
                return mixed(tracker, func)
            state = state.at(axis)
        found.append((like, state))
    return combined(tracker, func, found, result.shape)


@rule("addmm", "addmv", "baddbmm", "_addmm_activation")
def addmm(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The same, with something added."""
    batched = args[1].dim() == 3
    product = _product(tracker, func, args[1], args[2], batched, result.shape)
    parts = [(args[0], tracker.state(args[0])), (result, product)]
    return combined(tracker, func, parts, result.shape)


@rule("linear")
def linear(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Where it is not taken apart: x with the rows of a matrix."""
    x, weight = args[0], args[1]
    bias = args[2] if len(args) > 2 else None
    states = [tracker.state(each) for each in (x, weight, bias) if each is not None]
    special, done = settled(tracker, func, states)
    if done:
        return special
    if any(state is not None for state in states[1:]):
        return mixed(tracker, func)
    state = states[0]
    assert isinstance(state, Owned)
    return mixed(tracker, func) if state.axis == x.dim() - 1 else state


@rule("_grouped_mm", "_scaled_grouped_mm")
def grouped_mm(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Rows that are multiplied with one of several matrices; offsets say with which."""
    states = [tracker.state(args[0]), tracker.state(args[1])]
    special, done = settled(tracker, func, states)
    if done:
        return special
    state = states[0]
    ragged = args[0].dim() == 2 and args[1].dim() == 3 and states[1] is None
    if ragged and isinstance(state, Owned) and state.axis == 0:
        return state
    return unknown(tracker, func, args, kwargs, result)
