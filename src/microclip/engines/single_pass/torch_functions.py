"""Torch functions and their arguments: nested tensors, reads on the host, functions in Python.

Knows nothing of examples, owners or contributions.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

CONTAINERS = (list, tuple, dict)

Handler = Callable[..., Any]

# functions that take only the shape, dtype or device of their other argument
TAKE_THE_FORM = frozenset(
    getattr(Tensor, name) for name in ("to", "type_as", "view_as", "reshape_as", "resize_as")
)
HOST_READS = frozenset(
    getattr(Tensor, name)
    for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__")
)


class HostReads(TorchFunctionMode):
    """Records the values that a model reads on the host: they can steer it unseen by any tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    def take(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Read a value and keep it."""
        value = func(*args, **(kwargs or {}))
        self.values.append(value.tolist() if hasattr(value, "tolist") else value)
        return value

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in HOST_READS:
            return self.take(func, args, kwargs)
        return func(*args, **(kwargs or {}))


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors among nested arguments."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, CONTAINERS):
        return found
    for value in tree:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, CONTAINERS):
            found.extend(tensors_in(value))
    return found


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Replace the tensors among nested arguments."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and type(tree) in (list, tuple, torch.Size):
        return type(tree)([map_tensors(function, value) for value in tree])
    return tree


def apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Call a custom autograd function."""
    if torch._C._are_functorch_transforms_active():
        return cast(Tensor, function.apply(*args))  # type: ignore[no-untyped-call]
    # the same, but without checking every argument for leftovers of such a transform
    found: Tensor = super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
    return found


def is_composite(func: Any) -> bool:
    """Whether a function is written in Python on top of others, so that a mode can look inside."""
    return (
        isinstance(func, types.FunctionType)
        and func.__module__ == F.__name__
        and "if_true" not in func.__code__.co_freevars  # one of two, chosen by an argument
    )


@cache
def without_dispatch(func: Any) -> Handler:
    """Return the function as plain tensors get it; else it would call the mode again forever."""
    checks = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    plain = dict.fromkeys(checks, lambda *tensors: False)
    copy = types.FunctionType(
        func.__code__,
        {**func.__globals__, **plain},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def without_compiling() -> AbstractContextManager[Any]:
    """Run compiled models eagerly, so that their operations can be seen."""
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
