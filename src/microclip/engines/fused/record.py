"""Recording how parameters are used: the weights' own gradient work is taken out of backward.

Inside `Recorder`, every torch function that gets a trainable parameter is replaced by one that
calculates the same, passes gradients on to its inputs, and notes what the parameter's gradient is
made of. The replacements are in `layers` and `anything`; what they cannot do is refused by name.

The recorder also follows which tensors depend on the examples. A parameter that meets none of
them (positions looked up in a table, a transposed weight) gives a *derived* tensor, which is
recorded like a parameter and differentiated back to it at the end.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from microclip.engines.base import CannotFuseError
from microclip.engines.fused.budget import Meter
from microclip.engines.fused.formed import Formed, Use
from microclip.engines.fused.groups import Groups
from microclip.engines.fused.plan import Weight

_MARK = "_microclip_follows"  # an attribute of tensors; a weak table of them takes far longer
_serials = itertools.count(1)
_CONTAINERS = (list, tuple, dict)

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
        is_tight: bool = False,
    ) -> None:
        super().__init__()
        self.is_tight = is_tight  # memory goes before time
        self._handlers = handlers
        self.anything = anything  # for functions that have no handler
        self.groups = groups
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.expected: dict[str, int] = {}  # how many uses the backward pass will deliver
        self.weights: dict[str, Weight] = {}  # those that multiplied rows, as last seen
        self.derived: dict[str, Derived] = {}
        self.on_use: Callable[[str, Use], None] = _nobody
        self.arrangement: Arrangement = as_it_is
        self._parameters = parameters
        self._leaves: dict[str, Tensor] = {}
        self._meter: tuple[Any, Any] | None = None  # hooks of our own
        self._serial = next(_serials)  # marks the tensors that depend on the examples
        for tensor in examples:
            self.follow(tensor)
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
        # called for everything that a model does: it must be quick
        follows = uses = False
        names, serial = self.names, self._serial
        for argument in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(argument, Tensor):
                tensors: Sequence[Tensor] = (argument,)
            elif isinstance(argument, _CONTAINERS):
                tensors = tensors_in(argument)
            else:
                continue
            for tensor in tensors:
                if getattr(tensor, _MARK, 0) == serial:
                    follows = True
                if id(tensor) in names:
                    uses = True
        if uses and torch.is_grad_enabled():
            result = self._record(func, args, kwargs or {}, follows)
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)
        if follows:
            if isinstance(result, Tensor):
                self.follow(result)
            elif isinstance(result, _CONTAINERS):
                for tensor in tensors_in(result):
                    self.follow(tensor)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, follows: bool) -> Any:
        if func in self._handlers:
            return self._handlers[func](self, *args, **kwargs)
        if is_composite(func):
            with self:  # look inside
                return without_dispatch(func)(*args, **kwargs)
        if not follows:
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
        return getattr(tensor, _MARK, 0) == self._serial

    def follow(self, tensor: Tensor) -> Tensor:
        """Take a tensor as one that has the examples along its first dimension."""
        setattr(tensor, _MARK, self._serial)
        return tensor

    def expect(self, *names: str | None) -> None:
        """Count uses that the backward pass will deliver."""
        if torch._C._autograd._top_saved_tensors_default_hooks(False) not in (None, self._meter):
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

    def weights_used_once(self) -> dict[str, Weight]:
        """Return the weights that offer a choice of how their gradients are kept."""
        return {
            name: weight
            for name, weight in self.weights.items()
            if self.expected[name] == 1 and name not in self.derived
        }

    def formed(self, values: Tensor) -> Formed:
        """Add up (examples, n, ...) within micro-batches."""
        return Formed(self.groups.sum_rows(values))

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the examples along the first dimension as (examples, n, width)."""
        examples = self.groups.examples
        if tensor.dim() == 3 and tensor.shape[0] == examples:
            return tensor
        return tensor.reshape(examples, -1, tensor.shape[-1])

    def can_tap(self, x: Tensor) -> bool:
        """Whether a function of x can be left to autograd, parameters kept out, and tapped.

        Not where x is data, since then nothing would come back, nor where autocast will cast it.
        """
        return x.requires_grad and not torch.is_autocast_enabled(x.device.type)

    def tap(self, output: Tensor, note: Callable[..., None], *inputs: Tensor) -> Tensor:
        """Let `note` have some inputs of a function, and what the backward pass brings it.

        That takes less time than a function with a backward of its own.
        """
        held, meter = list(inputs), self._meter
        if meter:
            meter[0](inputs[0])

        def take(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if not held:
                raise CannotFuseError(
                    "The single-pass engine cannot follow losses that are made of gradients: "
                    "what they are made of is differentiated twice."
                )
            if meter:
                meter[1](held[0])
            d = gradients[0].contiguous()  # once for all that is done with it
            note(*held, d)
            held.clear()  # the graph lives on until the step ends
            return None if d is gradients[0] else (d, *gradients[1:])

        # a view's own place in the graph would be gone once somebody changes it in place
        node = output._base.grad_fn if output._is_view() else output.grad_fn  # type: ignore[union-attr]
        assert node is not None
        node.register_prehook(take)
        return output

    def let_go(self) -> None:
        """Forget whom uses are told.

        They hold tensors, whose graphs hold this recorder: a circle that Python's garbage collector
        does not see, since it goes through autograd.
        """
        self.on_use = _nobody

    @contextmanager
    def metered(self, meter: Meter | None) -> Iterator[None]:
        """Inside the block, saved tensors are counted."""
        if meter is None:
            yield
            return
        self._meter = (meter.save, meter.use)
        with torch.autograd.graph.saved_tensors_hooks(*self._meter):
            yield

    @contextmanager
    def arranged(self, arrangement: Arrangement) -> Iterator[None]:
        """Inside the block, tensors have their examples elsewhere."""
        before, self.arrangement = self.arrangement, arrangement
        try:
            yield
        finally:
            self.arrangement = before


def as_it_is(tensor: Tensor) -> Tensor:
    """Arrange nothing: the examples are along the first dimension."""
    return tensor


def _nobody(name: str, use: Use) -> None:
    """Take no note."""


def apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Call a function with a backward of its own."""
    if torch._C._are_functorch_transforms_active():
        return cast(Tensor, function.apply(*args))  # type: ignore[no-untyped-call]
    # the same without a look at every argument for what such a transform may have left
    found: Tensor = super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
    return found


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors among nested arguments."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, _CONTAINERS):
        return found
    for value in tree:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, _CONTAINERS):
            found.extend(tensors_in(value))
    return found


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
