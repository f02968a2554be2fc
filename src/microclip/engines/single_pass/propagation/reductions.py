"""Operations that look along dimensions: sums, sorts, softmax, transforms, losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from microclip.engines.single_pass.owners import Owned, Owners
from microclip.engines.single_pass.propagation.pointwise import pointwise
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


def dims_of(dims: Any, count: int) -> set[int]:
    """Return the dimensions that are meant, out of so many; all of them if none is named."""
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return set(range(count))
    return {dim % count for dim in ([dims] if isinstance(dims, int) else dims)} if count else set()


def _reduction(
    tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any, state: Owned
) -> Any:
    """Axes that are reduced to one number."""
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
    """Operations that keep the shape and look along one axis, or change its length."""
    (dim,) = named(func, args, kwargs, "dim")
    if dim % args[0].dim() == state.axis:
        return mixed(tracker, func)
    return state


owned_rule(
    "_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax", "cumsum", "cumprod",
    "cummax", "cummin", "_cummax_helper", "logcumsumexp", "sort", "argsort", "topk", "glu",
)(_along)  # fmt: skip


def _with_reduction(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Losses element by element, unless they are added up."""
    (reduction,) = named(func, args, kwargs, "reduction")
    state = combined(
        tracker, func, [(x, tracker.state(x)) for x in args if isinstance(x, Tensor)], args[0].shape
    )
    if reduction == 0 or not isinstance(state, Owned) or state.axis is None:
        return state
    return tracker.opaque(f"{label(func)}, which adds examples up,")


for _name in ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
              "soft_margin_loss", "l1_loss"):  # fmt: skip
    RULES[_name] = _with_reduction


@rule("nll_loss_forward", "nll_loss2d_forward", "nll_loss_nd", "multi_margin_loss",
      "multilabel_margin_loss_forward")  # fmt: skip
def nll_loss(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The loss of each row, unless they are added up."""
    x, target = args[:2]
    state, other = tracker.state(x), tracker.state(target)
    if not isinstance(state, Owned) or state.axis is None:
        return state
    (reduction,) = named(func, args, kwargs, "reduction")
    if reduction != 0:
        return tracker.opaque(f"{label(func)}, which adds examples up,")
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
