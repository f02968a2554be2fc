"""What the recorder does with a torch function that takes parameters.

`HANDLERS` lists the functions that it knows how to take apart, with their handlers from
`products`, `elementwise`, `convolution`, `norms`, `recurrent` and `head`. The others go through
`vmap_fallback`: differentiated again for every micro-batch, vectorized by vmap.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from microclip.engines.base import CannotFuseError
from microclip.engines.single_pass import elementwise, head, norms, products, recurrent
from microclip.engines.single_pass.contributions import Block, Materialized, together
from microclip.engines.single_pass.convolution import convolution
from microclip.engines.single_pass.derived import MOST_ELEMENTS, separate_microbatches
from microclip.engines.single_pass.owners import Owned, refuse_unowned_gradients
from microclip.engines.single_pass.recorder import Recorder
from microclip.engines.single_pass.torch_functions import Handler, apply, map_tensors
from microclip.losses import token_losses

HANDLERS: dict[Any, Handler] = {
    F.linear: products.linear,
    torch.addmm: products.addmm,
    F.embedding: products.embedding,
    F.embedding_bag: products.embedding_bag,
    torch.Tensor.__getitem__: products.get_item,
    torch.index_select: products.index_select,
    torch.Tensor.index_select: products.index_select,
    F.layer_norm: norms.layer_norm,
    F.group_norm: norms.group_norm,
    F.rms_norm: norms.rms_norm,
    F.instance_norm: norms.instance_norm,
    F.batch_norm: norms.batch_norm,
    torch.batch_norm: norms.torch_batch_norm,
    F.conv1d: convolution(1),
    F.conv2d: convolution(2),
    F.conv3d: convolution(3),
    F.prelu: elementwise.prelu,
    torch.Tensor.prelu: elementwise.prelu,
    torch.Tensor.expand: elementwise.expand,
    torch.Tensor.expand_as: elementwise.expand_as,
    torch.broadcast_to: elementwise.broadcast_to,
    torch.Tensor.repeat: elementwise.repeat(torch.Tensor.repeat),
    torch.tile: elementwise.repeat(torch.tile),
    torch.Tensor.tile: elementwise.repeat(torch.Tensor.tile),
    torch.cat: elementwise.concatenation(torch.cat),
    torch.stack: elementwise.concatenation(torch.stack),
    torch.Tensor.__setitem__: elementwise.set_item,
    torch.Tensor.copy_: elementwise.copy_,
    torch.masked_fill: elementwise.masked_fill,
    torch.Tensor.masked_fill: elementwise.masked_fill,
    torch.Tensor.masked_fill_: elementwise.masked_fill_,
    torch.Tensor.index_put_: elementwise.index_put_,
    torch.lstm: recurrent.lstm,
    torch.gru: recurrent.gru,
    torch.rnn_tanh: recurrent.rnn_tanh,
    torch.rnn_relu: recurrent.rnn_relu,
    torch.lstm_cell: recurrent.lstm_cell,
    torch.gru_cell: recurrent.gru_cell,
    torch.rnn_tanh_cell: recurrent.rnn_cell(torch.tanh),
    torch.rnn_relu_cell: recurrent.rnn_cell(torch.relu),
    token_losses: head.token_losses,
}


for _module, _name in ((torch, "_grouped_mm"), (F, "grouped_mm")):  # newer than the oldest torch
    if hasattr(_module, _name):
        HANDLERS[getattr(_module, _name)] = products.grouped_mm
for _matmul in (
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
    torch.mm,
    torch.Tensor.mm,
):
    HANDLERS[_matmul] = products.matmul(_matmul)


class _VmapFallback(torch.autograd.Function):
    """Any function of tensors that depend on the examples, and of detached parameters."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: Handler, note: Handler, *inputs: Tensor) -> Any:
        ctx.run, ctx.note = run, note
        ctx.save_for_backward(*inputs)
        result = run(inputs)
        is_view = isinstance(result, Tensor) and result._is_view()
        return result.clone() if is_view else result  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        inputs = ctx.saved_tensors
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        ctx.note(inputs, d)
        gradients: list[Tensor | None] = [None] * len(inputs)
        if wanted:
            with torch.enable_grad():
                again = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
                found = torch.autograd.grad(ctx.run(again), [again[i] for i in wanted], d)
            for i, gradient in zip(wanted, found, strict=True):
                gradients[i] = gradient
        return (None, None, None, *gradients)


