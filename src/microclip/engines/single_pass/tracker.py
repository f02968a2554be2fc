"""Tracking which example owns which part of a tensor, through every operation of a forward pass.

The tracker sees operations as torch's dispatcher does, so that each has one spelling, and stores
what it knows in an attribute of the tensors. A tensor without one is a constant. What an operation
does to owners is in `propagation`; an operation that is not listed there makes its result opaque,
and so does one that mixes examples.

Owners serve two purposes. A parameter's gradient is split by the owners of the rows that it met,
which is right if no row affects another example's loss: along every differentiable path from a
parameter to a loss, owners must not change. And a model that mixes examples is detected.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from microclip.engines.base import CannotFuseError
from microclip.engines.gradients import communicates
from microclip.engines.single_pass.owners import (
    DERIVED,
    NO_OWNER,
    Derived,
    Opaque,
    Owned,
    Owners,
    State,
    from_elements,
)

Rule = Callable[..., Any]
_free_slots: list[int] = []  # given back by trackers that are done
_new_slots = itertools.count()  # one attribute for each active tracker, on any thread
_operations: dict[Any, Operation] = {}  # those seen so far
_serials = itertools.count(1)
_CONTAINERS = (list, tuple)
_RESHAPES_ITSELF = frozenset(
    getattr(packet, overload)
    for packet in (
        torch.ops.aten.as_strided_,
        torch.ops.aten.squeeze_,
        torch.ops.aten.unsqueeze_,
        torch.ops.aten.transpose_,
        torch.ops.aten.t_,
    )
    for overload in packet.overloads()  # type: ignore[no-untyped-call]
)


class Operation:
    """What there is to know about an operation, looked up once: torch's are slow to hash."""

    def __init__(self, func: Any) -> None:
        self.func = func
        self.reshapes_itself = func in _RESHAPES_ITSELF
        self.communicates = communicates(func)

    @cached_property
    def rule(self) -> tuple[Rule, Any]:
        """Return its rule for owners, and a function that tells what it writes to, if anything."""
        from microclip.engines.single_pass.propagation import rule_for

        return rule_for(self.func)


class Mark:
    """What is known of a tensor, by which tracker, and since when."""

    __slots__ = ("serial", "state", "time")

    def __init__(self, serial: int, state: State, time: int) -> None:
        self.serial = serial
        self.state = state
        self.time = time


class _Writing:
    """What a storage holds since it was written to, for other views of it."""

    def __init__(self, tensor: Tensor, state: State, time: int) -> None:
        self.storage = tensor.untyped_storage()  # kept, so that its address is not reused
        self.shape, self._stride = tensor.shape, tensor.stride()
        self._offset = int(tensor.storage_offset())
        self.itemsize, self.state, self.time = tensor.element_size(), state, time

    def stride(self) -> tuple[int, ...]:
        """Return the strides of what was written to."""
        return self._stride

    def storage_offset(self) -> int:
        """Return the offset of what was written to."""
        return self._offset


