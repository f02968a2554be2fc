"""From a micro-batch to its gradient: calling `loss_fn`, differentiating, handling `.grad`.

Checks what `loss_fn` returns and which parameters it trains; sets `.grad` aside during a step,
takes gradients from it, adds the result. Knows nothing of norms, rules or engines.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat, starmap
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from microclip import multitensor
from microclip.microbatches import Microbatch
from microclip.wrappers import is_shard

LossFn = Callable[[Any], Tensor]
Gradients = dict[str, Tensor]  # by parameter name; a parameter without gradient is not in it

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


class MeanOfExamplesError(Exception):
    """`loss_fn` returns a mean over examples that have to be weighted one by one."""


def evaluate(loss_fn: LossFn, microbatch: Microbatch) -> tuple[Tensor, Tensor | None]:
    """Return the mean loss of a micro-batch and, if `loss_fn` returns them, the losses.

    The mean is weighted if the examples have weights.
    """
    loss = call(loss_fn, microbatch.batch, microbatch.size)
    if loss.dim() == 1 and loss.numel() == microbatch.size:
        return microbatch.mean(loss), loss.detach()
    if microbatch.weights is not None:
        if microbatch.size == 1:  # its mean is its loss
            return microbatch.mean(loss.reshape(1)), loss.detach().reshape(1)
        if microbatch.weights.are_required:
            raise MeanOfExamplesError
        microbatch.weights.multipliers([microbatch.positions], loss.reshape(1))
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


class TakenGradientError(RuntimeError):
    """A hook removed a parameter's gradient before it could be clipped."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"A hook on parameter {name!r} removed its gradient during the backward pass, as "
            "optimizers do that step inside it (LOMO, layer-wise GaLore). They step before all "
            "norms are known, so nothing can be clipped. Use an optimizer that steps after the "
            "backward pass. The hook may have changed parameters already."
        )


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, or raise if there is nothing to clip."""
    chosen = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in chosen.items():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"Parameter {name!r} of {type(model).__name__} has no shape yet: it belongs to a "
                "lazy module. Run the model once before you make the Clipper."
            )
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameters: no parameter has "
            "requires_grad=True, so there is no gradient to clip."
        )
    return chosen


@contextmanager
def watching_hooks(parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """Inside the block, raise if a hook on a parameter removes its gradient."""

    def check(name: str) -> Callable[[nn.Parameter], None]:
        def hook(parameter: nn.Parameter) -> None:
            if parameter.grad is None:
                raise TakenGradientError(name)

        return hook

    hooks = "_post_accumulate_grad_hooks"
    hooked = {name: p for name, p in parameters.items() if getattr(p, hooks, None)}
    with gradient_hooks(hooked, check):  # ours run after them
        yield


@contextmanager
def gradient_hooks(
    parameters: dict[str, nn.Parameter], hook_for: Callable[[str], Callable[[nn.Parameter], None]]
) -> Iterator[None]:
    """Inside the block, call a hook for every parameter whose gradient is complete.

    No interrupt leaves any of them: one that hits while they are removed lets it be done again.
    """
    handles: list[RemovableHandle] = []
    try:
        try:
            for name, parameter in parameters.items():
                hook = hook_for(name)
                # in one line: Ctrl-C comes before or after
                handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            yield
        finally:
            for handle in handles:
                handle.remove()
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def set_aside(parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """Clear every `.grad` inside the block and restore it afterwards, also after an error."""
    kept = kept_gradients(parameters)
    try:
        _clear(parameters)
        yield
    finally:
        restore(parameters, kept)


def kept_gradients(parameters: dict[str, nn.Parameter]) -> list[Tensor | None]:
    """Return what is in `.grad`, for `restore`."""
    return [parameter.grad for parameter in parameters.values()]


def restore(parameters: dict[str, nn.Parameter], kept: list[Tensor | None]) -> None:
    """Put back what was in `.grad`, in one call into C, so that no interrupt leaves half of it."""
    deque(map(setattr, parameters.values(), repeat("grad"), kept), maxlen=0)


def take(parameters: dict[str, nn.Parameter]) -> Gradients:
    """Remove the gradients from the parameters; complex ones become pairs of real numbers."""
    taken = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for name, gradient in taken.items():
        if gradient.layout != torch.strided:
            raise NotImplementedError(
                f"Parameter {name!r} got a sparse gradient, which cannot be rescaled and added up "
                "exactly here. Build the module with sparse=False."
            )
        if hasattr(gradient, "to_local"):  # this rank's shard
            taken[name] = gradient.to_local()
        elif gradient.is_complex():
            taken[name] = torch.view_as_real(gradient)
    _clear(parameters)
    return taken


def add_multiple(
    sums: Gradients, gradients: Gradients, multiple: Tensor, keeps: bool = True
) -> None:
    """Add a multiple of the gradients to the sums.

    A gradient without a sum becomes the sum; a copy of it if the gradients must not be kept.
    """
    fresh, held, added = [], [], []
    places: set[int] = set()
    for name, gradient in gradients.items():
        if name in sums:
            held.append(sums[name])
            added.append(gradient)
        else:
            found = gradient.to(multitensor.accumulation_dtype(gradient))
            place = found.untyped_storage().data_ptr()
            # autograd may give one tensor to two parameters
            sums[name] = found.clone() if place in places or not keeps else found
            places.add(place)
            fresh.append(sums[name])
    multitensor.multiply_(fresh, multiple)
    multitensor.add_(held, added, multiple)


def deposit(
    parameters: dict[str, nn.Parameter], gradients: Gradients, *more: tuple[Any, ...]
) -> None:
    """Add the result to `.grad`, in place if there is one, exactly as `loss.backward()` does.

    The calls in `more`, each a function with its arguments, are made together with it, in one call
    into C: an interrupt (Ctrl-C) comes before all of it or after.
    """
    calls: list[tuple[Any, ...]] = []
    held, added = [], []
    for name, gradient in gradients.items():
        parameter = parameters[name]
        result = torch.view_as_complex(gradient) if parameter.is_complex() else gradient
        if result.dtype != parameter.dtype:
            result = result.to(parameter.dtype)
        result = _as_shard(result, parameter)
        if parameter.grad is None:
            calls.append((setattr, parameter, "grad", result))
        elif is_shard(parameter):
            calls.append((parameter.grad.add_, result))
        else:
            held.append(parameter.grad)
            added.append(result)
    if held:
        calls.insert(0, (torch._foreach_add_, held, added))
    deque(starmap(operator.call, (*calls, *more)), maxlen=0)


def _clear(parameters: dict[str, nn.Parameter]) -> None:
    deque(map(setattr, parameters.values(), repeat("grad"), repeat(None)), maxlen=0)


def _as_shard(result: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return the result as a shard if the parameter is one."""
    if not is_shard(parameter):
        return result
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        result,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
