"""Operations that work element by element, and those that leave everything where it is."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from microclip.engines.single_pass.owners import Owned
from microclip.engines.single_pass.propagation.registry import combined, mixed, rule, tensors_in
from microclip.engines.single_pass.tracker import Tracker


@rule(
    "pointwise", "_to_copy", "masked_fill", "bernoulli", "log_sigmoid_forward", "hardswish",
    "_prelu_kernel", "rrelu_with_noise", "softplus", "polar", "complex", "real", "imag",
    "normal", "addcmul", "addcdiv", "lerp", "where", "copysign", "gelu", "silu",
    "fake_quantize_per_tensor_affine_cachemask", "_conj", "conj", "_neg_view", "resolve_conj",
    "resolve_neg", "fill", "nan_to_num", "floor_divide", "clamp", "poisson",
)  # fmt: skip
def pointwise(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Operations that work element by element."""
    shape = result.shape if isinstance(result, Tensor) else tensors_in(result)[0].shape
    parts = [
        (value, tracker.state(value))
        for value in ((*args, *kwargs.values()) if kwargs else args)
        if isinstance(value, Tensor)
    ]
    return combined(tracker, func, parts, shape)


@rule("isin", "bucketize")
def looked_for(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Elements that are looked for among others, which must be the same for all."""
    if any(isinstance(tracker.state(each), Owned) for each in args[1:]):
        return mixed(tracker, func)
    return tracker.state(args[0])


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
      "alpha_dropout", "feature_dropout", "tril", "triu")  # fmt: skip
def same(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Operations whose result lies as their first input does."""
    return tracker.state(args[0])