def vmap_fallback(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function, and find its parameters' micro-batch gradients in the backward pass."""
    label = getattr(func, "__name__", str(func))
    if (
        kwargs.get("out") is not None
        or label.startswith("__set")
        or label.rstrip("_") + "_" == label
    ):
        raise CannotFuseError(
            f"The single-pass engine cannot follow {label}(), which modifies a tensor in place, "
            f"with parameter {recorder.first_name((args, kwargs))!r}."
        )
    inputs: list[Tensor] = []  # depend on the examples
    states: list[Owned] = []
    kept: list[Tensor] = []  # recorded
    names: list[str] = []

    def sort(tensor: Tensor) -> Any:
        if recorder.is_recorded(tensor):
            name = recorder.name(tensor)
            assert name is not None
            names.append(name)
            kept.append(tensor.detach())
            return _Slot(False, len(kept) - 1)
        if recorder.depends(tensor):
            inputs.append(tensor)
            states.append(recorder.owned(tensor, recorder.first_name((args, kwargs))))
            return _Slot(True, len(inputs) - 1)
        return tensor

    call = map_tensors(sort, (list(args), kwargs))

    def run(xs: Any, parameters: Any = kept) -> Any:
        positional, named = _fill(call, xs, parameters)
        return func(*positional, **named)

    result = _track(run, inputs)
    if not isinstance(result, Tensor):
        raise CannotFuseError(
            f"The single-pass engine does not support {label}() on parameter {names[0]!r}."
        )
    mine = recorder.owned(result, names[0])
    is_regular = all(state.owners.is_regular for state in (*states, mine))

    def vectorized(function: Handler, *values: Any) -> Any:
        try:
            return torch.func.vmap(function)(*values)
        except RuntimeError as error:
            raise CannotFuseError(
                f"The single-pass engine does not support {label}() on parameter {names[0]!r}, "
                f"and torch.func.vmap does not, either: {error}"
            ) from error

    def note_all(xs: tuple[Tensor, ...], d: Tensor) -> None:
        """Where micro-batches cannot be cut out: blank the gradients of all others."""
        refuse_unowned_gradients(d, mine.axis, mine.owners, names[0])
        if len(recorder.groups) * max(x.numel() for x in (*xs, d, *kept)) > MOST_ELEMENTS:
            raise CannotFuseError(
                f"The single-pass engine does not support {label}() on parameter {names[0]!r} "
                "where examples own different numbers of rows."
            )
        back = torch.func.vjp(lambda *parameters: run(xs, parameters), *kept)[1]
        found = vectorized(back, separate_microbatches(recorder.groups, d, mine))
        for name, gradient in zip(names, found, strict=True):
            recorder.on_contribution(name, Materialized(gradient))

    def note(xs: tuple[Tensor, ...], d: Tensor) -> None:
        if not is_regular:
            note_all(xs, d)
            return
        parts: list[list[Tensor]] = [[] for _ in kept]
        for block in recorder.groups:
            pieces = [_pieces(block, x, state) for x, state in zip(xs, states, strict=True)]
            outputs = _pieces(block, d, mine)

            def one(piece: list[Tensor], output: Tensor) -> Any:
                back = torch.func.vjp(lambda *parameters: run(piece, parameters), *kept)[1]
                return back(output)

            for part, gradient in zip(parts, vectorized(one, pieces, outputs), strict=True):
                part.append(gradient)
        for name, part in zip(names, parts, strict=True):
            recorder.on_contribution(name, Materialized(together(part)))

    recorder.expect(*names)
    with recorder.untracked():
        found = apply(_VmapFallback, recorder.anchor, run, recorder.final_only(note), *inputs)
    return recorder.own(found, mine)


def _track(run: Handler, inputs: list[Tensor]) -> Any:
    """Call a function so that the tracker sees what it does to owners."""
    with torch.no_grad():
        return run([x.detach() for x in inputs])


class _Slot:
    """A place among arguments where a tensor goes."""

    def __init__(self, depends: bool, index: int) -> None:
        self.depends = depends
        self.index = index


def _fill(tree: Any, inputs: Any, kept: Any) -> Any:
    if isinstance(tree, _Slot):
        return (inputs if tree.depends else kept)[tree.index]
    if isinstance(tree, dict):
        return {key: _fill(value, inputs, kept) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and type(tree) in (list, tuple):
        return type(tree)([_fill(value, inputs, kept) for value in tree])
    return tree


def _pieces(block: Block, tensor: Tensor, state: Owned) -> Tensor:
    """Return (micro-batches of a block, ...), each as if it were the whole batch."""
    owners, axis = state.owners, state.axis
    assert axis is not None
    split = torch.unflatten(tensor, axis, (owners.outer, owners.examples, owners.inner))
    chosen = split.narrow(axis + 1, block.first_example, block.count * block.size)
    chosen = torch.unflatten(chosen, axis + 1, (block.count, block.size)).movedim(axis + 1, 0)
    return chosen.flatten(axis + 1, axis + 3)
