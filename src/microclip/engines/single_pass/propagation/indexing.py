"""Operations that select elements, put them somewhere, or join tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from microclip.engines.single_pass.owners import DERIVED, NO_OWNER, Opaque, Owned, Owners, State
from microclip.engines.single_pass.propagation.registry import (
    by_elements,
    combined,
    mixed,
    rule,
    trivial_state,
)
from microclip.engines.single_pass.tracker import Tracker


@rule("embedding")
def embedding(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Rows of a table."""
    table, indices = args[:2]
    rows, chosen = tracker.state(table), tracker.state(indices)
    if rows is None or rows is DERIVED:
        return trivial_state(tracker, func, [rows])[0] or chosen
    return index(tracker, func, (table, [indices]), {}, result)


def _masks_as_numbers(indices: Sequence[Tensor | None], dims: int) -> list[Tensor | None]:
    """Return indices with one integer tensor (or None) for each dimension."""
    found: list[Tensor | None] = []
    for each in indices:
        if each is not None and each.dtype in (torch.bool, torch.uint8):
            found += each.nonzero().unbind(1)
        else:
            found.append(each)
    return found + [None] * (dims - len(found))


def broadcast_shapes(*shapes: torch.Size) -> torch.Size:
    """Return what shapes are broadcast to."""
    return torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call, no-any-return]


class _Selection:
    """What x[indices] selects of x: an index shape in place of the indexed dimensions."""

    def __init__(self, x: Tensor, indices: Sequence[Tensor | None]) -> None:
        self.indices = _masks_as_numbers(indices, x.dim())
        self.dims = [dim for dim, each in enumerate(self.indices) if each is not None]
        self.shape = broadcast_shapes(*(self.at(dim).shape for dim in self.dims))
        together = self.dims == list(range(self.dims[0], self.dims[-1] + 1))
        self.start = self.dims[0] if together else 0
        self.kept = [dim for dim in range(x.dim()) if dim not in self.dims]

    def at(self, dim: int) -> Tensor:
        found = self.indices[dim]
        assert found is not None
        return found

    def out(self, dim: int) -> int:
        """Return where a dimension that is not indexed ends up."""
        place = self.kept.index(dim)
        return place if place < self.start else place + len(self.shape)

    def source(self, dim: int) -> int | None:
        """Return which dimension ended up here; None: one of the index shape."""
        if self.start <= dim < self.start + len(self.shape):
            return None
        return self.kept[dim if dim < self.start else dim - len(self.shape)]

    def of(self, owners: Owners, dim: int) -> Tensor:
        """Return the owner of every selected index."""
        numbers = self.at(dim)
        vector = owners.vector(numbers.device)
        return vector[numbers.expand(self.shape)]


def _agreed(one: Tensor | None, two: Tensor) -> Tensor | None:
    """Return owners that both allow; None if they differ."""
    if one is None:
        return two
    if not bool(((one == two) | (one == NO_OWNER) | (two == NO_OWNER)).all()):
        return None
    return torch.where(one == NO_OWNER, two, one)


def _owners_of_indices(
    tracker: Tracker, indices: Sequence[Tensor | None], chosen: _Selection, so_far: Tensor | None
) -> tuple[Tensor | None, bool]:
    """Add the owners of the indices themselves; also return whether all agree."""
    for each in indices:
        state = tracker.state(each)
        if not isinstance(state, Owned) or each is None or each.dtype in (torch.bool, torch.uint8):
            continue
        owners = state.elements(each.shape, each.device).expand(chosen.shape)
        if so_far is not None:
            owners = owners.to(so_far.device)
        so_far = _agreed(so_far, owners)
        if so_far is None:
            return None, False
    return so_far, True


