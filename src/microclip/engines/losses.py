"""Calling `loss_fn` on a micro-batch, checking what it returns, differentiating it.

Knows nothing of norms, rules or engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from microclip.microbatches import Microbatch
from microclip.wrappers import is_shard

LossFn = Callable[[Any], Tensor]

MANY = 8  # micro-batches among which walking the graph of one takes negligible time
COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
SEND_NOTHING = frozenset({"_wrap_tensor_autograd", "wait_tensor"})


class LossPerExampleError(Exception):
    """`loss_fn` returns one loss per example."""


class MeansOnly:
    """A loss function that is assumed to return means; raises if the first call shows otherwise."""

    def __init__(self, loss_fn: LossFn) -> None:
        self.__wrapped__ = loss_fn
        self._is_known = False

    def __call__(self, batch: Any) -> Tensor:
        """Return the loss of a micro-batch."""
        loss = self.__wrapped__(batch)
        if not self._is_known and isinstance(loss, Tensor) and loss.dim() == 1:
            raise LossPerExampleError
        self._is_known = True
        return loss


def evaluate(loss_fn: LossFn, microbatch: Microbatch) -> tuple[Tensor, Tensor | None]:
    """Return the mean loss of a micro-batch and, if `loss_fn` returns them, the losses."""
    loss = call(loss_fn, microbatch.batch, microbatch.size)
    if loss.dim() == 1 and loss.numel() == microbatch.size:
        return loss.mean(), loss.detach()
    return loss if loss.dim() == 0 else loss.reshape(()), None


def call(loss_fn: LossFn, batch: Any, size: int) -> Tensor:
    """Return the loss of a batch, or raise if it is unusable."""
    loss = loss_fn(batch)
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"loss_fn must return a tensor, but returned {type(loss).__name__}."
            + (" Return its .loss." if hasattr(loss, "loss") else "")
        )
    if loss.numel() != 1 and loss.shape != (size,):
        raise ValueError(
            "loss_fn must return a scalar (the mean loss) or one loss per example, but for "
            f"{size} examples it returned a tensor of shape {tuple(loss.shape)}."
        )
    if not loss.requires_grad:
        raise RuntimeError(
            "The loss that loss_fn returned has no graph to differentiate: it was detached, "
            "computed under torch.no_grad(), or does not depend on a trainable parameter."
        )
    return loss


def communicates(operation: Any) -> bool:
    """Whether a torch operation waits for other ranks."""
    name = operation._schema.name.rpartition("::")[2]
    return operation.namespace in COLLECTIVES and name not in SEND_NOTHING


def backward(loss: Tensor, scaler: GradScaler | None, retain_graph: bool = False) -> None:
    """Differentiate, with loss scaling if there is a scaler."""
    scaled = loss if scaler is None else scaler.scale(loss)
    scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


def unscale(norm: Tensor, scaler: GradScaler | None) -> Tensor:
    """Return the norm for the unscaled loss, without reading the scale on the host."""
    if scaler is None:
        return norm
    return norm / scaler.scale(torch.ones_like(norm, dtype=torch.float32))


def name_of(function: Any, depth: int = 0) -> str:
    """Return a name that identifies a function, even if it is created again in every step.

    It includes the functions, modules, strings and booleans that it closes over; not numbers, which
    may count steps.
    """
    function = getattr(function, "__wrapped__", function)
    if isinstance(function, partial):
        return f"partial({name_of(function.func, depth)})"
    if isinstance(function, nn.Module):
        return type(function).__qualname__
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return type(function).__qualname__
    name = f"{function.__module__}.{function.__qualname__}:{function.__code__.co_firstlineno}"
    held = []
    for variable, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        if value is None or isinstance(value, bool | str):
            held.append(f"{variable}={value!r}")
        elif depth < 3 and isinstance(value, FunctionType | MethodType | partial | nn.Module):
            held.append(f"{variable}={name_of(value, depth + 1)}")
    return f"{name}({', '.join(held)})" if held else name


class OutsideParameterCheck:
    """Refuses losses that train parameters which do not belong to the model.

    They would get the sum of the gradients of all micro-batches, unclipped. Walking the graph takes
    time, so it is done at steps 0, 1, 3, 7, ... for the first two micro-batches (a tensor that is
    not a parameter but occurs in both was not made by `loss_fn`), and otherwise for the first of
    many.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], step: int, microbatches: int, final: bool
    ) -> None:
        self._left = 0
        self._known: set[int] = set()
        self._before: dict[int, Tensor] = {}
        is_seldom = step & (step + 1) == 0
        # a single micro-batch is not clipped, so nothing can go wrong
        if (final and microbatches == 1) or not (is_seldom or microbatches >= MANY):
            return
        if not any(map(is_shard, parameters.values())):
            self._left = 2 if is_seldom else 1
            self._known = {id(parameter) for parameter in parameters.values()}

    def check(self, loss: Tensor) -> None:
        """Check the graph of a micro-batch's loss."""
        if not self._left:
            return
        self._left -= 1
        leaves = {id(leaf): leaf for leaf in _leaves_of(loss) if id(leaf) not in self._known}
        for key, leaf in leaves.items():
            if isinstance(leaf, nn.Parameter) or key in self._before:
                kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor"
                raise ValueError(
                    f"The loss depends on a trainable {kind} of shape {tuple(leaf.shape)} that "
                    "does not belong to the model, so its gradient cannot be clipped with the "
                    "others. Give the Clipper everything that is trained, for example "
                    "torch.nn.ModuleList([model, other]), or freeze the rest "
                    "(requires_grad_(False))."
                )
        self._before = leaves


def _leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors whose `.grad` a backward pass from here would add to."""
    return (node.variable for node in nodes_from(loss.grad_fn) if hasattr(node, "variable"))


def nodes_from(start: Any) -> Iterator[Any]:
    """Yield every graph node that a backward pass from this one would visit."""
    waiting, seen = [start], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]
