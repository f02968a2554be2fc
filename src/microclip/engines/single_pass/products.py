"""Weights that multiply rows: linear layers in all their spellings, and embeddings."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from microclip import multitensor
from microclip.engines.base import CannotFuseError
from microclip.engines.single_pass import native
from microclip.engines.single_pass.elementwise import pointwise
from microclip.engines.single_pass.memory import CALLS, WRITING, WRITING_BESIDE_HALVES, Weight
from microclip.engines.single_pass.owners import Opaque, Owned, refuse_unowned_gradients
from microclip.engines.single_pass.recorder import Recorder
from microclip.engines.single_pass.rows import EmbeddingRows, Rows
from microclip.engines.single_pass.torch_functions import Handler, apply, tensors_in


class _Linear(torch.autograd.Function):
    """x W^T + bias."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        note: Handler,
    ) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight)
        ctx.note = note
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        d = d.contiguous()  # once, for everything that reads it
        ctx.note(x, d)
        dx = d @ weight if ctx.needs_input_grad[1] else None
        return None, dx, None, None, None


def linear(recorder: Recorder, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, also of an embedding table by a tied head."""
    return _product(recorder, F.linear, input, weight, bias, transposed=False)


def addmm(
    recorder: Recorder,
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Any = None,
) -> Tensor:
    """torch.addmm(bias, x, W): a linear layer with a transposed weight, as in GPT-2."""
    args = (input, mat1, mat2)
    plain = beta == alpha == 1 and out is None and recorder.depends(mat1)
    if plain and not recorder.depends(input) and not recorder.depends(mat2):
        return _product(recorder, torch.addmm, mat1, mat2, input, transposed=True)
    if not recorder.any_depends(args):
        return recorder.derive(torch.addmm, args, {"beta": beta, "alpha": alpha})  # type: ignore[no-any-return]
    product = matmul(torch.matmul)(recorder, mat1, mat2)
    product = product if alpha == 1 else product * alpha
    added = input if beta == 1 else pointwise(recorder, torch.mul, (input, beta), {})
    return _plus(recorder, product, added)


def matmul(function: Any) -> Handler:
    """Return the handler of x @ W, a linear layer with a transposed weight."""

    def handler(
        recorder: Recorder, a: Any = None, b: Any = None, *, out: Any = None, **named: Any
    ) -> Any:
        if out is not None:
            raise CannotFuseError("The single-pass engine cannot follow matmul(out=...).")
        for name in ("input", "self", "other", "mat2", "tensor2"):  # the spellings of a and b
            if name in named:
                a, b = (named[name], b) if a is None else (a, named[name])
        if not (recorder.is_recorded(a) or recorder.is_recorded(b)):
            return torch.matmul(a, b)
        if function is torch.Tensor.__rmatmul__:
            a, b = b, a
        if recorder.is_recorded(b) and not recorder.is_recorded(a) and b.dim() == 2 and a.dim() > 1:
            return _product(recorder, torch.matmul, a, b, None, transposed=True)
        if recorder.any_depends([a, b]):
            return recorder.vmap_fallback(recorder, torch.matmul, (a, b), {})
        return recorder.derive(torch.matmul, (a, b), {})

    return handler


def _plus(recorder: Recorder, x: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias, recorded or not."""
    if bias is None:
        return x
    if recorder.is_recorded(bias):
        return pointwise(recorder, torch.add, (x, bias), {})  # type: ignore[no-any-return]
    return x + bias


def _product(
    recorder: Recorder,
    func: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transposed: bool,
) -> Tensor:
    found = recorder.common_case(x, weight, bias)
    if found is None and not recorder.is_recorded(x):
        x = recorder.adopt(x)
    if found is None and (recorder.depends(weight) or recorder.depends(bias)):
        # each example has its own weight or bias, which autograd differentiates as usual
        if recorder.is_recorded(weight):
            product = _product(recorder, func, x, weight, None, transposed)
        else:
            product = x @ (weight if transposed else weight.mT)
        return _plus(recorder, product, bias)
    if found is None and not recorder.depends(x):
        args = (bias, x, weight) if func is torch.addmm else (x, weight)
        args = (*args, bias) if func is F.linear else args
        return recorder.derive(func, args, {})  # type: ignore[no-any-return]
    w, b = recorder.name(weight), None if bias is None else recorder.name(bias)
    outputs = weight.shape[-1 if transposed else 0]
    plain = weight.dim() == 2 and (bias is None or bias.shape == (outputs,))
    if not plain or x.is_complex() or weight.is_complex():
        args = (x, weight) if transposed else (x, weight.mT)
        if recorder.is_recorded(weight) and not transposed:
            args = (x, recorder.derive(torch.Tensor.transpose, (weight, -1, -2), {}))
        if recorder.is_recorded(weight):
            product = recorder.vmap_fallback(recorder, torch.matmul, args, {})
        else:
            product = torch.matmul(*args)
        return _plus(recorder, product, bias)
    state = found or recorder.owned(x, w or b)
    whole = recorder.state(x) if x.dim() == 1 else None
    if isinstance(whole, Owned) and whole.axis is None:
        state = whole
    if state.axis == x.dim() - 1:
        raise CannotFuseError(
            f"Parameter {w or b!r} multiplies along the dimension of the examples, which mixes "
            "them."
        )
    recorder.expect(w, b)
    shape = x.shape[:-1]
    if w is not None:
        recorder.weights[w] = _as_weight(recorder, x, weight, state, transposed)

    def note(x: Tensor, d: Tensor) -> None:
        if x.dim() != len(shape) + 1 or d.dim() != len(shape) + 1:  # both may be matrices
            x, d = (each.reshape(*shape, each.shape[-1]) for each in (x, d))
        refuse_unowned_gradients(d, state.axis, state.owners, w or b)
        deltas = recorder.rows(d, state)
        if w is not None:
            recorder.on_contribution(w, Rows(recorder.rows(x, state), deltas, transposed))
        if b is not None:
            recorder.on_contribution(b, recorder.materialized(deltas))

    with recorder.untracked():
        held = None if bias is None else bias.detach()
        seen = weight.detach().mT if transposed else weight.detach()
        if recorder.can_hook_output(x):
            result = recorder.hook_output(F.linear(x, seen, held), note, x)
        else:
            # as a matrix: the result of a custom function must not be a view
            flat, note_final = x.reshape(-1, x.shape[-1]), recorder.final_only(note)
            result = apply(_Linear, recorder.anchor, flat, seen, held, note_final)
            result = result.view(*x.shape[:-1], result.shape[-1])
    return recorder.own(result, state)


def _as_weight(
    recorder: Recorder, x: Tensor, weight: Tensor, state: Owned, transposed: bool
) -> Weight:
    """Return the cost of keeping a weight's rows, or its gradients."""
    p, q = weight.shape if transposed else weight.shape[::-1]
    rows, added_up = math.prod(x.shape[:-1]), multitensor.accumulation_dtype(x)
    examples, owners = recorder.groups.examples, state.owners
    if owners.base is None:
        each = rows // examples
    else:  # with zeros in place of missing rows
        index = owners.padded[0]
        each = index.shape[1] * (rows // max(1, len(owners)))
    kept = examples * each * q * x.element_size()
    short = each * recorder.groups.largest <= native.MOST_ROWS
    halved = short and native.knows(added_up, x.device)
    worth = WRITING_BESIDE_HALVES if halved else WRITING
    return Weight(each, p, q, added_up.itemsize, kept, worth, CALLS)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, indices: Tensor, weight: Tensor, note: Handler) -> Tensor:
        ctx.note = note
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        ctx.note(d)
        return None, None, None, None


def embedding(
    recorder: Recorder,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """F.embedding: a linear layer of one-hot rows."""
    if not recorder.is_recorded(weight):
        raise CannotFuseError("The single-pass engine cannot use parameters as indices.")
    name = recorder.name(weight)
    assert name is not None
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise CannotFuseError(
            f"Embedding {name!r} uses max_norm, scale_grad_by_freq or sparse gradients, which the "
            "single-pass engine does not support."
        )
    input = recorder.adopt(input)
    if not isinstance(recorder.state(input), Owned):  # the same rows for all examples
        return recorder.derive(F.embedding, (input, weight), {"padding_idx": padding_idx})
    state = recorder.owned(input, name)
    recorder.expect(name)
    num_embeddings = weight.shape[0]

    def note(d: Tensor) -> None:
        refuse_unowned_gradients(d, state.axis, state.owners, name)
        deltas = recorder.rows(d, state)
        indices = recorder.rows(input.unsqueeze(-1), state).squeeze(-1)
        if padding_idx is not None:
            padding = indices == padding_idx % num_embeddings
            deltas = deltas.masked_fill(padding.unsqueeze(2), 0.0)
        recorder.on_contribution(name, EmbeddingRows(indices, deltas, num_embeddings))

    with recorder.untracked():
        result = apply(
            _Embedding, recorder.anchor, input, weight.detach(), recorder.final_only(note)
        )
    return recorder.own(result, state)


def get_item(recorder: Recorder, table: Tensor, index: Any) -> Any:
    """p[indices], an embedding if the indices depend on the examples."""
    owned = [each for each in tensors_in(index) if isinstance(recorder.state(each), Owned)]
    if owned and owned[0] is index and index.dtype == torch.long:
        return _look_up(recorder, table, index)
    if owned:
        return recorder.vmap_fallback(recorder, torch.Tensor.__getitem__, (table, index), {})
    return recorder.derive(torch.Tensor.__getitem__, (table, index), {})


def index_select(recorder: Recorder, input: Tensor, dim: int, index: Tensor) -> Any:
    """p.index_select(0, indices)."""
    if isinstance(recorder.state(index), Owned):
        if dim % input.dim() == 0:
            return _look_up(recorder, input, index)
        return recorder.vmap_fallback(recorder, torch.index_select, (input, dim, index), {})
    return recorder.derive(torch.index_select, (input, dim, index), {})


def _look_up(recorder: Recorder, table: Tensor, index: Tensor) -> Tensor:
    count, rest = table.shape[0], table.shape[1:]
    flat = table
    if table.dim() != 2:
        flat = recorder.derive(torch.Tensor.reshape, (table, (count, -1)), {})
    found = embedding(recorder, index % count, flat)
    return found if table.dim() == 2 else found.unflatten(-1, rest) if rest else found.squeeze(-1)  # type: ignore[no-any-return]


def embedding_bag(
    recorder: Recorder,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """F.embedding_bag: rows of a table, added up for each bag."""
    name = recorder.first_name([weight, per_sample_weights])
    if input.dim() != 2 or offsets is not None or max_norm is not None or scale_grad_by_freq:
        raise CannotFuseError(
            f"EmbeddingBag {name!r} uses offsets, max_norm or scale_grad_by_freq, which the "
            "single-pass engine does not support."
        )
    if sparse:
        raise CannotFuseError(
            f"EmbeddingBag {name!r} has sparse gradients, which the single-pass engine does not "
            "support."
        )
    if recorder.is_recorded(weight):
        rows = embedding(recorder, input, weight)
    else:
        rows = F.embedding(input, weight)
    real = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        real = input != padding_idx % weight.shape[0]
    with recorder:
        if mode == "max":
            masked = rows.detach().masked_fill(~real.unsqueeze(2), -torch.inf)
            first = (masked == masked.amax(1, keepdim=True)).int().argmax(1, keepdim=True)
            return rows.gather(1, first).squeeze(1) * real.any(1, keepdim=True)
        rows = rows * real.unsqueeze(2)
        if per_sample_weights is not None:
            rows = rows * per_sample_weights.unsqueeze(2)
        total = rows.sum(1)
        return total if mode == "sum" else total / real.sum(1, keepdim=True).clamp(min=1)


def grouped_mm(
    recorder: Recorder, input: Tensor, mat2: Tensor, *, offs: Any = None, **options: Any
) -> Any:
    """Rows that are each multiplied by one of several matrices, one per expert."""
    if not recorder.is_recorded(mat2) or input.dim() != 2 or mat2.dim() != 3 or offs is None:
        if recorder.any_depends([input, mat2]):
            raise CannotFuseError(
                "The single-pass engine does not support this kind of grouped_mm() with parameter "
                f"{recorder.first_name([input, mat2])!r}."
            )
        return recorder.derive(torch._grouped_mm, (input, mat2), {"offs": offs, **options})
    if isinstance(recorder.state(input), Opaque) or not recorder.depends(input):
        recorder.owned(input, recorder.name(mat2))
    ends = [0, *offs.tolist()]
    parts = []
    with recorder:
        for expert, (start, stop) in enumerate(pairwise(ends)):
            if stop > start:
                parts.append(input[start:stop] @ mat2[expert])
        if ends[-1] < len(input):  # rows beyond the last group are undefined
            parts.append(input.new_zeros(len(input) - ends[-1], mat2.shape[2]))
    return torch.cat(parts)
