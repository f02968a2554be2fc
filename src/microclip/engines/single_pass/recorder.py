"""Recording how parameters are used, while their gradients are kept out of the backward pass.

Inside `Recorder`, every torch function that gets a trainable parameter is replaced by one that
computes the same, passes gradients on to its inputs, and reports what the parameter's gradient is
made of, as a contribution. The replacements are listed in `handlers`; what they cannot do is
refused by name. Which example a row belongs to is up to the tracker, and tensors made of
parameters alone are in `derived`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from microclip.batches import axis_of
from microclip.engines.base import CannotFuseError
from microclip.engines.single_pass import checkpointing
from microclip.engines.single_pass.contributions import Contribution, Groups, Materialized
from microclip.engines.single_pass.derived import DerivedTensors
from microclip.engines.single_pass.memory import MemoryMeter, Weight
from microclip.engines.single_pass.owners import (
    DERIVED,
    Opaque,
    Owned,
    Owners,
    State,
    arranged,
)
from microclip.engines.single_pass.shortcuts import SHORTCUTS
from microclip.engines.single_pass.torch_functions import (
    CONTAINERS,
    HOST_READS,
    TAKE_THE_FORM,
    Handler,
    HostReads,
    is_composite,
    tensors_in,
    without_compiling,
    without_dispatch,
)
from microclip.engines.single_pass.tracker import Tracker

REPLAYED = "made again"  # the name of derived tensors in a segment that runs again


class Recorder(TorchFunctionMode):
    """Records what the functions called inside the block do with the parameters.

    Args:
        parameters: The trainable parameters, by name.
        groups: Which examples make up which micro-batch.
        examples: The tensors of the batch.
        handlers: What to do with functions that get a parameter.
        vmap_fallback: What to do with functions that have no handler.
        is_tight: Whether saving memory comes before saving time.
        model: For messages.
        adopts: Whether constants with one row per example are assumed to belong to the examples.
        batch_dim: The dimension of the examples.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        groups: Groups,
        examples: list[Tensor],
        handlers: dict[Any, Handler],
        vmap_fallback: Handler,
        is_tight: bool = False,
        model: nn.Module | None = None,
        adopts: bool = True,
        batch_dim: int = 0,
    ) -> None:
        super().__init__()
        self.is_tight = is_tight
        self.adopts = adopts
        self.adopted = False  # whether any constant was adopted
        self._handlers = handlers
        self.vmap_fallback = vmap_fallback
        self.groups = groups
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.expected: dict[str, int] = {}  # how many contributions the backward pass will deliver
        self.weights: dict[str, Weight] = {}  # those that multiplied rows, as last seen
        self.on_contribution: Callable[[str, Contribution], None] = _ignore
        self.reads = HostReads()
        self.reads_of_several = False  # whether what was read depends on several examples
        self.is_final = False  # whether the current backward pass is that of the losses
        self.parameters = parameters
        self._meter: tuple[Any, Any] | None = None  # our own hooks
        self.meter: MemoryMeter | None = None
        self.has_segments = False  # whether any part of the model is checkpointed
        self.has_late_segments = False  # some of which are only recorded in the backward pass
        self.is_replaying = False  # whether such a segment is running again
        self._in_segment = False  # whether the latest function is part of one
        self._has_other_hooks = False  # or inside other hooks on saved tensors
        self._guesses = Owners.guesses
        self.tracker = Tracker(groups.examples, model)
        self.tracker.parameters = frozenset(self.names)
        self.derived = DerivedTensors(self.names, self.tracker, groups)
        self._derived_ids = self.tracker.derived
        self._examples = examples
        self._batch_dim = batch_dim
        device = next(iter(parameters.values())).device
        # makes outputs differentiable where the input is data and the weight is detached
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Track owners and record parameters inside the block."""
        try:
            for tensor in self._examples:
                axis = axis_of(tensor, self._batch_dim)
                along = self.tracker.along_first
                self.tracker.set(tensor, along if axis == 0 else Owned(axis, along.owners))
            with without_compiling(), self.tracker, self:
                yield
        except BaseException:
            self._unwatch()
            raise
        if not self.has_segments:  # which need all marks again
            self._unwatch()

    def _unwatch(self) -> None:
        for tensor in self._examples:
            tensor.__dict__.pop(self.tracker.mark, None)
        self.tracker.close()

    def watched(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that is watched while it runs."""

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
        # called for everything that a model does, so it has to be fast
        if func in HOST_READS:
            state = self.state(args[0])
            together = isinstance(state, Opaque) or (isinstance(state, Owned) and state.axis == 0)
            self.reads_of_several = self.reads_of_several or together
            return self.reads.take(func, args, kwargs)
        applies = SHORTCUTS.get(func)
        if applies is not None and args and not (kwargs and "out" in kwargs):
            state = self.tracker.state(args[0])
            if (
                isinstance(state, Owned)
                and state.axis == 0
                and applies(self, state, args, kwargs or {})
            ):
                return self._unchanged(func, args, kwargs, state)
        names, derived = self.names, self._derived_ids
        met = None
        for argument in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(argument, Tensor):
                if id(argument) in names or id(argument) in derived:
                    met = argument
                    break
            elif isinstance(argument, CONTAINERS):
                for tensor in tensors_in(argument):
                    if id(tensor) in names or id(tensor) in derived:
                        met = tensor
                        break
        if met is None or not torch.is_grad_enabled():
            if met is not None:
                checkpointing.prepare_reentrant(self)
            return func(*args, **kwargs) if kwargs else func(*args)
        self.tracker.trail.add((func, names.get(id(met))))
        return self.record(func, args, kwargs or {})

    def _unchanged(self, func: Any, args: Any, kwargs: Any, state: Owned) -> Any:
        """Call a function that leaves the examples where they are."""
        tracker = self.tracker
        tracker.trail.add((func, None))
        with self.untracked():
            result = func(*args, **kwargs) if kwargs else func(*args)
        for each in (result,) if isinstance(result, Tensor) else result:
            tracker.set(each, state)
        return result

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function that gets a parameter or a derived tensor."""
        from microclip.engines.single_pass import elementwise

        if torch._C._are_functorch_transforms_active():
            raise CannotFuseError(
                "The single-pass engine cannot look inside torch.func transforms, but parameter "
                f"{self.first_name((args, kwargs))!r} is used in one."
            )
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks in (None, self._meter):
            self._in_segment = self._has_other_hooks = False
        elif not self.is_replaying:
            self._in_segment = checkpointing.is_segment(self, hooks)
            self._has_other_hooks = not self._in_segment
        if self._meets_opaque((*args, *kwargs.values()) if kwargs else args):
            return self.derive(func, args, kwargs)  # refused only if a loss depends on it
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
        return self.vmap_fallback(self, func, args, kwargs)

    def _meets_opaque(self, arguments: Any) -> bool:
        """Whether any tensor among nested arguments is opaque."""
        parameters = self.tracker.parameters
        for argument in arguments:
            if isinstance(argument, Tensor):
                if id(argument) not in parameters and self._is_opaque(argument):
                    return True
            elif isinstance(argument, CONTAINERS) and self._meets_opaque(
                argument.values() if isinstance(argument, dict) else argument
            ):
                return True
        return False

    def _is_opaque(self, tensor: Tensor) -> bool:
        """Whether a tensor's owners are unknown; integers carry no gradient and do not count."""
        if not isinstance(self.state(tensor), Opaque):
            return False
        return tensor.is_floating_point() or tensor.is_complex()

    def derive(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute from parameters alone, keeping the graph back to them."""
        if self._in_segment or self.is_replaying:
            with checkpointing.saved_as_usual():
                return self.derived.compute(func, args, kwargs)
        return self.derived.compute(func, args, kwargs)

    def name(self, tensor: Tensor | None) -> str | None:
        """Return the name that a tensor is recorded under; None if it is not recorded."""
        if tensor is None:
            return None
        found = self.names.get(id(tensor))
        if found is None and self.state(tensor) is DERIVED:
            return REPLAYED if self.is_replaying else self.derived.name(tensor)
        return found

    def is_recorded(self, tensor: Any) -> bool:
        """Whether a tensor is a parameter, or made of parameters alone."""
        return isinstance(tensor, Tensor) and (
            id(tensor) in self.names or self.state(tensor) is DERIVED
        )

    def first_name(self, arguments: Any) -> str | None:
        """Return the first parameter among a function's arguments, for messages."""
        found = (tensor for tensor in tensors_in(arguments) if self.is_recorded(tensor))
        return next((self.name(tensor) for tensor in found), None)

    def state(self, tensor: Any) -> State | None:
        """Return what is known of a tensor."""
        return self.tracker.state(tensor)

    def depends(self, tensor: Any) -> bool:
        """Whether a tensor depends on the examples."""
        return isinstance(self.state(tensor), Owned | Opaque)

    def any_depends(self, *arguments: Any) -> bool:
        """Whether any tensor among nested arguments depends on the examples."""
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
            raise CannotFuseError(f"Parameter {name!r} multiplies no example.")
        if state.axis is None and tensor.dim():
            vector = state.owners.vector()[:1].expand(tensor.shape[0])
            return Owned(0, Owners(state.owners.examples, base=vector))
        return state

    def common_case(self, x: Tensor, *parameters: Tensor | None) -> Owned | None:
        """Return who owns x, if it has the examples first and the others are parameters.

        That is nearly always the case, and then nothing else needs to be checked.
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
        """Set the owners of a result."""
        if isinstance(state, Owned) and state.axis is not None and state.owners.base is not None:
            state = state.alone
        self.tracker.set(tensor, state)
        return tensor

    def adopt(self, tensor: Tensor) -> Tensor:
        """Assume that a constant with one row per example belongs to the examples.

        That may be wrong: then its owners do not match those of what it meets, the result is
        opaque, and the engine tries again without adopting anything.
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
        """Return a constant with the given owners."""
        self.adopted = True
        with self.untracked():
            alias = tensor.detach()
        return self.own(alias, state)

    def untracked(self) -> Any:
        """Do not track owners inside the block, which saves time."""
        return torch._C._DisableTorchDispatch()

    def expect(self, *names: str | None) -> None:
        """Count contributions that the backward pass will deliver."""
        if self.is_replaying:  # counted the first time
            return
        if self._has_other_hooks:
            raise CannotFuseError(
                "The single-pass engine cannot look inside hooks on saved tensors, except those "
                "of gradient checkpointing."
            )
        for name in names:
            if name is not None:
                self.expected[name] = self.expected.get(name, 0) + 1

    def weights_used_once(self) -> dict[str, Weight]:
        """Return the weights that can be kept as rows or as materialized gradients."""
        return {
            name: weight
            for name, weight in self.weights.items()
            if self.expected[name] == 1 and name not in self.derived.names
        }

    def materialized(self, values: Tensor) -> Materialized:
        """Sum (examples, n, ...) within each micro-batch."""
        return Materialized(self.groups.sum_rows(values))

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

    def can_hook_output(self, x: Tensor) -> bool:
        """Whether autograd can differentiate a function of x, with its output hooked.

        Not where x is data, since then no gradient would arrive, nor where autocast will cast it,
        nor in a checkpointed segment, where x must not be held.
        """
        if self._in_segment or self.is_replaying:
            return False
        return x.requires_grad and not torch.is_autocast_enabled(x.device.type)

    def hook_output(self, output: Tensor, note: Callable[..., None], *inputs: Tensor) -> Tensor:
        """Call `note` with inputs of a function and the gradient of its output.

        That is faster than a custom autograd function.
        """
        held, meter = list(inputs), self._meter
        version = inputs[0]._version
        if meter:
            meter[0](inputs[0])

        def take(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if not self._is_final_backward() or not held:
                return None
            if meter:
                meter[1](held[0])
            if held[0]._version != version:  # autograd would check it, but did not save it here
                raise RuntimeError(
                    "One of the tensors needed for the gradient of a parameter has been modified "
                    "by an in-place operation since the forward pass."
                )
            d = gradients[0].contiguous()  # once, for everything that reads it
            note(*held, d)
            held.clear()  # the graph lives until the step ends
            return None if d is gradients[0] else (d, *gradients[1:])

        # an in-place change of a view would replace its node in the graph
        node = output._base.grad_fn if output._is_view() else output.grad_fn  # type: ignore[union-attr]
        assert node is not None
        node.register_prehook(take)
        return output

    def final_only(self, note: Callable[..., None]) -> Callable[..., None]:
        """Return a `note` that ignores every backward pass but that of the losses."""

        def note_if_final(*values: Tensor) -> None:
            if self._is_final_backward():
                note(*values)

        return note_if_final

    def _is_final_backward(self) -> bool:
        """Whether this is the backward pass of the losses, not one inside the forward pass.

        In the latter, a gradient that is itself differentiated would miss the parameters.
        """
        if torch.is_grad_enabled():
            raise CannotFuseError(
                "The single-pass engine cannot follow losses that depend on gradients: their graph "
                "is differentiated twice."
            )
        return self.is_final

    def check_no_hidden_gradients(self) -> None:
        """Make sure that no gradient bypassed the recorder."""
        for name, tensor in (*self.parameters.items(), *self.derived.leaves.items()):
            if tensor.grad is not None:
                raise CannotFuseError(
                    f"Parameter {name!r} got a gradient in a way that the single-pass engine "
                    "cannot see. Custom autograd functions do this."
                )

    def complete(self, contributions: dict[str, list[Contribution]]) -> list[str]:
        """Finish collecting: follow derived tensors back to their parameters.

        Returns:
            The parameters that got more contributions by it.
        """
        self.check_no_hidden_gradients()
        more = self.derived.pull_back(contributions)
        for name, found in more.items():
            contributions.setdefault(name, []).extend(found)
        return list(more)

    def in_order(self, losses: Tensor) -> Tensor:
        """Return the losses in the order of the examples; refuse if they do not match up."""
        state = self.state(losses)
        if isinstance(state, Opaque):
            raise CannotFuseError(
                "The single-pass engine cannot tell which example owns which loss: they depend on "
                f"the result of {state.reason}."
            )
        if not isinstance(state, Owned):
            raise CannotFuseError("The losses do not seem to depend on the examples.")
        if self.tracker.along_first.owners.joined(state.owners) is not None and state.axis == 0:
            return losses
        if self.adopted or Owners.guesses != self._guesses:
            # an order that rests on a guess cannot be relied on
            raise CannotFuseError(
                "The losses are not in the order of the examples: loss i must be that of example i."
            )
        owners = self.owned(losses, None).owners.vector(losses.device)
        order = owners.argsort()
        if not torch.equal(owners[order], torch.arange(len(losses), device=losses.device)):
            raise CannotFuseError(
                "The single-pass engine needs one loss per example, but some examples have "
                f"several: the losses belong to examples {owners.tolist()}."
            )
        return losses[order]

    def release(self) -> None:
        """Drop the reference to whoever collects contributions.

        Contributions hold tensors whose graphs hold this recorder: a cycle through autograd, which
        Python's garbage collector cannot see.
        """
        self.on_contribution = _ignore
        self.is_final = False
        self._unwatch()

    @contextmanager
    def metered(self, meter: MemoryMeter | None) -> Iterator[None]:
        """Count saved tensors inside the block."""
        if meter is None:
            yield
            return
        self.meter, self._meter = meter, (meter.pack, meter.unpack)
        with torch.autograd.graph.saved_tensors_hooks(*self._meter):
            yield


def _ignore(name: str, contribution: Contribution) -> None:
    """Drop a contribution."""
