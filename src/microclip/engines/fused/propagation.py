"""What each operation does to the owners of its inputs: one rule for a family of operations.

A rule gets the tracker, the operation, its arguments and its result, and returns the state of the
result, or a list with one for each. Integers that say *where* something goes (indices, lengths,
offsets) are taken for what they are, whoever made them: they are no part of a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from microclip.engines.fused.owners import (
    DERIVED,
    NOBODY,
    Opaque,
    Owned,
    Owners,
    State,
    from_elements,
)
from microclip.engines.fused.tracker import Rule, Tracker

aten = torch.ops.aten
_RULES: dict[str, Rule] = {}  # by the name of an operation


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Let a function be the rule of these operations, in all their overloads and in place."""

    def register(function: Rule) -> Rule:
        for name in names:
            _RULES[name] = function
        return function

    return register


@cache
def rule_for(func: Any) -> tuple[Rule, Callable[[Any, Any], list[Tensor]] | None]:
    """Return an operation's rule, and what it writes to if it changes anything in place."""
    name = func._schema.name.removeprefix("aten::")
    plain = name.removesuffix("_") if func._schema.is_mutable else name
    found = _RULES.get(name) or _RULES.get(plain)
    if found is None and func.namespace != "aten":
        found = _RULES.get(func._schema.name)
    if found is None and torch.Tag.pointwise in func.tags:
        found = pointwise
    if found is None and _is_view(func):
        found = any_view
    return found or unknown, _writes(func) if func._schema.is_mutable else None


def _is_view(func: Any) -> bool:
    return any(
        each.alias_info is not None and not each.alias_info.is_write
        for each in func._schema.arguments
    )