def _take_slot() -> int:
    try:
        return _free_slots.pop()
    except IndexError:
        return next(_new_slots)


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks every tensor that depends on the examples or on recorded parameters."""

    def __init__(self, examples: int, model: nn.Module | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.examples = examples
        self.along_first = Owned(0, Owners(examples))
        self.parameters: Container[int] = ()  # ids of tensors that the recorder handles
        self.derived: dict[int, Tensor] = {}  # by id; held, so that ids are not reused
        self._model = model
        self._serial = next(_serials)
        self._slot = _take_slot()
        self.mark = f"_microclip_owner_{self._slot}"
        self._clock = 0
        self._written: dict[int, _Writing] = {}
        self.trail: set[tuple[Any, Any]] = set()  # which operation came after which
        self._last: Any = None
        self.before: tuple[torch.Size, tuple[int, ...], int] | None = None
        self.has_dropout = False  # in attention
        self.by_place = False  # whether examples were selected by their position in the batch

    def close(self) -> None:
        """Release the attribute for another tracker; one that is interrupted may keep it."""
        slot, self._slot = self._slot, -1
        if slot >= 0:
            _free_slots.append(slot)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # else torch wraps __torch_dispatch__, and imports its compiler to do so
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # called for every operation of a model, so it has to be fast
        operation = _operations.get(func)
        if operation is None:
            operation = _operations.setdefault(func, Operation(func))
        self.trail.add((self._last, operation))
        self._last = operation
        if operation.communicates:  # before it does: other ranks may not make a single pass
            raise CannotFuseError(
                f"The single-pass engine cannot run a loss_fn that communicates with other ranks "
                f"({func}): they would have to call it equally often."
            )
        if operation.reshapes_itself:
            self.state(args[0])  # while it still has its old shape
            self.before = args[0].shape, args[0].stride(), args[0].storage_offset()
        result = func(*args, **kwargs) if kwargs else func(*args)
        mark, serial = self.mark, self._serial
        for argument in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(argument, Tensor):
                found = getattr(argument, mark, None)
                if found is not None and found.serial == serial:
                    break
                if argument.requires_grad and argument.grad_fn is not None:
                    break
            elif isinstance(argument, _CONTAINERS) and any(
                isinstance(each, Tensor) and self.state(each) is not None for each in argument
            ):
                break
        else:
            if not self._written:
                return result
        self._propagate(operation, args, kwargs or {}, result)
        return result

    def state(self, tensor: Any) -> State | None:
        """Return what is known of a tensor; None: it is a constant."""
        if id(tensor) in self.parameters:
            return None
        mark: Mark | None = getattr(tensor, self.mark, None)
        if mark is not None and mark.serial != self._serial:
            mark = None
        if self._written and isinstance(tensor, Tensor) and tensor.layout is torch.strided:
            newer = self._seen_anew(tensor, mark)
            if newer is not None:
                return newer
        if mark is None:
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                return Opaque("a tensor whose gradient flows where it cannot be tracked")
            return None
        if mark.state is DERIVED and not tensor.requires_grad:
            return None
        return mark.state

    def set(self, tensor: Tensor, state: State | None) -> None:
        """Store what is known of a tensor."""
        if state is None:
            return
        setattr(tensor, self.mark, Mark(self._serial, state, self._clock))
        if state is DERIVED:
            self.derived[id(tensor)] = tensor

    def opaque(self, why: str) -> Opaque:
        """Return the state of a tensor whose owners are unknown, with the module it came from."""
        return Opaque(why + self._place())

    def _place(self) -> str:
        """Describe the innermost module that is running."""
        frame = sys._getframe(1)
        while frame is not None:
            module = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
            if isinstance(module, nn.Module):
                return f" in {self._describe(module)}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    def _describe(self, module: nn.Module) -> str:
        kind = type(module).__name__
        if self._model is not None:
            for name, found in self._model.named_modules():
                if found is module:
                    return f"module {name!r} ({kind})" if name else kind
        return f"a {kind}"

    def _propagate(self, operation: Operation, args: Any, kwargs: Any, result: Any) -> None:
        func, (rule, writes) = operation.func, operation.rule
        if (isinstance(result, Tensor) and result.is_nested) or (
            args and isinstance(args[0], Tensor) and args[0].is_nested
        ):
            state: Any = self.opaque("a nested tensor")
        else:
            state = rule(self, func, args, kwargs, result)
        if writes:
            targets = writes(args, kwargs)
            new = state[0] if isinstance(state, list) else state
            if len(targets) > 1 and new is not None:
                new = self.opaque(f"{func}(), which modifies several tensors,")
            for target in targets:
                self.write(target, new)
            others = [each for each in _tensors_in(result) if all(each is not t for t in targets)]
            for other in others:
                self.set(other, new)
            return
        if isinstance(result, Tensor):
            self.set(result, state[0] if isinstance(state, list) else state)
        elif isinstance(result, _CONTAINERS):
            tensors = [each for each in result if isinstance(each, Tensor)]
            states = state if isinstance(state, list) else [state] * len(tensors)
            for tensor, each in zip(tensors, states, strict=True):
                self.set(tensor, each)

    def write(self, tensor: Tensor, state: State | None) -> None:
        """Record that a tensor was modified in place, for all tensors that share its memory."""
        before = self.state(tensor)
        if state is None or state == before:
            return
        self._clock += 1
        base = tensor._base
        if base is None or base is tensor:
            self.set(tensor, state)
            self._remember(tensor, state)
            return
        whole = self._lifted(tensor, state, base)
        self._clock += 1
        self.set(tensor, state)
        self.set(base, whole)
        self._remember(base, whole)

    def _remember(self, tensor: Tensor, state: State) -> None:
        if tensor.layout is not torch.strided:
            return
        self._written[tensor.untyped_storage()._cdata] = _Writing(tensor, state, self._clock)

    def _lifted(self, view: Tensor, state: State, base: Tensor) -> State:
        """Return the state of a tensor after a view of it was written to."""
        before = self.state(base)
        for each in (before, state):
            if isinstance(each, Opaque):
                return each
        if DERIVED in (before, state):
            if isinstance(before, Owned) or isinstance(state, Owned):
                return self.opaque("a tensor that both parameters and examples were written to")
            return DERIVED
        assert isinstance(state, Owned)
        if base.element_size() != view.element_size():
            return self.opaque("memory written as another dtype")
        with self.paused():
            cells = self._cells(base)
            if isinstance(before, Owned):
                _put(cells, base, before)
            _put(cells, view, state)
            found = from_elements(self._over(cells, base), self.examples)
        if found is False:
            return self.opaque("several examples written into one tensor")
        return found or state

    def _seen_anew(self, tensor: Tensor, mark: Mark | None) -> State | None:
        """Return the state of a tensor whose memory was written to through another one."""
        writing = self._written.get(tensor.untyped_storage()._cdata)
        if writing is None or (mark is not None and mark.time >= writing.time):
            return None
        state = writing.state
        if isinstance(state, Derived):
            return DERIVED if tensor.requires_grad else None
        if isinstance(state, Opaque):
            return state
        old = mark.state if mark else None
        if isinstance(old, Opaque):
            return old
        found = self._projected(writing, state, tensor, old if isinstance(old, Owned) else None)
        if found is not None:
            setattr(tensor, self.mark, Mark(self._serial, found, self._clock))
        return found

    def _projected(
        self, writing: _Writing, state: Owned, view: Tensor, old: Owned | None
    ) -> State | None:
        if writing.itemsize != view.element_size():
            return self.opaque("memory read as another dtype")
        with self.paused():
            cells = self._cells(view)
            if old is not None:
                _put(cells, view, old)
            _put(cells, writing, state)
            found = from_elements(self._over(cells, view), self.examples)
        if found is False:
            return self.opaque("memory that several examples share")
        return found or None

    def through_memory(self, source: Tensor, state: Owned, view: Tensor) -> State | None:
        """Return the state of any view from its place in memory."""
        with self.paused():
            cells = self._cells(source)
            _put(cells, source, state)
            found = from_elements(self._over(cells, view), self.examples)
        return self.opaque("a view across examples") if found is False else (found or None)

    def _cells(self, tensor: Tensor) -> Tensor:
        """Return one number for each element of a storage."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size() + 1
        return torch.full((size,), NO_OWNER, device=tensor.device)

    @staticmethod
    def _over(cells: Tensor, tensor: Tensor) -> Tensor:
        return cells.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Track nothing inside the block."""
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            yield


def _put(cells: Tensor, tensor: Tensor | _Writing, state: Owned) -> None:
    """Write owners to the memory cells of a tensor, which may overlap."""
    places = torch.arange(len(cells), device=cells.device)
    places = places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    cells[places.reshape(-1)] = state.elements(tensor.shape, cells.device).reshape(-1)


def _tensors_in(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    found = result if isinstance(result, _CONTAINERS) else ()
    return [each for each in found if isinstance(each, Tensor)]