@rule("index", "_unsafe_index")
def index(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """x[indices]."""
    x, indices = args[0], args[1]
    state = tracker.state(x)
    if isinstance(state, Opaque) or (state is DERIVED and torch.is_grad_enabled()):
        return state
    if isinstance(state, Owned) and state.axis is None:
        return state
    with tracker.paused():
        chosen = _Selection(x, indices)
        if isinstance(state, Owned) and state.axis in chosen.kept:
            assert state.axis is not None
            if any(
                isinstance(tracker.state(i), Owned) and i.dtype not in (torch.bool, torch.uint8)
                for i in indices
                if i is not None
            ):
                return mixed(tracker, func)
            return state.at(chosen.out(state.axis))
        elements = None
        if isinstance(state, Owned):
            assert state.axis is not None
            elements = chosen.of(state.owners, state.axis)
        elements, agree = _owners_of_indices(tracker, indices, chosen, elements)
        if not agree:
            return mixed(tracker, func)
        if elements is None:
            return None
        found = by_elements(tracker, func, elements)
    if isinstance(found, Owned) and found.axis is not None:
        return found.at(found.axis + chosen.start)
    return found


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """x[indices] = values, or += them."""
    x, indices, values = args[:3]
    before, new = tracker.state(x), tracker.state(values)
    special, done = trivial_state(tracker, func, [before, new])
    if done and special is not None and (not isinstance(special, Owned) or before is not None):
        return special
    with tracker.paused():
        return _put(tracker, func, x, indices, values, before, new)


def _put(
    tracker: Tracker, func: Any, x: Tensor, indices: Any, values: Tensor, before: Any, new: Any
) -> State | None:
    chosen = _Selection(x, indices)
    shape = list(chosen.shape)
    selected = [x.shape[dim] for dim in chosen.kept]
    selected[chosen.start : chosen.start] = shape
    elements = None  # the owners of the indexed places
    if isinstance(new, Owned):
        spread = combined(tracker, func, [(values, new)], selected)
        if isinstance(spread, Owned) and spread.axis is not None:
            passing = chosen.source(spread.axis)
            if passing is not None:
                if before is None:
                    return spread.at(passing)
                joined = before.owners.joined(new.owners) if before.axis == passing else None
                return mixed(tracker, func) if joined is None else Owned(passing, joined)
            place = spread.axis - chosen.start
            elements = spread.at(place).elements(shape, values.device)
        elif isinstance(spread, Owned):
            elements = spread.elements(shape, values.device)
    if isinstance(before, Owned):
        if before.axis is None or before.axis not in chosen.dims:
            return before if elements is None else mixed(tracker, func)
        if elements is None:
            return before
        return _filled(tracker, func, x, chosen, before.axis, elements, before.owners)
    elements, agree = _owners_of_indices(tracker, indices, chosen, elements)
    if not agree:
        return mixed(tracker, func)
    if elements is None:
        return None
    for dim in chosen.dims:
        found = _filled(tracker, func, x, chosen, dim, elements, None)
        if isinstance(found, Owned):
            return found
    return mixed(tracker, func)


def _filled(
    tracker: Tracker,
    func: Any,
    x: Tensor,
    chosen: _Selection,
    dim: int,
    elements: Tensor,
    before: Owners | None,
) -> State:
    """Return the owners along a dimension after the tensor was written to."""
    numbers = chosen.at(dim).expand(chosen.shape)
    elements = elements.to(numbers.device)
    vector = torch.full((x.shape[dim],), NO_OWNER, device=numbers.device)
    if before is not None:
        vector = before.vector(numbers.device).clone()
        agreed = _agreed(vector[numbers], elements)
        if agreed is None:
            return mixed(tracker, func)
        elements = agreed
    vector[numbers] = elements
    if not torch.equal(vector[numbers], elements):
        return mixed(tracker, func)
    return Owned(dim, Owners.of(vector, tracker.examples))


@rule("index_select")
def index_select(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Selected indices of one dimension."""
    x, dim, numbers = args[:3]
    if x.dim() == 0:
        return tracker.state(x)
    dim %= x.dim()
    return index(tracker, func, (x, [None] * dim + [numbers.reshape(-1)]), {}, result)


@rule("gather")
def gather(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """One element of a dimension for each place."""
    x, dim, numbers = args[:3]
    return _gathered(tracker, func, x, dim % max(1, x.dim()), numbers)


def _gathered(tracker: Tracker, func: Any, x: Tensor, dim: int, numbers: Tensor) -> State | None:
    state, where = tracker.state(x), tracker.state(numbers)
    if state is None:
        return where
    if not isinstance(state, Owned) or state.axis is None:
        return state
    if state.axis != dim:
        size = numbers.shape[state.axis]
        mine: Owned = Owned(state.axis, state.owners.sliced(0, size))
        if not isinstance(where, Owned):
            return mine
        return combined(tracker, func, [(numbers, mine), (numbers, where)], numbers.shape)
    with tracker.paused():
        elements = state.owners.vector(numbers.device)[numbers.long()]
        if isinstance(where, Owned):
            agreed = _agreed(elements, where.elements(numbers.shape, numbers.device))
            if agreed is None:
                return mixed(tracker, func)
            elements = agreed
        return by_elements(tracker, func, elements)


@rule("scatter", "scatter_add", "scatter_reduce")
def scatter(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Elements that are put somewhere along a dimension."""
    x, dim, numbers = args[:3]
    source = args[3] if len(args) > 3 and isinstance(args[3], Tensor) else None
    states = [tracker.state(x)] + ([tracker.state(source)] if source is not None else [])
    where = tracker.state(numbers)
    if isinstance(where, Owned):
        states.append(where)
    special, done = trivial_state(tracker, func, states)
    if done:
        return special
    with tracker.paused():
        cells = _cells_of(states[0], x)
        elements = None
        if source is not None and isinstance(states[1], Owned):
            elements = states[1].elements(source.shape, source.device)
            elements = elements[tuple(slice(size) for size in numbers.shape)]
        if isinstance(where, Owned):
            elements = _agreed(elements, where.elements(numbers.shape, numbers.device))
            if elements is None:
                return mixed(tracker, func)
        if elements is not None:
            there = cells.gather(dim, numbers)
            agreed = _agreed(there, elements)
            if agreed is None:
                return mixed(tracker, func)
            cells.scatter_(dim, numbers, agreed)
            if not torch.equal(cells.gather(dim, numbers), agreed):
                return mixed(tracker, func)
        return by_elements(tracker, func, cells)


def _cells_of(state: State | None, x: Tensor) -> Tensor:
    """Return a tensor of owners, one for each element."""
    if isinstance(state, Owned):
        return state.elements(x.shape, x.device).clone()
    return torch.full(x.shape, NO_OWNER, device=x.device)


@rule("index_add", "index_copy", "index_reduce")
def index_add(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Rows that are added to selected rows."""
    x, dim, numbers, source = args[:4]
    dim %= max(1, x.dim())
    before, new = tracker.state(x), tracker.state(source)
    special, done = trivial_state(tracker, func, [before, new])
    if done and not (isinstance(special, Owned) and before is None):
        return special
    with tracker.paused():
        indices = [None] * dim + [numbers.reshape(-1)]
        return _put(tracker, func, x, indices, source, before, new)


@rule("index_fill")
def index_fill(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Constants in place of rows."""
    return tracker.state(args[0])


@rule("masked_scatter")
def masked_scatter(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Elements that are written in order wherever the mask is true."""
    x, mask, source = args[:3]
    states = [tracker.state(x), tracker.state(source)]
    special, done = trivial_state(tracker, func, states)
    if done and not isinstance(special, Owned):
        return special
    with tracker.paused():
        mask = mask.expand(result.shape)
        cells = _cells_of(states[0], x).expand(result.shape).clone()
        if isinstance(states[1], Owned):
            elements = states[1].elements(source.shape, source.device).flatten()
            elements = elements[: int(mask.sum())]
            agreed = _agreed(cells[mask], elements)
            if agreed is None:
                return mixed(tracker, func)
            cells[mask] = agreed
        return by_elements(tracker, func, cells)


@rule("masked_select")
def masked_select(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The elements where the mask is true, flattened."""
    x, mask = args[:2]
    state = tracker.state(x)
    if not isinstance(state, Owned) or state.axis is None:
        return state
    with tracker.paused():
        shape = broadcast_shapes(x.shape, mask.shape)
        elements = state.elements(x.shape, mask.device).expand(shape)
        return by_elements(tracker, func, elements.masked_select(mask))


@rule("nonzero")
def nonzero(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Positions of nonzero elements, one per row."""
    state = tracker.state(args[0])
    if not isinstance(state, Owned) or state.axis is None:
        return state
    with tracker.paused():
        owners = state.owners.vector(result.device)[result[:, state.axis]]
        return Owned(0, Owners.of(owners, tracker.examples))


@rule("cat", "concat", "concatenate")
def cat(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Tensors along an existing axis."""
    tensors = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(1, result.dim())
    pairs = [
        (tensor, tracker.state(tensor))
        for tensor in tensors
        if not (tensor.dim() == 1 and tensor.numel() == 0 and result.dim() > 1)
    ]
    special, done = trivial_state(tracker, func, [state for _, state in pairs])
    if done and not isinstance(special, Owned) and not _several_whole(pairs):
        return special
    if (one := _one_example(tracker, pairs)) is not None:
        return one
    axes = {state.axis for _, state in pairs if isinstance(state, Owned)}
    if axes <= {None, dim}:
        parts = [_along_dim(tracker, tensor, state, dim) for tensor, state in pairs]
        return Owned(dim, Owners.of(torch.cat(parts), tracker.examples))
    like = [
        (tensor.new_empty(()).expand(_put_in(result.shape, dim)), state) for tensor, state in pairs
    ]
    return combined(tracker, func, like, _put_in(result.shape, dim))


def _put_in(shape: Sequence[int], dim: int) -> list[int]:
    """Return a shape with size 1 along the dimension of concatenation."""
    return [1 if i == dim else size for i, size in enumerate(shape)]


def _several_whole(pairs: list[tuple[Tensor, State | None]]) -> bool:
    """Whether each owned tensor belongs to a single example, though perhaps to different ones."""
    states = [state for _, state in pairs if state is not None]
    return bool(states) and all(isinstance(state, Owned) and state.axis is None for state in states)


def _one_example(tracker: Tracker, pairs: list[tuple[Tensor, State | None]]) -> Owned | None:
    """Return the state of pieces that all belong to one and the same example, if they do.

    In a batch of a single example every piece does, and the axis still says where examples lie.
    """
    states = [state for _, state in pairs if isinstance(state, Owned) and state.axis is None]
    if tracker.examples == 1 or len(states) < len(pairs):
        return None
    owners = {int(state.owners.vector()[0]) for state in states}
    return states[0] if len(owners) == 1 else None


def _along_dim(tracker: Tracker, tensor: Tensor, state: State | None, dim: int) -> Tensor:
    size = tensor.shape[dim]
    if isinstance(state, Owned):
        vector = state.owners.vector()
        return vector if state.axis == dim else vector[:1].expand(size)
    return torch.full((size,), NO_OWNER)


@rule("stack")
def stack(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Tensors along a new axis."""
    tensors = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % result.dim()
    pairs = [(tensor, tracker.state(tensor)) for tensor in tensors]
    if _several_whole(pairs):
        parts = [
            state.owners.vector()[:1] if isinstance(state, Owned) else torch.tensor([NO_OWNER])
            for _, state in pairs
        ]
        return Owned(dim, Owners.of(torch.cat(parts), tracker.examples))
    found = combined(tracker, func, pairs, tensors[0].shape)
    if isinstance(found, Owned) and found.axis is not None and found.axis >= dim:
        return found.at(found.axis + 1)
    return found
