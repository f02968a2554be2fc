"""Elementwise operations, and those that work along dimensions: sums, sorts, softmax, losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from microclip.engines.single_pass.owners import Owned, Owners
from microclip.engines.single_pass.propagation.registry import (
    RULES,
    combined,
    label,
    mixed,
    named,
    of_first,
    owned_rule,
    rule,
    tensors_in,
)
from microclip.engines.single_pass.tracker import Tracker


@rule(
    "pointwise", "_to_copy", "masked_fill", "bernoulli", "log_sigmoid_forward", "hardswish",
    "_prelu_kernel", "rrelu_with_noise", "softplus", "polar", "complex", "real", "imag",
    "normal", "addcmul", "addcdiv", "lerp", "where", "copysign", "gelu", "silu",
    "fake_quantize_per_tensor_affine_cachemask", "_conj", "conj", "_neg_view", "resolve_conj",
    "resolve_neg", "fill", "nan_to_num", "floor_divide", "clamp", "poisson",
)  # fmt: skip
def pointwise(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Elementwise operations."""
    shape = result.shape if isinstance(result, Tensor) else tensors_in(result)[0].shape
    parts = [
        (value, tracker.state(value))
        for value in ((*args, *kwargs.values()) if kwargs else args)
        if isinstance(value, Tensor)
    ]
    return combined(tracker, func, parts, shape)


@rule("isin", "bucketize")
def looked_for(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Elements that are searched for among others, which must be constants."""
    if any(isinstance(tracker.state(each), Owned) for each in args[1:]):
        return mixed(tracker, func)
    return tracker.state(args[0])


@rule("copy")
def copy(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The source replaces what the tensor held."""
    source = args[1]
    state = combined(tracker, func, [(source, tracker.state(source))], args[0].shape)
    before = tracker.state(args[0])
    if isinstance(state, Owned) and isinstance(before, Owned):
        return _one_axis(state, before)
    return state


def _one_axis(state: Owned, before: Owned) -> Owned:
    """Return the state before if it says the same with an axis."""
    if state.axis is None and before.owners.only == state.example:
        return before
    return state


@rule("detach", "alias", "clone", "contiguous", "lift_fresh", "native_dropout", "dropout",
      "alpha_dropout", "feature_dropout", "tril", "triu")  # fmt: skip
def same(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Operations whose result has the layout of their first input."""
    return tracker.state(args[0])


def dims_of(dims: Any, count: int) -> set[int]:
    """Return the dimensions that are meant, out of `count`; all of them if none is given."""
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return set(range(count))
    return {dim % count for dim in ([dims] if isinstance(dims, int) else dims)} if count else set()


def _reduction(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """Axes that are reduced."""
    dims, keep = named(func, args, kwargs, "dim", "keepdim")
    gone = dims_of(dims, args[0].dim())
    if state.axis in gone:
        return mixed(tracker, func)
    assert state.axis is not None
    return state if keep else state.at(state.axis - sum(1 for dim in gone if dim < state.axis))


owned_rule(
    "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "prod", "var",
    "std", "var_mean", "std_mean", "logsumexp", "norm", "linalg_vector_norm", "median", "nanmedian",
    "mode", "kthvalue", "nansum", "nanmean", "aminmax", "count_nonzero", "linalg__powsum",
)(_reduction)  # fmt: skip


def _max_or_min(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    if len(args) > 1 and isinstance(args[1], Tensor):
        return pointwise(tracker, func, args, kwargs, result)
    return of_first(_reduction)(tracker, func, args, kwargs, result)


RULES["max"] = RULES["min"] = _max_or_min


def _along(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """Operations along one axis that keep it, perhaps with another length."""
    (dim,) = named(func, args, kwargs, "dim")
    if dim % args[0].dim() == state.axis:
        return mixed(tracker, func)
    return state


owned_rule(
    "_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax", "cumsum", "cumprod",
    "cummax", "cummin", "_cummax_helper", "logcumsumexp", "sort", "argsort", "topk", "glu",
)(_along)  # fmt: skip


def _with_reduction(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Elementwise losses, unless they are reduced."""
    (reduction,) = named(func, args, kwargs, "reduction")
    state = combined(
        tracker, func, [(x, tracker.state(x)) for x in args if isinstance(x, Tensor)], args[0].shape
    )
    if reduction == 0 or not isinstance(state, Owned) or state.axis is None:
        return state
    return tracker.opaque(f"{label(func)}, which sums over examples,")


for _name in ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
              "soft_margin_loss", "l1_loss"):  # fmt: skip
    RULES[_name] = _with_reduction


@rule("nll_loss_forward", "nll_loss2d_forward", "nll_loss_nd", "multi_margin_loss",
      "multilabel_margin_loss_forward")  # fmt: skip
def nll_loss(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The loss of each row, unless they are reduced."""
    x, target = args[:2]
    state, other = tracker.state(x), tracker.state(target)
    if not isinstance(state, Owned) or state.axis is None:
        return state
    (reduction,) = named(func, args, kwargs, "reduction")
    if reduction != 0:
        return tracker.opaque(f"{label(func)}, which sums over examples,")
    if len(args) > 2 and isinstance(args[2], Tensor) and tracker.state(args[2]) is not None:
        return mixed(tracker, func)  # weights of the classes
    classes = 1 if x.dim() > 1 else 0
    if state.axis == classes:
        return mixed(tracker, func)
    axis = state.axis - (state.axis > classes)
    owners: Owners | None = state.owners
    if isinstance(other, Owned) and other.axis is not None:
        owners = state.owners.joined(other.owners) if other.axis == axis else None
    if owners is None:
        return mixed(tracker, func)
    return [Owned(axis, owners), *[None] * (len(tensors_in(result)) - 1)]


@rule("_ctc_loss")
def ctc_loss(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Probabilities of (time, examples, classes); targets and lengths say where to look."""
    state = tracker.state(args[0])
    if not isinstance(state, Owned) or state.axis is None:
        return state
    return state.at(0) if state.axis == 1 and args[0].dim() == 3 else mixed(tracker, func)


def _fft(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned) -> Any:
    """Transforms along some dimensions."""
    return mixed(tracker, func) if state.axis in dims_of(args[1], args[0].dim()) else state


owned_rule("_fft_r2c", "_fft_c2c", "_fft_c2r")(_fft)