def _writes(func: Any) -> Callable[[Any, Any], list[Tensor]]:
    places = [
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def written(args: Any, kwargs: Any) -> list[Tensor]:
        found = [kwargs[name] if name in kwargs else args[i] for i, name in places]
        return [each for value in found for each in _tensors(value)]

    return written


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [each for each in value if isinstance(each, Tensor)]
    return []


def _named(func: Any, args: Any, kwargs: Any, *names: str) -> list[Any]:
    """Return some of an operation's arguments by their names in its schema."""
    found = {}
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in names:
            if argument.name in kwargs:
                found[argument.name] = kwargs[argument.name]
            elif index < len(args):
                found[argument.name] = args[index]
            else:
                found[argument.name] = argument.default_value
    return [found.get(name) for name in names]


def _special(
    tracker: Tracker, func: Any, states: Iterable[State | None]
) -> tuple[State | None, bool]:
    """Return the state of a result that needs no rule, and whether that is so.

    Nothing known, something opaque, parameters, or all of it one example's.
    """
    owned: list[Owned] = []
    derived = False
    for state in states:
        if state is None:
            continue
        if isinstance(state, Opaque):
            return state, True
        if isinstance(state, Owned):
            owned.append(state)
        else:
            derived = True
    if derived and torch.is_grad_enabled():
        if owned:
            return tracker.opaque(f"a parameter that meets examples unseen, in {_label(func)}"), True
        return DERIVED, True
    if not owned:
        return None, True
    first = owned[0]
    if all(each.axis is None for each in owned):
        example = first.example
        if all(each is first or each.example == example for each in owned):
            return first, True
        return _mixed(tracker, func), True
    return None, False


def _label(func: Any) -> str:
    return f"{func._schema.name.removeprefix('aten::')}()"


def _mixed(tracker: Tracker, func: Any) -> Opaque:
    return tracker.opaque(f"{_label(func)}, which mixes examples,")


def unknown(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Any operation that has no rule: its result is opaque if it depends on examples."""
    every = [t for value in (*args, *kwargs.values()) for t in _tensors(value)]
    state, done = _special(tracker, func, [tracker.state(tensor) for tensor in every])
    if done and not isinstance(state, Owned):
        return state
    return tracker.opaque(f"{_label(func)}, whose way with examples is not known,")


def constant(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Operations whose results have nothing of their inputs but shapes."""
    return None


for _name in (
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones "
    "new_empty new_full new_empty_strided zero arange bernoulli_ uniform normal exponential "
    "random log_normal cauchy geometric _local_scalar_dense equal is_same_size item sym_size"
).split():
    _RULES[_name] = constant


def combined(
    tracker: Tracker, func: Any, parts: Iterable[tuple[Tensor, State | None]], shape: Sequence[int]
) -> State | None:
    """Return the state of what is made element by element, with broadcasting."""
    dims = len(shape)
    axis: int | None = None
    owners: Owners | None = None
    last: Owned | None = None
    derived = False
    for tensor, state in parts:
        if state is None:
            continue
        if not isinstance(state, Owned):
            if isinstance(state, Opaque):
                return state
            derived = True
            continue
        here, those = state.axis, state.owners
        if here is not None:
            there = here + dims - tensor.dim()
            if tensor.shape[here] == shape[there]:
                here = there
            else:
                here = None  # its only row, given to all
        if owners is None:
            axis, owners, last = here, those, state
            continue
        if here == axis:
            if those is not owners:
                joint = owners.joined(those)
                if joint is None:
                    return _mixed(tracker, func)
                owners = joint
        elif here is None or axis is None:
            alone, others = (those, owners) if here is None else (owners, those)
            if alone.only is None or alone.only not in (NOBODY, others.only):
                return _mixed(tracker, func)
            axis, owners = (axis, owners) if here is None else (here, those)
        else:
            return _mixed(tracker, func)
    if derived and torch.is_grad_enabled():
        if owners is not None:
            return tracker.opaque(f"a parameter that meets examples unseen, in {_label(func)}")
        return DERIVED
    if owners is None or last is None:
        return None
    return last if last.axis == axis and last.owners is owners else Owned(axis, owners)


@rule(
    "_to_copy", "masked_fill", "bernoulli", "log_sigmoid_forward", "hardswish", "_prelu_kernel",
    "rrelu_with_noise", "softplus", "polar", "complex", "real", "imag", "isin", "bucketize",
    "_softmax_backward_data", "addcmul", "addcdiv", "lerp", "where", "copysign", "gelu", "silu",
    "fake_quantize_per_tensor_affine_cachemask", "_conj", "conj", "_neg_view", "resolve_conj",
    "resolve_neg", "fill", "nan_to_num", "floor_divide", "clamp", "gelu_backward", "poisson", "_fused_dropout",
)  # fmt: skip
def pointwise(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Operations that work element by element."""
    shape = result.shape if isinstance(result, Tensor) else _tensors(result)[0].shape
    parts = [
        (value, tracker.state(value))
        for value in ((*args, *kwargs.values()) if kwargs else args)
        if isinstance(value, Tensor)
    ]
    return combined(tracker, func, parts, shape)


@rule("copy")
def copy(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """What is written over a tensor takes its place."""
    source = args[1]
    state = combined(tracker, func, [(source, tracker.state(source))], args[0].shape)
    before = tracker.state(args[0])
    if isinstance(state, Owned) and isinstance(before, Owned):
        return _one_axis(state, before)
    return state


def _one_axis(state: Owned, before: Owned) -> Owned:
    """Return a state of one example's with the axis that it had, where that says the same."""
    if state.axis is None and before.owners.only == state.example:
        return before
    return state


@rule("detach", "alias", "clone", "contiguous", "lift_fresh", "native_dropout", "dropout",
      "alpha_dropout", "feature_dropout", "tril", "triu", "_unsafe_masked_index_put")  # fmt: skip
def same(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Operations whose result lies as their first input does."""
    return tracker.state(args[0])


def _of_first(body: Rule) -> Rule:
    """Let a rule be asked only where the first argument is owned along some axis."""

    @wraps(body)
    def checked(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        state = tracker.state(args[0])
        if not isinstance(state, Owned) or state.axis is None:
            return state
        return body(tracker, func, args, kwargs, result, state)

    return checked


def _registered(*names: str) -> Callable[[Rule], Rule]:
    def register(body: Rule) -> Rule:
        return rule(*names)(_of_first(body))

    return register


@_registered("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten")
def reshape(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """A new shape for the same elements in the same order."""
    x = args[0]
    if args[0].dtype != result.dtype:  # view(dtype)
        if x.element_size() != result.element_size() and state.axis == x.dim() - 1:
            return _mixed(tracker, func)
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
        return tracker.opaque(f"{_label(func)}, which cuts the batch in two dimensions,")
    return _by_elements(tracker, func, state.elements(old, owners.vector().device).reshape(new))


def _none() -> Tensor:
    return torch.zeros(0, dtype=torch.long)


def _by_elements(tracker: Tracker, func: Any, elements: Tensor) -> State | None:
    found = from_elements(elements, tracker.examples)
    if found is False:
        return tracker.opaque(f"{_label(func)}, which leaves examples along no one dimension,")
    return found or None


@_registered("permute")
def permute(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """Axes in another order."""
    dims = [dim % len(args[1]) for dim in args[1]]
    return state.at(dims.index(state.axis))  # type: ignore[arg-type]


@_registered("transpose")
def transpose(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """Two axes that change places."""
    dims = args[0].dim()
    one, two = args[1] % dims, args[2] % dims
    if state.axis == one:
        return state.at(two)
    return state.at(one) if state.axis == two else state


@_registered("t")
def t(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """A matrix on its side."""
    return state.at(1 - state.axis) if args[0].dim() == 2 else state  # type: ignore[operator]


@_registered("unsqueeze")
def unsqueeze(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """One more axis."""
    dim = args[1] % result.dim()
    return state.at(state.axis + 1) if dim <= state.axis else state  # type: ignore[operator]


@_registered("squeeze")
def squeeze(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """Axes of one index less."""
    x = args[0]
    dims = args[1] if len(args) > 1 else range(x.dim())
    dims = [dims] if isinstance(dims, int) else dims
    gone = {dim % x.dim() for dim in dims if x.shape[dim] == 1}
    if state.axis in gone:
        return Owned(None, state.owners)
    assert state.axis is not None
    return state.at(state.axis - sum(1 for dim in gone if dim < state.axis))


@_registered("expand")
def expand(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """Copies without memory."""
    return combined(tracker, func, [(args[0], state)], result.shape)


def _range_of(size: int, start: Any, stop: Any) -> tuple[int, int]:
    start = 0 if start is None else start
    stop = size if stop is None else stop
    start, stop = (value + size if value < 0 else value for value in (start, stop))
    return min(max(start, 0), size), min(max(stop, 0), size)


@_registered("slice")
def slice_(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """A range of an axis."""
    x = args[0]
    dim, start, stop, step = _named(func, args, kwargs, "dim", "start", "end", "step")
    if dim % x.dim() != state.axis or x.shape == result.shape:
        return state
    tracker.by_place = True
    return _part(state, state.owners.sliced(*_range_of(x.shape[dim], start, stop), step))


def _part(state: Owned, owners: Owners) -> Owned:
    """Return the state of a part along the examples' axis; it may be of a single one."""
    return Owned(None if owners.only is not None else state.axis, owners)


@_registered("select")
def select(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """One index of an axis."""
    x, dim, index = args[0], args[1] % args[0].dim(), args[2]
    assert state.axis is not None
    if dim != state.axis:
        return state.at(state.axis - 1) if dim < state.axis else state
    tracker.by_place = True
    return _whole(tracker, state.owners.vector()[index % x.shape[dim]])


def _whole(tracker: Tracker, owner: Tensor) -> Owned | None:
    if int(owner) == NOBODY:
        return None
    return Owned(None, Owners(tracker.examples, base=owner.view(1)))


@_registered("unbind")
def unbind(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """All indices of an axis, one by one."""
    dim = (args[1] if len(args) > 1 else 0) % args[0].dim()
    assert state.axis is not None
    if dim == state.axis:
        return [_whole(tracker, owner) for owner in state.owners.vector()]
    kept = state.at(state.axis - 1) if dim < state.axis else state
    return [kept] * len(result)


@_registered("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk",
             "split_copy", "tensor_split", "unsafe_chunk")  # fmt: skip
def split(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """An axis in parts."""
    (dim,) = _named(func, args, kwargs, "dim")
    if dim % args[0].dim() != state.axis:
        return [state] * len(result)
    parts, start = [], 0
    for part in result:
        size = part.shape[dim]
        parts.append(_part(state, state.owners.sliced(start, start + size)))
        start += size
    return parts


def any_view(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """A view of any kind, by where it lies in memory."""
    state = tracker.state(args[0])
    if not isinstance(state, Owned) or state.axis is None:
        return state
    found = []
    for each in _tensors(result if not isinstance(result, Tensor) else [result]):
        if each.element_size() != args[0].element_size():
            return tracker.opaque(f"{_label(func)}")
        found.append(tracker.through_memory(args[0], state, each))
    return found


@_registered("as_strided_")
def as_strided_(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """Other strides for a tensor itself, as pooling has them; its shape was looked at before."""
    return state if tracker.shape_before == args[0].shape else _mixed(tracker, func)


@_registered("squeeze_")
def squeeze_(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """Axes of one index less, of the tensor itself."""
    before = args[0].new_empty(()).expand(tracker.shape_before or ())
    return squeeze.__wrapped__(tracker, func, (before, *args[1:]), kwargs, result, state)  # type: ignore[attr-defined]


@_registered("view_as_real")
def view_as_real(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """One more axis, at the end."""
    return state


@_registered("view_as_complex")
def view_as_complex(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """The last axis less."""
    return _mixed(tracker, func) if state.axis == result.dim() else state


def _moved(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """Operations that only move elements: they move their owners alike."""
    x = args[0]
    shadow = state.elements(x.shape, x.device)
    try:
        moved = func(shadow.contiguous(), *args[1:], **kwargs)
    except RuntimeError:  # not for integers
        moved = func(shadow.double(), *args[1:], **kwargs)
    moved = moved[0] if isinstance(moved, tuple) else moved
    state_ = _by_elements(tracker, func, moved.long())
    return state_ if isinstance(result, Tensor) else [state_] + [None] * (len(_tensors(result)) - 1)


_registered("roll", "flip", "rot90", "take", "unfold_copy", "pixel_shuffle", "pixel_unshuffle",
            "channel_shuffle", "native_channel_shuffle", "diagonal_copy", "diag", "repeat_interleave",
            "_pack_padded_sequence")(_moved)  # fmt: skip


@_registered("repeat")
def repeat(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """The tensor several times along its axes."""
    x, repeats = args[0], args[1]
    assert state.axis is not None
    axis = state.axis + len(repeats) - x.dim()
    return Owned(axis, state.owners.widened(repeats[axis], 1))


@_registered("constant_pad_nd")
def constant_pad(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """Constants around the tensor: they belong to nobody."""
    x, pad = args[0], args[1]
    assert state.axis is not None
    place = 2 * (x.dim() - 1 - state.axis)
    left, right = pad[place : place + 2] if place < len(pad) else (0, 0)
    if not (left or right):
        return state
    vector = torch.nn.functional.pad(state.owners.vector(), (left, right), value=NOBODY)
    return Owned(state.axis, Owners.of(vector, tracker.examples))


def _dims(dims: Any, count: int) -> set[int]:
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return set(range(count))
    return {dim % count for dim in ([dims] if isinstance(dims, int) else dims)} if count else set()


def _reduction(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """Axes that are reduced to one number."""
    dims, keep = _named(func, args, kwargs, "dim", "keepdim")
    gone = _dims(dims, args[0].dim())
    if state.axis in gone:
        return _mixed(tracker, func)
    assert state.axis is not None
    return state if keep else state.at(state.axis - sum(1 for dim in gone if dim < state.axis))


_registered(
    "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "prod", "var",
    "std", "var_mean", "std_mean", "logsumexp", "norm", "linalg_vector_norm", "median", "nanmedian",
    "mode", "kthvalue", "nansum", "nanmean", "aminmax", "count_nonzero", "linalg__powsum",
)(_reduction)  # fmt: skip


def _max_or_min(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    if len(args) > 1 and isinstance(args[1], Tensor):
        return pointwise(tracker, func, args, kwargs, result)
    return _of_first(_reduction)(tracker, func, args, kwargs, result)


_RULES["max"] = _RULES["min"] = _max_or_min


def _along(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """Operations that keep the shape and look along one axis, or change its length."""
    (dim,) = _named(func, args, kwargs, "dim")
    if dim % args[0].dim() == state.axis:
        return _mixed(tracker, func)
    return state


_registered(
    "_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax", "cumsum", "cumprod",
    "cummax", "cummin", "_cummax_helper", "logcumsumexp", "sort", "argsort", "topk", "glu",
    "diff", "renorm", "unfold_backward", "masked_softmax", "_masked_softmax",
)(_along)  # fmt: skip


def _product(
    tracker: Tracker, func: Any, a: Tensor, b: Tensor, batched: bool, shape: Sequence[int]
) -> State | None:
    """The product of two matrices, or of two rows of matrices."""
    states = [tracker.state(a), tracker.state(b)]
    special, done = _special(tracker, func, states)
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
            return _mixed(tracker, func)
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
    special, done = _special(tracker, func, states)
    if done:
        return special
    found: list[tuple[Tensor, State | None]] = []
    like = result.new_empty(()).expand(result.shape)
    for tensor, state, last in ((a, states[0], 2), (b, states[1], 1)):
        if isinstance(state, Owned) and state.axis is not None:
            place = state.axis - tensor.dim()
            if place == -1:
                return _mixed(tracker, func)
            state = state.at(result.dim() + (place if place < -2 else -last))
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
    special, done = _special(tracker, func, states)
    if done:
        return special
    if any(state is not None for state in states[1:]):
        return _mixed(tracker, func)
    state = states[0]
    assert isinstance(state, Owned)
    return _mixed(tracker, func) if state.axis == x.dim() - 1 else state


@rule("_grouped_mm", "_scaled_grouped_mm")
def grouped_mm(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Rows that are multiplied with one of several matrices; offsets say with which."""
    states = [tracker.state(args[0]), tracker.state(args[1])]
    special, done = _special(tracker, func, states)
    if done:
        return special
    state = states[0]
    ragged = args[0].dim() == 2 and args[1].dim() == 3 and states[1] is None
    if ragged and isinstance(state, Owned) and state.axis == 0:
        return state
    return unknown(tracker, func, args, kwargs, result)


def _leading(spatial: int | None) -> Rule:
    """Operations on (..., places): those before the places do not meet, inputs go side by side."""

    def check(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        tensors = [t for value in (*args, *kwargs.values()) for t in _tensors(value)]
        states = [tracker.state(tensor) for tensor in tensors]
        special, done = _special(tracker, func, states)
        if done:
            return special
        dims = args[0].dim()
        axis: int | None = None
        owners: Owners | None = None
        for tensor, state in zip(tensors, states, strict=True):
            if not isinstance(state, Owned):
                continue
            limit = 1 if spatial is None else max(1, dims - spatial)
            if state.axis is None or state.axis >= limit or tensor.dim() <= state.axis:
                return _mixed(tracker, func)
            if axis not in (None, state.axis):
                return _mixed(tracker, func)
            axis = state.axis
            owners = state.owners if owners is None else owners.joined(state.owners)
            if owners is None:
                return _mixed(tracker, func)
        assert owners is not None
        return Owned(axis, owners)

    return check


for _name, _spatial in (
    ("avg_pool1d", 1), ("avg_pool2d", 2), ("avg_pool3d", 3), ("max_pool1d", 1), ("max_pool2d", 2),
    ("max_pool3d", 3), ("max_pool1d_with_indices", 1), ("max_pool2d_with_indices", 2),
    ("max_pool3d_with_indices", 3), ("adaptive_avg_pool1d", 1), ("_adaptive_avg_pool2d", 2),
    ("_adaptive_avg_pool3d", 3), ("adaptive_max_pool1d", 1), ("adaptive_max_pool2d", 2),
    ("adaptive_max_pool3d", 3), ("fractional_max_pool2d", 2), ("fractional_max_pool3d", 3),
    ("max_unpool2d", 2), ("max_unpool3d", 3), ("mkldnn_max_pool2d", 2), ("mkldnn_max_pool3d", 3),
    ("upsample_nearest1d", 1), ("upsample_nearest2d", 2), ("upsample_nearest3d", 3),
    ("_upsample_nearest_exact1d", 1), ("_upsample_nearest_exact2d", 2),
    ("_upsample_nearest_exact3d", 3), ("upsample_linear1d", 1), ("upsample_bilinear2d", 2),
    ("upsample_bicubic2d", 2), ("upsample_trilinear3d", 3), ("_upsample_bilinear2d_aa", 2),
    ("_upsample_bicubic2d_aa", 2), ("reflection_pad1d", 1), ("reflection_pad2d", 2),
    ("reflection_pad3d", 3), ("replication_pad1d", 1), ("replication_pad2d", 2),
    ("replication_pad3d", 3), ("grid_sampler_2d", None), ("grid_sampler_3d", None),
    ("affine_grid_generator", None), ("im2col", None), ("col2im", None), ("multinomial", 1),
    ("linalg_inv_ex", 2), ("_linalg_det", 2), ("_linalg_slogdet", 2), ("linalg_cholesky_ex", 2),
    ("linalg_qr", 2), ("_linalg_svd", 2), ("_linalg_eigh", 2), ("linalg_eigh", 2),
    ("linalg_matrix_exp", 2), ("_linalg_solve_ex", 2), ("linalg_solve_triangular", 2),
    ("cholesky_solve", 2), ("linalg_lu_factor_ex", 2), ("_trilinear", None), ("bilinear", None),
):  # fmt: skip
    _RULES[_name] = _leading(_spatial)


@rule("convolution", "_convolution", "mkldnn_convolution", "conv2d", "conv1d", "conv3d")
def convolution(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """A window that runs over each example by itself."""
    states = [tracker.state(each) for each in args[:3] if isinstance(each, Tensor)]
    special, done = _special(tracker, func, states)
    if done:
        return special
    state = states[0]
    if all(each is None for each in states[1:]) and isinstance(state, Owned) and state.axis == 0:
        return state
    return _mixed(tracker, func)


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def layer_norm(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Rows that are normalised."""
    states = [tracker.state(each) for each in (args[0], *args[2:4]) if isinstance(each, Tensor)]
    special, done = _special(tracker, func, states)
    if done:
        return special
    state = states[0]
    rows = args[0].dim() - len(args[1])
    if any(states[1:]) or not isinstance(state, Owned) or state.axis is None or state.axis >= rows:
        return _mixed(tracker, func)
    return state


@rule("native_group_norm")
def group_norm(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Channels of each example."""
    return convolution(tracker, func, args, kwargs, result)


@rule("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm",
      "_native_batch_norm_legit_no_training", "_batch_norm_no_update", "batch_norm",
      "_batch_norm_impl_index")  # fmt: skip
def batch_norm(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Statistics over everything but the channels, unless they are given."""
    states = [tracker.state(each) for each in args[:5] if isinstance(each, Tensor)]
    special, done = _special(tracker, func, states)
    if done:
        return special
    state = states[0]
    if any(states[1:]) or not isinstance(state, Owned):
        return _mixed(tracker, func)
    count = len(_tensors(result))
    if state.axis == 1:  # channels of their own for every example, as in instance norm
        return [state, *[state.at(0)] * (count - 1)]
    training = _named(func, args, kwargs, "training")[0]
    given = "no_training" in func._schema.name or "no_update" in func._schema.name
    if given or (training is False and "with_update" not in func._schema.name):
        return [state, *[None] * (count - 1)]
    return tracker.opaque("BatchNorm in training mode, which mixes examples,")


@rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
      "_scaled_dot_product_efficient_attention", "_scaled_dot_product_attention_math",
      "_scaled_dot_product_fused_attention_overrideable", "scaled_dot_product_attention",
      "_scaled_dot_product_cudnn_attention",
      "_scaled_dot_product_attention_math_for_mps")  # fmt: skip
def attention(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Queries, keys and values of each example and head."""
    mask = _named(func, args, kwargs, "attn_mask")[0]
    if mask is None:
        mask = _named(func, args, kwargs, "attn_bias")[0]
    tensors = [*args[:3], *([mask] if isinstance(mask, Tensor) else [])]
    states = [tracker.state(tensor) for tensor in tensors]
    special, done = _special(tracker, func, states)
    if done:
        return special
    shape = (*args[0].shape[:-2], 1, 1)
    for tensor, state in zip(tensors, states, strict=True):
        if not isinstance(state, Owned) or state.axis is None:
            continue
        place = state.axis + len(shape) - tensor.dim()  # heads may be fewer than the queries'
        if not 0 <= place < len(shape) - 2 or tensor.shape[state.axis] != shape[place]:
            return _mixed(tracker, func)
    return combined(tracker, func, zip(tensors, states, strict=True), shape)


@rule("embedding")
def embedding(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Lines of a table."""
    table, indices = args[:2]
    rows, chosen = tracker.state(table), tracker.state(indices)
    special, done = _special(tracker, func, [rows])
    if rows is None or (done and rows is DERIVED):
        return (special or chosen) if not isinstance(chosen, Opaque) else (special or chosen)
    return index(tracker, func, (table, [indices]), {}, result)


def _masks_as_numbers(indices: Sequence[Tensor | None], dims: int) -> list[Tensor | None]:
    """Return indices with one integer tensor (or None) for each dimension."""
    found: list[Tensor | None] = []
    for each in indices:
        if each is not None and each.dtype in (torch.bool, torch.uint8):
            found += each.nonzero().unbind(1)
        else:
            found.append(each)
    return found + [None] * (dims - len(found))


class _Selection:
    """What x[indices] chooses of x: an index shape in place of the indexed dimensions."""

    def __init__(self, x: Tensor, indices: Sequence[Tensor | None]) -> None:
        self.indices = _masks_as_numbers(indices, x.dim())
        self.dims = [dim for dim, each in enumerate(self.indices) if each is not None]
        self.shape = torch.broadcast_shapes(*(self.at(dim).shape for dim in self.dims))
        together = self.dims == list(range(self.dims[0], self.dims[-1] + 1))
        self.start = self.dims[0] if together else 0
        self.kept = [dim for dim in range(x.dim()) if dim not in self.dims]

    def at(self, dim: int) -> Tensor:
        found = self.indices[dim]
        assert found is not None
        return found

    def out(self, dim: int) -> int:
        """Return where a dimension that is not indexed ends up."""
        place = self.kept.index(dim)
        return place if place < self.start else place + len(self.shape)

    def source(self, dim: int) -> int | None:
        """Return which dimension ended up here; None: one of the indices'."""
        if self.start <= dim < self.start + len(self.shape):
            return None
        return self.kept[dim if dim < self.start else dim - len(self.shape)]

    def of(self, owners: Owners, dim: int) -> Tensor:
        """Return the owner of every chosen index."""
        numbers = self.at(dim)
        vector = owners.vector(numbers.device)
        return vector[numbers.expand(self.shape)]


def _agreed(one: Tensor | None, two: Tensor) -> Tensor | None:
    """Return owners that both allow; None if they differ."""
    if one is None:
        return two
    if not bool(((one == two) | (one == NOBODY) | (two == NOBODY)).all()):
        return None
    return torch.where(one == NOBODY, two, one)


def _owners_of_indices(
    tracker: Tracker, indices: Sequence[Tensor | None], chosen: _Selection, so_far: Tensor | None
) -> tuple[Tensor | None, bool]:
    """Add what the indices themselves depend on; whether all agree."""
    for each in indices:
        state = tracker.state(each)
        if not isinstance(state, Owned) or each is None or each.dtype in (torch.bool, torch.uint8):
            continue
        owners = state.elements(each.shape, each.device).expand(chosen.shape)
        if so_far is not None:
            owners = owners.to(so_far.device)
        so_far = _agreed(so_far, owners)
        if so_far is None:
            return None, False
    return so_far, True


@rule("index", "_unsafe_index")
def index(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """x[indices]."""
    x, indices = args[0], args[1]
    state = tracker.state(x)
    if isinstance(state, Opaque) or (state is DERIVED and torch.is_grad_enabled()):
        return state
    if isinstance(state, Owned) and state.axis is None:
        return state
    with tracker.paused():
        chosen = _Selection(x, indices)
        if isinstance(state, Owned) and state.axis in chosen.kept:
            assert state.axis is not None
            if any(
                isinstance(tracker.state(i), Owned) and i.dtype not in (torch.bool, torch.uint8)
                for i in indices
                if i is not None
            ):
                return _mixed(tracker, func)
            return state.at(chosen.out(state.axis))
        elements = None
        if isinstance(state, Owned):
            assert state.axis is not None
            elements = chosen.of(state.owners, state.axis)
        elements, agree = _owners_of_indices(tracker, indices, chosen, elements)
        if not agree:
            return _mixed(tracker, func)
        if elements is None:
            return None
        found = _by_elements(tracker, func, elements)
    if isinstance(found, Owned) and found.axis is not None:
        return found.at(found.axis + chosen.start)
    return found


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """x[indices] = values, or += them."""
    x, indices, values = args[:3]
    before, new = tracker.state(x), tracker.state(values)
    special, done = _special(tracker, func, [before, new])
    if done and special is not None and (not isinstance(special, Owned) or before is not None):
        return special
    with tracker.paused():
        return _put(tracker, func, x, indices, values, before, new)


def _put(
    tracker: Tracker, func: Any, x: Tensor, indices: Any, values: Tensor, before: Any, new: Any
) -> State | None:
    chosen = _Selection(x, indices)
    shape = list(chosen.shape)
    selected = [x.shape[dim] for dim in chosen.kept]
    selected[chosen.start : chosen.start] = shape
    elements = None  # who owns the indexed places
    if isinstance(new, Owned):
        spread = combined(tracker, func, [(values, new)], selected)
        if isinstance(spread, Owned) and spread.axis is not None:
            passing = chosen.source(spread.axis)
            if passing is not None:
                if before is None:
                    return spread.at(passing)
                joined = before.owners.joined(new.owners) if before.axis == passing else None
                return _mixed(tracker, func) if joined is None else Owned(passing, joined)
            place = spread.axis - chosen.start
            elements = spread.at(place).elements(shape, values.device)
        elif isinstance(spread, Owned):
            elements = spread.elements(shape, values.device)
    if isinstance(before, Owned):
        if before.axis is None or before.axis not in chosen.dims:
            return before if elements is None else _mixed(tracker, func)
        if elements is None:
            return before
        return _filled(tracker, func, x, chosen, before.axis, elements, before.owners)
    elements, agree = _owners_of_indices(tracker, indices, chosen, elements)
    if not agree:
        return _mixed(tracker, func)
    if elements is None:
        return None
    for dim in chosen.dims:
        found = _filled(tracker, func, x, chosen, dim, elements, None)
        if isinstance(found, Owned):
            return found
    return _mixed(tracker, func)


def _filled(
    tracker: Tracker,
    func: Any,
    x: Tensor,
    chosen: _Selection,
    dim: int,
    elements: Tensor,
    before: Owners | None,
) -> State:
    """Return the owners along a dimension of a tensor that was written to."""
    numbers = chosen.at(dim).expand(chosen.shape)
    elements = elements.to(numbers.device)
    vector = torch.full((x.shape[dim],), NOBODY, device=numbers.device)
    if before is not None:
        vector = before.vector(numbers.device).clone()
        agreed = _agreed(vector[numbers], elements)
        if agreed is None:
            return _mixed(tracker, func)
        elements = agreed
    vector[numbers] = elements
    if not torch.equal(vector[numbers], elements):
        return _mixed(tracker, func)
    return Owned(dim, Owners.of(vector, tracker.examples))


@rule("index_select")
def index_select(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Chosen indices of one dimension."""
    x, dim, numbers = args[:3]
    if x.dim() == 0:
        return tracker.state(x)
    dim %= x.dim()
    return index(tracker, func, (x, [None] * dim + [numbers.reshape(-1)]), {}, result)


@rule("gather")
def gather(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """One element of a dimension for each place."""
    x, dim, numbers = args[:3]
    return _gathered(tracker, func, x, dim % max(1, x.dim()), numbers)


def _gathered(tracker: Tracker, func: Any, x: Tensor, dim: int, numbers: Tensor) -> State | None:
    state, where = tracker.state(x), tracker.state(numbers)
    if state is None:
        return where
    if not isinstance(state, Owned) or state.axis is None:
        return state
    if state.axis != dim:
        size = numbers.shape[state.axis]
        mine: Owned = Owned(state.axis, state.owners.sliced(0, size))
        if not isinstance(where, Owned):
            return mine
        return combined(tracker, func, [(numbers, mine), (numbers, where)], numbers.shape)
    with tracker.paused():
        elements = state.owners.vector(numbers.device)[numbers]
        if isinstance(where, Owned):
            agreed = _agreed(elements, where.elements(numbers.shape, numbers.device))
            if agreed is None:
                return _mixed(tracker, func)
            elements = agreed
        return _by_elements(tracker, func, elements)


@rule("scatter", "scatter_add", "scatter_reduce")
def scatter(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Elements that are put somewhere along a dimension."""
    x, dim, numbers = args[:3]
    source = args[3] if len(args) > 3 and isinstance(args[3], Tensor) else None
    states = [tracker.state(x)] + ([tracker.state(source)] if source is not None else [])
    where = tracker.state(numbers)
    if isinstance(where, Owned):
        states.append(where)
    special, done = _special(tracker, func, states)
    if done:
        return special
    with tracker.paused():
        cells = _cells_of(states[0], x)
        elements = None
        if source is not None and isinstance(states[1], Owned):
            elements = states[1].elements(source.shape, source.device)
            elements = elements[tuple(slice(size) for size in numbers.shape)]
        if isinstance(where, Owned):
            elements = _agreed(elements, where.elements(numbers.shape, numbers.device))
            if elements is None:
                return _mixed(tracker, func)
        if elements is not None:
            there = cells.gather(dim, numbers)
            agreed = _agreed(there, elements)
            if agreed is None:
                return _mixed(tracker, func)
            cells.scatter_(dim, numbers, agreed)
            if not torch.equal(cells.gather(dim, numbers), agreed):
                return _mixed(tracker, func)
        return _by_elements(tracker, func, cells)


def _cells_of(state: State | None, x: Tensor) -> Tensor:
    """Return a tensor of owners, one for each element."""
    if isinstance(state, Owned):
        return state.elements(x.shape, x.device).clone()
    return torch.full(x.shape, NOBODY, device=x.device)


@rule("index_add", "index_copy", "index_reduce")
def index_add(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Rows that are added to chosen ones."""
    x, dim, numbers, source = args[:4]
    dim %= max(1, x.dim())
    before, new = tracker.state(x), tracker.state(source)
    special, done = _special(tracker, func, [before, new])
    if done and not (isinstance(special, Owned) and before is None):
        return special
    with tracker.paused():
        indices = [None] * dim + [numbers.reshape(-1)]
        return _put(tracker, func, x, indices, source, before, new)


@rule("index_fill")
def index_fill(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Constants in place of rows."""
    return tracker.state(args[0])


@rule("masked_scatter")
def masked_scatter(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Elements in their order, wherever the mask is true."""
    x, mask, source = args[:3]
    states = [tracker.state(x), tracker.state(source)]
    special, done = _special(tracker, func, states)
    if done and not isinstance(special, Owned):
        return special
    with tracker.paused():
        mask = mask.expand(result.shape)
        cells = _cells_of(states[0], x).expand(result.shape).clone()
        if isinstance(states[1], Owned):
            elements = states[1].elements(source.shape, source.device).flatten()
            elements = elements[: int(mask.sum())]
            agreed = _agreed(cells[mask], elements)
            if agreed is None:
                return _mixed(tracker, func)
            cells[mask] = agreed
        return _by_elements(tracker, func, cells)


@rule("masked_select")
def masked_select(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The elements where the mask is true, in a row."""
    x, mask = args[:2]
    state = tracker.state(x)
    if not isinstance(state, Owned) or state.axis is None:
        return state
    with tracker.paused():
        shape = torch.broadcast_shapes(x.shape, mask.shape)
        elements = state.elements(x.shape, mask.device).expand(shape)
        return _by_elements(tracker, func, elements.masked_select(mask))


@rule("nonzero")
def nonzero(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Where something is: one row for each place."""
    state = tracker.state(args[0])
    if not isinstance(state, Owned) or state.axis is None:
        return state
    with tracker.paused():
        owners = state.owners.vector(result.device)[result[:, state.axis]]
        return Owned(0, Owners.of(owners, tracker.examples))


@rule("cat", "concat", "concatenate")
def cat(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Tensors one after the other."""
    tensors = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(1, result.dim())
    pairs = [
        (tensor, tracker.state(tensor))
        for tensor in tensors
        if not (tensor.dim() == 1 and tensor.numel() == 0 and result.dim() > 1)
    ]
    special, done = _special(tracker, func, [state for _, state in pairs])
    if done and not isinstance(special, Owned) and not _several_whole(pairs):
        return special
    axes = {state.axis for _, state in pairs if isinstance(state, Owned)}
    if axes <= {None, dim}:
        parts = [_along_dim(tracker, tensor, state, dim) for tensor, state in pairs]
        return Owned(dim, Owners.of(torch.cat(parts), tracker.examples))
    like = [(tensor.new_empty(()).expand(_put_in(result.shape, dim)), state) for tensor, state in pairs]
    return combined(tracker, func, like, _put_in(result.shape, dim))


def _put_in(shape: Sequence[int], dim: int) -> list[int]:
    """Return a shape as if the dimension that tensors are put together along were alike."""
    return [1 if i == dim else size for i, size in enumerate(shape)]


def _several_whole(pairs: list[tuple[Tensor, State | None]]) -> bool:
    """Whether all that is owned belongs to single examples, though to different ones."""
    states = [state for _, state in pairs if state is not None]
    return bool(states) and all(
        isinstance(state, Owned) and state.axis is None for state in states
    )


def _along_dim(tracker: Tracker, tensor: Tensor, state: State | None, dim: int) -> Tensor:
    size = tensor.shape[dim]
    if isinstance(state, Owned):
        vector = state.owners.vector()
        return vector if state.axis == dim else vector[:1].expand(size)
    return torch.full((size,), NOBODY)


@rule("stack")
def stack(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Tensors along a new axis."""
    tensors = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % result.dim()
    pairs = [(tensor, tracker.state(tensor)) for tensor in tensors]
    if _several_whole(pairs):
        parts = [
            state.owners.vector()[:1] if isinstance(state, Owned) else torch.tensor([NOBODY])
            for _, state in pairs
        ]
        return Owned(dim, Owners.of(torch.cat(parts), tracker.examples))
    found = combined(tracker, func, pairs, tensors[0].shape)
    if isinstance(found, Owned) and found.axis is not None and found.axis >= dim:
        return found.at(found.axis + 1)
    return found


def _with_reduction(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Losses element by element, unless they are added up."""
    (reduction,) = _named(func, args, kwargs, "reduction")
    state = combined(
        tracker, func, [(x, tracker.state(x)) for x in args if isinstance(x, Tensor)], args[0].shape
    )
    if reduction == 0 or not isinstance(state, Owned) or state.axis is None:
        return state
    return tracker.opaque(f"{_label(func)}, which adds examples up,")


for _name in ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
              "soft_margin_loss", "l1_loss"):  # fmt: skip
    _RULES[_name] = _with_reduction


@rule("nll_loss_forward", "nll_loss2d_forward", "nll_loss_nd", "multi_margin_loss",
      "multilabel_margin_loss_forward")  # fmt: skip
def nll_loss(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The loss of each row, unless they are added up."""
    x, target = args[:2]
    state, other = tracker.state(x), tracker.state(target)
    if not isinstance(state, Owned) or state.axis is None:
        return state
    (reduction,) = _named(func, args, kwargs, "reduction")
    if reduction != 0:
        return tracker.opaque(f"{_label(func)}, which adds examples up,")
    classes = 1 if x.dim() > 1 else 0
    if state.axis == classes:
        return _mixed(tracker, func)
    axis = state.axis - (state.axis > classes)
    owners: Owners | None = state.owners
    if isinstance(other, Owned) and other.axis is not None:
        owners = state.owners.joined(other.owners) if other.axis == axis else None
    if owners is None:
        return _mixed(tracker, func)
    return [Owned(axis, owners), *[None] * (len(_tensors(result)) - 1)]


@rule("_ctc_loss")
def ctc_loss(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Probabilities of (time, examples, classes); targets and lengths say where to look."""
    state = tracker.state(args[0])
    if not isinstance(state, Owned) or state.axis is None:
        return state
    return state.at(0) if state.axis == 1 and args[0].dim() == 3 else _mixed(tracker, func)


def _fft(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """Transforms along some dimensions."""
    return _mixed(tracker, func) if state.axis in _dims(args[1], args[0].dim()) else state


_registered("_fft_r2c", "_fft_c2c", "_fft_c2r")(_fft)


@_registered("_pad_packed_sequence")
def pad_packed(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """Packed rows as (time, examples, ...) again, in the order they were packed."""
    data, sizes, batch_first = args[:3]
    if state.axis != 0:
        return _mixed(tracker, func)
    with tracker.paused():
        rows = (state.owners.vector(data.device) + 1).double().unsqueeze(1)
        padded = func(rows, sizes, batch_first, 0.0, args[4])[0]
        found = _by_elements(tracker, func, padded.squeeze(2).long() - 1)
    return [found, None]
