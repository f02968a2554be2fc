"""Recording how parameters are used: the weights' own gradient work is taken out of backward.

Inside `Recorder`, every torch function that gets a trainable parameter is replaced by one that
calculates the same, passes gradients on to its inputs, and notes what the parameter's gradient is
made of. The replacements are in `layers` and `anything`; what they cannot do is refused by name.

The recorder also follows which tensors depend on the examples. A parameter that meets none of
them (positions looked up in a table, a transposed weight) gives a *derived* tensor, which is
recorded like a parameter and differentiated back to it at the end.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from microclip.engines.base import CannotFuseError
from microclip.engines.fused.groups import Groups
from microclip.engines.fused.uses import Formed, Use

Handler = Callable[..., Any]
# from a tensor with the examples somewhere in it to one with them along the first dimension
Arrangement = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Derived:
    """A tensor calculated from parameters alone."""

    value: Tensor
    leaves: dict[str, Tensor]  # stand-ins of all the parameters, by name

    def pull_back(self, gradients: Tensor) -> dict[str, Tensor]:
        """Return the parameters' gradients, per micro-batch, from those of this tensor."""
        names = list(self.leaves)
        found = torch.autograd.grad(
            self.value,
            [self.leaves[name] for name in names],
            gradients,
            retain_graph=True,
            is_grads_batched=True,
            allow_unused=True,
        )
        return {n: g for n, g in zip(names, found, strict=True) if g is not None}


class Recorder(TorchFunctionMode):
    """Notes every use of the parameters in the functions called inside the block."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        groups: Groups,
        examples: list[Tensor],
        handlers: dict[Any, Handler],
        anything: Handler,
    ) -> None:
        super().__init__()
        self._handlers = handlers
        self.anything = anything  # for functions that have no handler
        self.groups = groups
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.expected: dict[str, int] = {}  # how many uses the backward pass will deliver
        self.derived: dict[str, Derived] = {}
        self.on_use: Callable[[str, Use], None] = lambda name, use: None
        self.arrangement: Arrangement = lambda tensor: tensor
        self._parameters = parameters
        self._leaves: dict[str, Tensor] = {}
        self._follows = WeakIdKeyDictionary()  # tensors that depend on the examples
        for tensor in examples:
            self._follows[tensor] = True
        device = next(iter(parameters.values())).device
        # makes outputs differentiable where inputs are data and weights are kept out
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        result = self._call(func, args, kwargs, given)
        if any(tensor in self._follows for tensor in given):
            for tensor in tensors_in(result):
                self._follows[tensor] = True
        return result

    def _call(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        used = [self.names[id(tensor)] for tensor in given if id(tensor) in self.names]
        if not used or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func in self._handlers:
            return self._handlers[func](self, *args, **kwargs)
        if is_composite(func):
            with self:  # look inside
                return without_dispatch(func)(*args, **kwargs)
        if not any(tensor in self._follows for tensor in given):
            return self.derive(func, args, kwargs)
        return self.anything(self, func, args, kwargs)

    def derive(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calculate from parameters alone, keeping the way back to them."""
        result = func(*self._stand_in(args), **self._stand_in(kwargs))
        for tensor in tensors_in(result):
            if tensor.requires_grad and id(tensor) not in self.names:
                name = f"{self.first_name((args, kwargs))}, derived {len(self.derived)}"
                self.names[id(tensor)] = name
                self.derived[name] = Derived(tensor, self._leaves)  # which also keeps its id
        return result

    def _stand_in(self, tree: Any) -> Any:
        """Replace parameters by leaves of their own, where the way back ends."""

        def leaf(tensor: Tensor) -> Tensor:
            name = self.names.get(id(tensor))
            if name is None or name not in self._parameters:
                return tensor
            if name not in self._leaves:
                self._leaves[name] = tensor.detach().requires_grad_()
            return self._leaves[name]

        return map_tensors(leaf, tree)

    def name(self, tensor: Tensor | None) -> str | None:
        """Return the name a tensor is recorded under, or None for what is not."""
        return None if tensor is None else self.names.get(id(tensor))

    def first_name(self, arguments: Any) -> str | None:
        """Return the first parameter among a function's arguments, to speak of it."""
        names = (self.name(tensor) for tensor in tensors_in(arguments))
        return next((name for name in names if name is not None), None)

    def follows(self, tensor: Any) -> bool:
        """Whether a tensor depends on the examples."""
        return isinstance(tensor, Tensor) and tensor in self._follows

    def follow(self, tensor: Tensor) -> Tensor:
        """Take a tensor as one that has the examples along its first dimension."""
        self._follows[tensor] = True
        return tensor

    def expect(self, *names: str | None) -> None:
        """Count uses that the backward pass will deliver."""
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            raise CannotFuseError(
                "The single-pass engine cannot look into gradient checkpointing or other hooks on "
                "saved tensors."
            )
        for name in names:
            if name is not None:
                self.expected[name] = self.expected.get(name, 0) + 1

    def check(self, tensor: Tensor, name: str | None) -> None:
        """Make sure that the examples are along the first dimension."""
        arranged = self.arrangement(tensor)
        if tensor.dim() == 0 or arranged.shape[0] % self.groups.examples:
            raise CannotFuseError(
                f"The single-pass engine needs the examples along the first dimension, but "
                f"parameter {name!r} meets a tensor of shape {tuple(tensor.shape)} in a batch of "
                f"{self.groups.examples}."
            )

    def formed(self, values: Tensor) -> Formed:
        """Add up a tensor with the examples along the first dimension within micro-batches."""
        if len(values) > self.groups.examples:
            values = values.reshape(self.groups.examples, -1, *values.shape[1:]).sum(1)
        return Formed(self.groups.sum(values))

    @contextmanager
    def arranged(self, arrangement: Arrangement) -> Iterator[None]:
        """Inside the block, tensors have their examples elsewhere."""
        before, self.arrangement = self.arrangement, arrangement
        try:
            yield
        finally:
            self.arrangement = before


def apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Call a function with a backward of its own."""
    return cast(Tensor, function.apply(*args))  # type: ignore[no-untyped-call]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors among nested arguments."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_in(value)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Replace the tensors among nested arguments."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([map_tensors(function, value) for value in tree])
    return tree


def is_composite(func: Any) -> bool:
    """Whether a function is written in Python on top of others that can be looked at."""
    return isinstance(func, types.FunctionType) and func.__module__ == F.__name__


@cache
def without_dispatch(func: Any) -> Handler:
    """Return the function as it is for plain tensors; it would hand itself to the mode for ever."""
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
