"""Recording how parameters are used: the weights' own gradient work is taken out of backward.

Inside `Recorder`, every torch function that gets a trainable parameter is replaced by one that
calculates the same, passes gradients on to its inputs, and notes what the parameter's gradient is
made of. The replacements are in `layers` and `anything`; what they cannot do is refused by name.
Which example a row belongs to is the tracker's business.

A parameter that meets no example (positions looked up in a table, a transposed weight) gives a
*derived* tensor, which is recorded like a parameter and differentiated back to it at the end.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from microclip.engines.base import CannotFuseError
from microclip.engines.losses import nodes_from
from microclip.engines.single_pass.budget import Meter
from microclip.engines.single_pass.formed import Formed, Use
from microclip.engines.single_pass.groups import Groups
from microclip.engines.single_pass.owners import (
    DERIVED,
    Opaque,
    Owned,
    Owners,
    State,
    arranged,
    refuse_gradients_of_nobody,
)
from microclip.engines.single_pass.plan import Weight
from microclip.engines.single_pass.shortcuts import SHORTCUTS
from microclip.engines.single_pass.tracker import Tracker
from microclip.microbatches import axis_of

_CONTAINERS = (list, tuple, dict)

Handler = Callable[..., Any]


@dataclass(frozen=True)
class Derived:
    """A tensor calculated from parameters alone, as it was when examples met it."""

    edge: GradientEdge  # later changes in place are not of this one
    shape: torch.Size
    leaves: dict[str, Tensor]  # stand-ins of all the parameters, by name

    def pull_back(self, gradients: Tensor) -> dict[str, Tensor]:
        """Return the parameters' gradients, per micro-batch, from those of this tensor."""
        names = list(self.leaves)
        try:
            found = self._back(gradients, True)
        except RuntimeError:  # something on the way cannot be vectorised
            rows = [self._back(gradient, False) for gradient in gradients]
            found = tuple(
                None if each[0] is None else torch.stack(list(each))
                for each in zip(*rows, strict=True)
            )
        return {n: g for n, g in zip(names, found, strict=True) if g is not None}

    def _back(self, gradient: Tensor, batched: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            (self.edge,),
            list(self.leaves.values()),
            (gradient,),
            retain_graph=True,
            is_grads_batched=batched,
            allow_unused=True,
        )


class HostReads(TorchFunctionMode):
    """Notes the values that a model reads on the host: by them it can do what no tensor shows."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    def take(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Read a value, and keep it."""
        value = func(*args, **(kwargs or {}))
        self.values.append(value.tolist() if hasattr(value, "tolist") else value)
        return value

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in HOST_READS:
            return self.take(func, args, kwargs)
        return func(*args, **(kwargs or {}))


