"""Layers where no parameter is recorded: products, convolutions, pooling, norms, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from microclip.engines.single_pass.owners import Owned, Owners, State
from microclip.engines.single_pass.propagation.registry import (
    RULES,
    combined,
    mixed,
    named,
    rule,
    tensors_in,
    trivial_state,
    unknown,
)
from microclip.engines.single_pass.tracker import Rule, Tracker


def _product(
    tracker: Tracker, func: Any, a: Tensor, b: Tensor, batched: bool, shape: Sequence[int]
) -> State | None:
    """The product of two matrices, or of two batches of matrices."""
    states = [tracker.state(a), tracker.state(b)]
    special, done = trivial_state(tracker, func, states)
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
    """Batches of matrices."""
    return _product(tracker, func, args[0], args[1], True, result.shape)


@rule("_cdist_forward", "_euclidean_dist")
def distances(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Rows of one matrix with rows of another."""
    a, b = args[0], args[1]
    states = [tracker.state(a), tracker.state(b)]
    special, done = trivial_state(tracker, func, states)
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
    """A product with something added."""
    batched = args[1].dim() == 3
    product = _product(tracker, func, args[1], args[2], batched, result.shape)
    parts = [(args[0], tracker.state(args[0])), (result, product)]
    return combined(tracker, func, parts, result.shape)


@rule("linear")
def linear(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """A linear layer without recorded parameters."""
    x, weight = args[0], args[1]
    bias = args[2] if len(args) > 2 else None
    states = [tracker.state(each) for each in (x, weight, bias) if each is not None]
    special, done = trivial_state(tracker, func, states)
    if done:
        return special
    if any(state is not None for state in states[1:]):
        return mixed(tracker, func)
    state = states[0]
    assert isinstance(state, Owned)
    return mixed(tracker, func) if state.axis == x.dim() - 1 else state


@rule("bitsandbytes::gemm_4bit")
def packed_linear(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """A frozen linear layer whose weight is packed into 4 bits; further tensors are its scales."""
    tensors = [t for value in (*args, *kwargs.values()) for t in tensors_in(value)]
    states = [tracker.state(tensor) for tensor in tensors]
    special, done = trivial_state(tracker, func, states)
    if done:
        return special
    state = states[0]
    if any(each is not None for each in states[1:]) or not isinstance(state, Owned):
        return mixed(tracker, func)
    return mixed(tracker, func) if state.axis == args[0].dim() - 1 else state


@rule("_grouped_mm", "_scaled_grouped_mm")
def grouped_mm(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Rows that are each multiplied by one of several matrices; offsets say which."""
    states = [tracker.state(args[0]), tracker.state(args[1])]
    special, done = trivial_state(tracker, func, states)
    if done:
        return special
    state = states[0]
    ragged = args[0].dim() == 2 and args[1].dim() == 3 and states[1] is None
    if ragged and isinstance(state, Owned) and state.axis == 0:
        return state
    return unknown(tracker, func, args, kwargs, result)


def _leading(spatial: int | None) -> Rule:
    """Operations on the last `spatial` dimensions, batched over those before; None: all but one."""

    def check(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        tensors = [t for value in (*args, *kwargs.values()) for t in tensors_in(value)]
        states = [tracker.state(tensor) for tensor in tensors]
        special, done = trivial_state(tracker, func, states)
        if done:
            return special
        if func is torch.ops.aten._trilinear.default and tracker.state(args[1]) is not None:
            return mixed(tracker, func)  # it is the weight
        unbatched = {"im2col": 3, "col2im": 2}.get(func._schema.name.removeprefix("aten::"))
        if args[0].dim() == unbatched:
            return mixed(tracker, func)
        dims = max(tensor.dim() for tensor in tensors)
        axis: int | None = None
        owners: Owners | None = None
        for tensor, state in zip(tensors, states, strict=True):
            if not isinstance(state, Owned):
                continue
            limit = 1 if spatial is None else tensor.dim() - spatial
            if state.axis is None or state.axis >= limit:
                return mixed(tracker, func)
            # tensors with fewer dimensions are broadcast
            place = state.axis + (dims - tensor.dim() if spatial is not None else 0)
            if axis not in (None, place):
                return mixed(tracker, func)
            axis = place
            owners = state.owners if owners is None else owners.joined(state.owners)
            if owners is None:
                return mixed(tracker, func)
        assert owners is not None
        assert axis is not None
        if any(len(owners) != each.shape[axis] for each in tensors_in(result) if each.numel()):
            return mixed(tracker, func)
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
    ("cholesky_solve", 2), ("linalg_lu_factor_ex", 2), ("_trilinear", None),
):  # fmt: skip
    RULES[_name] = _leading(_spatial)


@rule("convolution", "_convolution", "mkldnn_convolution", "conv2d", "conv1d", "conv3d")
def convolution(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """A window that runs over each example separately."""
    states = [tracker.state(each) for each in args[:3] if isinstance(each, Tensor)]
    special, done = trivial_state(tracker, func, states)
    if done:
        return special
    state = states[0]
    if all(each is None for each in states[1:]) and isinstance(state, Owned) and state.axis == 0:
        return state
    return mixed(tracker, func)


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def layer_norm(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Rows that are normalized."""
    states = [tracker.state(each) for each in (args[0], *args[2:4]) if isinstance(each, Tensor)]
    special, done = trivial_state(tracker, func, states)
    if done:
        return special
    state = states[0]
    rows = args[0].dim() - len(args[1])
    if any(states[1:]) or not isinstance(state, Owned) or state.axis is None or state.axis >= rows:
        return mixed(tracker, func)
    return state


@rule("native_group_norm")
def group_norm(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Channels of each example."""
    return convolution(tracker, func, args, kwargs, result)


@rule("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update",
      "cudnn_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_no_update",
      "batch_norm", "_batch_norm_impl_index")  # fmt: skip
def batch_norm(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Statistics over everything but the channels, unless they are given."""
    states = [tracker.state(each) for each in args[:5] if isinstance(each, Tensor)]
    special, done = trivial_state(tracker, func, states)
    if done:
        return special
    state = states[0]
    if any(states[1:]) or not isinstance(state, Owned):
        return mixed(tracker, func)
    count = len(tensors_in(result))
    if state.axis == 1:  # separate channels for every example, as in instance norm
        return [state, *[state.at(0)] * (count - 1)]
    training = named(func, args, kwargs, "training")[0]
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
    (dropout,) = named(func, args, kwargs, "dropout_p")
    tracker.has_dropout = tracker.has_dropout or bool(dropout)
    mask = named(func, args, kwargs, "attn_mask")[0]
    if mask is None:
        mask = named(func, args, kwargs, "attn_bias")[0]
    tensors = [*args[:3], *([mask] if isinstance(mask, Tensor) else [])]
    states = [tracker.state(tensor) for tensor in tensors]
    special, done = trivial_state(tracker, func, states)
    if done:
        return special
    shape = (*args[0].shape[:-2], 1, 1)
    for tensor, state in zip(tensors, states, strict=True):
        if not isinstance(state, Owned) or state.axis is None:
            continue
        place = state.axis + len(shape) - tensor.dim()  # heads may be fewer than the queries'
        if not 0 <= place < len(shape) - 2 or tensor.shape[state.axis] != shape[place]:
            return mixed(tracker, func)
    return combined(tracker, func, zip(tensors, states, strict=True), shape)
