"""Parameters that do not multiply rows: tensors derived from them, and copies of them per row.

A parameter that meets no example (positions looked up in a table, a transposed weight) gives a
*derived* tensor. It is recorded like a parameter, and differentiated back to the parameters once
the backward pass is done. A parameter that meets every element (a bias, a class token) is replaced
by one copy per row of the examples, and autograd does the rest.
"""

from __future__ import annotations

from collections.abc import KeysView, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from microclip.engines.base import CannotFuseError
from microclip.engines.gradients import nodes_from
from microclip.engines.single_pass.contributions import Contribution, Groups, Materialized
from microclip.engines.single_pass.owners import (
    DERIVED,
    Owned,
    arranged,
    refuse_unowned_gradients,
)
from microclip.engines.single_pass.torch_functions import map_tensors
from microclip.engines.single_pass.tracker import Tracker

if TYPE_CHECKING:
    from microclip.engines.single_pass.recorder import Recorder

MOST_ELEMENTS = 2**26  # of gradients that are mostly zeros


@dataclass(frozen=True)
class DerivedTensor:
    """A tensor computed from parameters alone, as it was when examples met it."""

    edge: GradientEdge  # later in-place changes are not part of it
    shape: torch.Size
    leaves: dict[str, Tensor]  # stand-ins for all the parameters, by name

    def pull_back(self, gradients: Tensor) -> dict[str, Tensor]:
        """Return the parameters' gradients, per micro-batch, given those of this tensor."""
        names = list(self.leaves)
        try:
            found = self._backward(gradients, True)
        except RuntimeError:  # something on the way cannot be vectorized
            rows = [self._backward(gradient, False) for gradient in gradients]
            found = tuple(
                None if each[0] is None else torch.stack(list(each))
                for each in zip(*rows, strict=True)
            )
        return {n: g for n, g in zip(names, found, strict=True) if g is not None}

    def _backward(self, gradient: Tensor, batched: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            (self.edge,),
            list(self.leaves.values()),
            (gradient,),
            retain_graph=True,
            is_grads_batched=batched,
            allow_unused=True,
        )


class DerivedTensors:
    """The derived tensors that examples have met, by a name made up for each.

    Args:
        names: The parameters' names by id; stand-ins are added to it.
        tracker: Knows which tensors are derived.
        groups: The micro-batches.
    """

    def __init__(self, names: dict[int, str], tracker: Tracker, groups: Groups) -> None:
        self._names = names
        self._tracker = tracker
        self._groups = groups
        self._known: dict[str, DerivedTensor] = {}
        self.leaves: dict[str, Tensor] = {}  # stand-ins for parameters

    @property
    def names(self) -> KeysView[str]:
        """Return the names made up so far; a live view."""
        return self._known.keys()

    def may_reach(self, name: str) -> bool:
        """Whether a parameter may get more contributions by way of derived tensors."""
        return bool(self._known) and name in self.leaves

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute from parameters alone, keeping the graph back to them."""
        return func(*self._stand_in(args), **self._stand_in(kwargs))

    def _stand_in(self, tree: Any) -> Any:
        """Replace parameters by separate leaves, where the graph ends."""

        def leaf(tensor: Tensor) -> Tensor:
            name = self._names.get(id(tensor))
            return tensor if name is None else self._leaf(name, tensor)

        return map_tensors(leaf, tree)

    def _leaf(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self.leaves:
            with self._tracker.paused():
                found = tensor.detach()
            self.leaves[name] = found.requires_grad_()
            self._names[id(found)] = name  # some functions return their argument
            self._tracker.set(found, DERIVED)
        return self.leaves[name]

    def name(self, tensor: Tensor) -> str:
        """Return the name that a derived tensor is recorded under."""
        edge = get_gradient_edge(tensor)
        for name, known in self._known.items():
            if known.edge == edge:
                return name
        name = f"{self._origin(edge)} (derived {len(self._known)})"
        self._known[name] = DerivedTensor(edge, tensor.shape, self.leaves)
        return name

    def _origin(self, edge: GradientEdge) -> str:
        """Return a parameter that a derived tensor is made of, for messages."""
        for node in nodes_from(edge.node):
            name = self._names.get(id(getattr(node, "variable", None)))
            if name is not None:
                return name
        return "something"

    def pull_back(
        self, contributions: dict[str, list[Contribution]]
    ) -> dict[str, list[Contribution]]:
        """Remove the contributions to derived tensors, and return what the parameters get."""
        found: dict[str, list[Contribution]] = {}
        for name, derived in self._known.items():
            if name not in contributions:
                continue
            shape = (len(self._groups), *derived.shape)
            total: Tensor | None = None
            for contribution in contributions.pop(name):
                gradient = contribution.materialize(self._groups).reshape(shape)
                total = gradient if total is None else total + gradient
            assert total is not None
            for origin, gradient in derived.pull_back(total).items():
                found.setdefault(origin, []).append(Materialized(gradient))
        return found


def copies_per_row(
    recorder: Recorder, tensor: Tensor, name: str, shape: Sequence[int], state: Owned
) -> Tensor:
    """Return a parameter as copies, one for each row of the examples' axis that it will meet.

    What the backward pass brings to a copy is the gradient of the row's owner.

    Args:
        recorder: Gets the contributions.
        tensor: The parameter, or a tensor derived from it.
        name: Its name.
        shape: What it will be broadcast to.
        state: Who owns that.
    """
    with recorder.tracker.paused():
        value, axis = tensor.detach(), state.axis
        mine: Owned = state
        whole = False  # it has that many rows itself, and each belongs to one owner
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
    recorder.expect(name)
    note = _note_whole if whole or axis is None else _note_copies

    def take(d: Tensor) -> None:
        if recorder.is_final:
            note(recorder, name, tensor.shape, mine, d)

    copies.register_hook(take)  # type: ignore[no-untyped-call]
    return recorder.own(copies, mine)


def _note_copies(recorder: Recorder, name: str, shape: torch.Size, state: Owned, d: Tensor) -> None:
    refuse_unowned_gradients(d, state.axis, state.owners, name)
    each = recorder.materialized(arranged(d, state.axis, state.owners)).gradients
    recorder.on_contribution(name, Materialized(each.reshape(len(each), *shape)))


def _note_whole(recorder: Recorder, name: str, shape: torch.Size, state: Owned, d: Tensor) -> None:
    """Every micro-batch's gradient is that of its own rows, and 0 elsewhere."""
    count = len(recorder.groups)
    if count * d.numel() > MOST_ELEMENTS:
        raise CannotFuseError(
            f"Parameter {name!r} of shape {tuple(shape)} has rows that belong to different "
            "examples: one gradient per micro-batch would take too much memory."
        )
    refuse_unowned_gradients(d, state.axis, state.owners, name)
    separate = separate_microbatches(recorder.groups, d, state)
    recorder.on_contribution(name, Materialized(separate.reshape(count, *shape)))


def separate_microbatches(groups: Groups, d: Tensor, state: Owned) -> Tensor:
    """Return one copy of d per micro-batch, with zeros wherever d belongs to another one."""
    numbers = torch.arange(len(groups), device=d.device)
    microbatch = groups.per_example(numbers)
    owners = state.elements(d.shape, d.device)
    of = torch.where(owners < 0, -1, microbatch[owners.clamp(min=0)])
    mask = of.unsqueeze(0) == numbers.view(-1, *(1,) * d.dim())
    return torch.where(mask, d.unsqueeze(0), 0)