# functions whose other argument only says what form the first is to have
TAKE_THE_FORM = frozenset(
    getattr(Tensor, name) for name in ("to", "type_as", "view_as", "reshape_as", "resize_as")
)
HOST_READS = frozenset(
    getattr(Tensor, name)
    for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__")
)


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
        model: nn.Module | None = None,
        adopts: bool = True,
        batch_dim: int = 0,
    ) -> None:
        super().__init__()
        self.is_tight = is_tight  # memory goes before time
        self.adopts = adopts  # constants with a row for each example are taken for theirs
        self.adopted = False  # whether any were
        self._handlers = handlers
        self.anything = anything  # for functions that have no handler
        self.groups = groups
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.expected: dict[str, int] = {}  # how many uses the backward pass will deliver
        self.weights: dict[str, Weight] = {}  # those that multiplied rows, as last seen
        self.derived: dict[str, Derived] = {}
        self.on_use: Callable[[str, Use], None] = _nobody
        self.reads = HostReads()
        self.reads_of_several = False  # whether what was read depends on several examples
        self.is_final = False  # whether the backward pass at work is the one of the losses
        self.parameters = parameters
        self._leaves: dict[str, Tensor] = {}
        self._meter: tuple[Any, Any] | None = None  # hooks of our own
        self._guesses = Owners.guesses
        self.tracker = Tracker(groups.examples, model)
        self.tracker.parameters = frozenset(self.names)
        self._derived_ids = self.tracker.derived
        self._examples = examples
        self._batch_dim = batch_dim
        device = next(iter(parameters.values())).device
        # makes outputs differentiable where inputs are data and weights are kept out
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block, owners are followed and uses of parameters are noted."""
        try:
            for tensor in self._examples:
                axis = axis_of(tensor, self._batch_dim)
                along = self.tracker.along_first
                self.tracker.set(tensor, along if axis == 0 else Owned(axis, along.owners))
            with _without_compiling(), self.tracker, self:
                yield
        finally:
            for tensor in self._examples:
                tensor.__dict__.pop(self.tracker.mark, None)
            self.tracker.close()

    def watched(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that is watched while it is at work."""

        def call(argument: Any) -> Any:
            with self.watching():
                return function(argument)

        return call

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # called for everything that a model does: it must be quick
        if func in HOST_READS:
            state = self.state(args[0])
            together = isinstance(state, Opaque) or (isinstance(state, Owned) and state.axis == 0)
            self.reads_of_several = self.reads_of_several or together
            return self.reads.take(func, args, kwargs)
        question = SHORTCUTS.get(func)
        if question is not None and args and not (kwargs and "out" in kwargs):
            state = self.tracker.state(args[0])
            if (
                isinstance(state, Owned)
                and state.axis == 0
                and question(self, state, args, kwargs or {})
            ):
                return self._unchanged(func, args, kwargs, state)
        names, derived = self.names, self._derived_ids
        met = None
        for argument in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(argument, Tensor):
                if id(argument) in names or id(argument) in derived:
                    met = argument
                    break
            elif isinstance(argument, _CONTAINERS):
                for tensor in tensors_in(argument):
                    if id(tensor) in names or id(tensor) in derived:
                        met = tensor
                        break
        if met is None or not torch.is_grad_enabled():
            return func(*args, **kwargs) if kwargs else func(*args)
        self.tracker.trail.add((func, names.get(id(met))))
        return self.record(func, args, kwargs or {})

    def _unchanged(self, func: Any, args: Any, kwargs: Any, state: Owned) -> Any:
        """Carry out a function that leaves the examples where they are."""
        tracker = self.tracker
        tracker.trail.add((func, None))
        with self.untracked():
            result = func(*args, **kwargs) if kwargs else func(*args)
        for each in (result,) if isinstance(result, Tensor) else result:
            tracker.set(each, state)
        return result

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out a function that gets something recorded."""
        from microclip.engines.single_pass import elementwise

        if torch._C._are_functorch_transforms_active():
            raise CannotFuseError(
                "The single-pass engine cannot look into transforms of torch.func, which parameter "
                f"{self.first_name((args, kwargs))!r} is used in."
            )
        if self._meets_opaque((*args, *kwargs.values()) if kwargs else args):
            return self.derive(func, args, kwargs)  # a refusal only if a loss depends on it
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(self, *args, **kwargs)
        if is_composite(func):
            with self:  # look inside
                return without_dispatch(func)(*args, **kwargs)
        if func in TAKE_THE_FORM and not self.depends(args[0]):
            return self.derive(func, args, kwargs)
        if elementwise.is_pointwise(func):
            return elementwise.pointwise(self, func, args, kwargs)
        if not self.any_depends(args, kwargs):
            return self.derive(func, args, kwargs)
        return self.anything(self, func, args, kwargs)

    def _meets_opaque(self, arguments: Any) -> bool:
        """Whether any tensor among nested arguments is opaque."""
        parameters = self.tracker.parameters
        for argument in arguments:
            if isinstance(argument, Tensor):
                if id(argument) not in parameters and self._is_opaque(argument):
                    return True
            elif isinstance(argument, _CONTAINERS) and self._meets_opaque(
                argument.values() if isinstance(argument, dict) else argument
            ):
                return True
        return False

    def _is_opaque(self, tensor: Tensor) -> bool:
        """Whether nobody knows whose a tensor is; integers are taken for what they are."""
        if not isinstance(self.state(tensor), Opaque):
            return False
        return tensor.is_floating_point() or tensor.is_complex()

    def derive(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calculate from parameters alone, keeping the way back to them."""
        return func(*self._stand_in(args), **self._stand_in(kwargs))

    def _stand_in(self, tree: Any) -> Any:
        """Replace parameters by leaves of their own, where the way back ends."""

        def leaf(tensor: Tensor) -> Tensor:
            name = self.names.get(id(tensor))
            return tensor if name is None else self._leaf(name, tensor)

        return map_tensors(leaf, tree)

    def _leaf(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._leaves:
            with self.tracker.paused():
                found = tensor.detach()
            self._leaves[name] = found.requires_grad_()
            self.names[id(found)] = name  # some functions return what they are given
            self.tracker.set(found, DERIVED)
        return self._leaves[name]

    def name(self, tensor: Tensor | None) -> str | None:
        """Return the name a tensor is recorded under, or None for what is not."""
        if tensor is None:
            return None
        found = self.names.get(id(tensor))
        if found is None and self.state(tensor) is DERIVED:
            return self._name_of_derived(tensor)
        return found

    def _name_of_derived(self, tensor: Tensor) -> str:
        edge = get_gradient_edge(tensor)
        for name, known in self.derived.items():
            if known.edge == edge:
                return name
        name = f"{self._origin(edge)} (derived {len(self.derived)})"
        self.derived[name] = Derived(edge, tensor.shape, self._leaves)
        return name

    def _origin(self, edge: GradientEdge) -> str:
        """Return a parameter that a derived tensor is made of, to speak of it."""
        for node in nodes_from(edge.node):
            name = self.names.get(id(getattr(node, "variable", None)))
            if name is not None:
                return name
        return "something"

    def is_recorded(self, tensor: Any) -> bool:
        """Whether a tensor is a parameter, or made of parameters alone."""
        return isinstance(tensor, Tensor) and (
            id(tensor) in self.names or self.state(tensor) is DERIVED
        )

    def first_name(self, arguments: Any) -> str | None:
        """Return the first parameter among a function's arguments, to speak of it."""
        found = (tensor for tensor in tensors_in(arguments) if self.is_recorded(tensor))
        return next((self.name(tensor) for tensor in found), None)

    def state(self, tensor: Any) -> State | None:
        """Return what is known of a tensor."""
        return self.tracker.state(tensor)

    def depends(self, tensor: Any) -> bool:
        """Whether a tensor depends on the examples."""
        return isinstance(self.state(tensor), Owned | Opaque)

    def any_depends(self, *arguments: Any) -> bool:
        """Whether any of these does."""
        return any(self.depends(tensor) for tensor in tensors_in(arguments))

    def owned(self, tensor: Tensor, name: str | None) -> Owned:
        """Return who owns the rows that a parameter meets, or refuse."""
        state = self.state(tensor)
        if isinstance(state, Opaque):
            raise CannotFuseError(
                f"The single-pass engine cannot tell which example owns what: parameter {name!r} "
                f"meets the result of {state.reason}."
            )
        if not isinstance(state, Owned):
            raise CannotFuseError(f"Parameter {name!r} takes part in a product without examples.")
        if state.axis is None and tensor.dim():
            vector = state.owners.vector()[:1].expand(tensor.shape[0])
            return Owned(0, Owners(state.owners.examples, base=vector))
        return state

    def usual(self, x: Tensor, *parameters: Tensor | None) -> Owned | None:
        """Return who owns x, if it has the examples first and the others are parameters.

        So it is nearly always, and then there is nothing else to ask.
        """
        state = self.tracker.state(x)
        if not isinstance(state, Owned) or state.axis != 0:
            return None
        names = self.names
        for parameter in parameters:
            if parameter is not None and id(parameter) not in names:
                return None
        return state

    def own(self, tensor: Tensor, state: State | None) -> Tensor:
        """Say who owns a result."""
        if isinstance(state, Owned) and state.axis is not None and state.owners.base is not None:
            state = state.alone
        self.tracker.set(tensor, state)
        return tensor

    def adopt(self, tensor: Tensor) -> Tensor:
        """Take a constant with a row for each example for theirs, if it looks so.

        That may be a mistake: then it does not go with the owners of what it meets, the result is
        opaque, and the engine tries again without.
        """
        examples = self.groups.examples
        if (
            self.adopts
            and examples > 1
            and tensor.dim() > 1
            and tensor.shape[0] == examples
            and self.state(tensor) is None
        ):
            return self.adopt_as(tensor, self.tracker.along_first)
        return tensor

    def adopt_as(self, tensor: Tensor, state: Owned) -> Tensor:
        """Return a constant, known to belong to examples."""
        self.adopted = True
        with self.untracked():
            alias = tensor.detach()
        return self.own(alias, state)

    def untracked(self) -> Any:
        """Inside the block owners are not followed, which takes less time."""
        return torch._C._DisableTorchDispatch()

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

    def rows(self, tensor: Tensor, state: Owned) -> Tensor:
        """Return a tensor as (examples, n, width), with the rows of each example."""
        owners = state.owners
        if owners.base is None and state.axis == 0 and owners.outer == owners.inner == 1:
            if tensor.dim() == 3:
                return tensor
            rows = math.prod(tensor.shape[1:-1])
            return tensor.reshape(owners.examples, rows, tensor.shape[-1])
        found = arranged(tensor, state.axis, owners)
        rows = math.prod(found.shape[1:-1])
        return found.reshape(owners.examples, rows, tensor.shape[-1])

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
        version = inputs[0]._version
        if meter:
            meter[0](inputs[0])

        def take(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if not self._counts() or not held:
                return None
            if meter:
                meter[1](held[0])
            if held[0]._version != version:  # as autograd does, which does not hold it here
                raise RuntimeError(
                    "One of the tensors that the gradient of a parameter is made of has been "
                    "modified by an in-place operation since the forward pass."
                )
            d = gradients[0].contiguous()  # once for all that is done with it
            note(*held, d)
            held.clear()  # the graph lives on until the step ends
            return None if d is gradients[0] else (d, *gradients[1:])

        # a view's own place in the graph would be gone once somebody changes it in place
        node = output._base.grad_fn if output._is_view() else output.grad_fn  # type: ignore[union-attr]
        assert node is not None
        node.register_prehook(take)
        return output

    def noted(self, note: Callable[..., None]) -> Callable[..., None]:
        """Return what takes note of gradients, but only of the losses'."""

        def only_at_last(*values: Tensor) -> None:
            if self._counts():
                note(*values)

        return only_at_last

    def _counts(self) -> bool:
        """Whether the backward pass at work is that of the losses, and not inside the forward pass.

        There, a gradient that is to be differentiated itself would miss the parameters.
        """
        if torch.is_grad_enabled():
            raise CannotFuseError(
                "The single-pass engine cannot follow losses that are made of gradients: what they "
                "are made of is differentiated twice."
            )
        return self.is_final

    def rows_of_its_own(
        self, tensor: Tensor, name: str, shape: Sequence[int], state: Owned
    ) -> Tensor:
        """Return a parameter as copies, one for each row of the examples' axis that it will meet.

        What the backward pass brings to a copy is the gradient of the row's owner.

        Args:
            tensor: The parameter, or something derived from it.
            name: Its name.
            shape: What it will be broadcast to.
            state: Who owns that.
        """
        with self.tracker.paused():
            value, axis = tensor.detach(), state.axis
            mine: Owned = state
            whole = False  # it has as many rows as there are, each of them an owner's
            if axis is not None:
                place = axis - (len(shape) - tensor.dim())
                if place < 0:
                    value = value.reshape((1,) * -place + tuple(value.shape))
                    place = 0
                whole = value.shape[place] != 1
                if not whole:
                    sizes = list(value.shape)
                    sizes[place] = shape[axis]
                    value = value.expand(sizes)
                mine = Owned(place, state.owners)
            copies = value.detach().requires_grad_()
        self.expect(name)
        note = self._note_whole if whole or axis is None else self._note_copies

        def take(d: Tensor) -> None:
            if self.is_final:
                note(name, tensor.shape, mine, d)

        copies.register_hook(take)  # type: ignore[no-untyped-call]
        return self.own(copies, mine)

    def _note_copies(self, name: str, shape: torch.Size, state: Owned, d: Tensor) -> None:
        refuse_gradients_of_nobody(d, state.axis, state.owners, name)
        each = self.formed(arranged(d, state.axis, state.owners)).gradients
        self.on_use(name, Formed(each.reshape(len(each), *shape)))

    def _note_whole(self, name: str, shape: torch.Size, state: Owned, d: Tensor) -> None:
        """The gradient of every micro-batch is that of its own rows, and 0 elsewhere."""
        count = len(self.groups)
        if count * d.numel() > MOST_ELEMENTS:
            raise CannotFuseError(
                f"Parameter {name!r} is spread over the rows of all examples, tensor by tensor of "
                f"shape {tuple(shape)}: its gradients would take too much memory."
            )
        refuse_gradients_of_nobody(d, state.axis, state.owners, name)
        self.on_use(name, Formed(self.apart(d, state).reshape(count, *shape)))

    def apart(self, d: Tensor, state: Owned) -> Tensor:
        """Return what belongs to each micro-batch, with zeros elsewhere."""
        numbers = torch.arange(len(self.groups), device=d.device)
        microbatch = self.groups.per_example(numbers)
        owners = state.elements(d.shape, d.device)
        of = torch.where(owners < 0, -1, microbatch[owners.clamp(min=0)])
        mask = of.unsqueeze(0) == numbers.view(-1, *(1,) * d.dim())
        return torch.where(mask, d.unsqueeze(0), 0)

    def pulled_back(self, uses: dict[str, list[Use]]) -> dict[str, list[Use]]:
        """Take the uses of derived tensors away, and return what they are to the parameters."""
        found: dict[str, list[Use]] = {}
        for name, derived in self.derived.items():
            if name not in uses:
                continue
            shape = (len(self.groups), *derived.shape)
            total: Tensor | None = None
            for use in uses.pop(name):
                gradient = use.form(self.groups).reshape(shape)
                total = gradient if total is None else total + gradient
            assert total is not None
            for origin, gradient in derived.pull_back(total).items():
                found.setdefault(origin, []).append(Formed(gradient))
        return found

    def check_nothing_unseen(self) -> None:
        """Make sure that no gradient went past the recorder."""
        for name, tensor in (*self.parameters.items(), *self._leaves.items()):
            if tensor.grad is not None:
                raise CannotFuseError(
                    f"Parameter {name!r} got a gradient in a way that the single-pass engine "
                    "cannot see, as reentrant checkpointing and custom functions have it."
                )

    def in_order(self, losses: Tensor) -> Tensor:
        """Return the losses in the order of the examples, each its own example's, or refuse."""
        state = self.state(losses)
        if isinstance(state, Opaque):
            raise CannotFuseError(
                "The single-pass engine cannot tell which example owns which loss: they are made "
                f"of the result of {state.reason}."
            )
        if not isinstance(state, Owned):
            raise CannotFuseError("The losses do not seem to depend on the examples.")
        if self.tracker.along_first.owners.joined(state.owners) is not None and state.axis == 0:
            return losses
        if self.adopted or Owners.guesses != self._guesses:
            # an order that rests on a guess is none
            raise CannotFuseError(
                "The losses are not in the order of the examples: loss i must be of example i."
            )
        owners = self.owned(losses, None).owners.vector(losses.device)
        order = owners.argsort()
        if not torch.equal(owners[order], torch.arange(len(losses), device=losses.device)):
            raise CannotFuseError(
                "The single-pass engine needs one loss of every example, but some examples have "
                f"several: they belong to examples {owners.tolist()}."
            )
        return losses[order]

    def let_go(self) -> None:
        """Forget whom uses are told.

        They hold tensors, whose graphs hold this recorder: a circle that Python's garbage collector
        does not see, since it goes through autograd.
        """
        self.on_use = _nobody
        self.is_final = False

    @contextmanager
    def metered(self, meter: Meter | None) -> Iterator[None]:
        """Inside the block, saved tensors are counted."""
        if meter is None:
            yield
            return
        self._meter = (meter.save, meter.use)
        with torch.autograd.graph.saved_tensors_hooks(*self._meter):
            yield


def _without_compiling() -> AbstractContextManager[Any]:
    """Let compiled models run as they are written, so that there is something to see."""
    if "torch._dynamo" not in sys.modules:  # nobody has compiled anything
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


MOST_ELEMENTS = 2**26  # of gradients that are mostly zeros


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
    if isinstance(tree, list | tuple) and type(tree) in (list, tuple, torch.Size):
        return type(tree)([map_tensors(function, value) for value in tree])
    return tree


def is_composite(func: Any) -> bool:
    """Whether a function is written in Python on top of others that can be looked at."""
    return (
        isinstance(func, types.FunctionType)
        and func.__module__ == F.__name__
        and "if_true" not in func.__code__.co_freevars  # one of two, chosen by an argument
    )


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
