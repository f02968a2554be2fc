"""Handling `.grad`: setting it aside during a step, taking it, adding the result.

Knows parameters and gradients, not losses, micro-batches or rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from microclip import multitensor
from microclip.wrappers import is_shard

Gradients = dict[str, Tensor]  # by parameter name; a parameter without gradient is not in it


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

    handles = []
    try:
        for name, parameter in parameters.items():
            if getattr(parameter, "_post_accumulate_grad_hooks", None):  # ours runs after them
                handle = parameter.register_post_accumulate_grad_hook(check(name))  # type: ignore[no-untyped-call]
                handles.append(handle)
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def set_aside(parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """Clear every `.grad` inside the block and restore it afterwards, also after an error."""
    kept = [parameter.grad for parameter in parameters.values()]
    _clear(parameters)
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters.values(), kept, strict=True):
            parameter.grad = gradient


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


def deposit(parameters: dict[str, nn.Parameter], gradients: Gradients) -> None:
    """Add the result to `.grad`, in place if there is one, exactly as `loss.backward()` does."""
    for name, gradient in gradients.items():
        parameter = parameters[name]
        result = torch.view_as_complex(gradient) if parameter.is_complex() else gradient
        if result.dtype != parameter.dtype:
            result = result.to(parameter.dtype)
        result = _as_shard(result, parameter)
        if parameter.grad is None:
            parameter.grad = result
        else:
            parameter.grad.add_(result)


def _clear(parameters: dict[str, nn.Parameter]) -> None:
    for parameter in parameters.values():
        parameter.grad = None


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
