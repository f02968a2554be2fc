"""The registry of rules, and what they share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from microclip.engines.single_pass.owners import (
    DERIVED,
    NO_OWNER,
    Opaque,
    Owned,
    Owners,
    State,
    from_elements,
)
from microclip.engines.single_pass.tracker import Rule, Tracker

RULES: dict[str, Rule] = {}  # by the name of an operation


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule for these operations, all overloads and in-place variants."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


@cache
def rule_for(func: Any) -> tuple[Rule, Callable[[Any, Any], list[Tensor]] | None]:
    """Return an operation's rule, and what tells which tensors it modifies in place, if any."""
    name = func._schema.name.removeprefix("aten::")
    plain = name.removesuffix("_") if func._schema.is_mutable else name
    found = RULES.get(name) or RULES.get(plain)
    if found is None and func.namespace != "aten":
        found = RULES.get(func._schema.name)
    if found is None and torch.Tag.pointwise in func.tags:
        found = RULES["pointwise"]
    if found is None and _is_view(func):
        found = RULES["any view"]
    return found or unknown, _writes(func) if func._schema.is_mutable else None


def _is_view(func: Any) -> bool:
    return any(
        each.alias_info is not None and not each.alias_info.is_write
        for each in func._schema.arguments
    )


def _writes(func: Any) -> Callable[[Any, Any], list[Tensor]]:
    places = [
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def written(args: Any, kwargs: Any) -> list[Tensor]:
        found = [kwargs[name] if name in kwargs else args[i] for i, name in places]
        return [each for value in found for each in tensors_in(value)]

    return written


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of one argument."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [each for each in value if isinstance(each, Tensor)]
    return []


def named(func: Any, args: Any, kwargs: Any, *names: str) -> list[Any]:
    """Return some of an operation's arguments by their names in its schema."""
    return [
        kwargs[name] if name in kwargs else args[index] if index < len(args) else default
        for name, index, default in _places(func, names)
    ]


@cache
def _places(func: Any, names: tuple[str, ...]) -> list[tuple[str, int, Any]]:
    """Return where arguments of these names are, and what they are by default."""
    arguments = {each.name: (i, each) for i, each in enumerate(func._schema.arguments)}
    found = []
    for name in names:
        index, argument = arguments.get(name, (sys.maxsize, None))
        found.append((name, index, None if argument is None else argument.default_value))
    return found


def trivial_state(
    tracker: Tracker, func: Any, states: Iterable[State | None]
) -> tuple[State | None, bool]:
    """Return the state of a result that needs no rule, and whether it needs none.

    That is so if no input is owned, one is opaque, only parameters take part, or everything belongs
    to one example.
    """
    owned: list[Owned] = []
    derived = False
    for state in states:
        if state is None:
            continue
        if isinstance(state, Opaque):
            return state, True
        if isinstance(state, Owned):
            owned.append(state)
        else:
            derived = True
    if derived and torch.is_grad_enabled():
        if owned:
            return tracker.opaque(
                f"{label(func)}, where a parameter meets examples unrecorded,"
            ), True
        return DERIVED, True
    if not owned:
        return None, True
    first = owned[0]
    if all(each.axis is None for each in owned):
        example = first.example
        if all(each is first or each.example == example for each in owned):
            return first, True
        return mixed(tracker, func), True
    return None, False


def label(func: Any) -> str:
    """Return an operation's name for messages."""
    return f"{func._schema.name.removeprefix('aten::')}()"


def mixed(tracker: Tracker, func: Any) -> Opaque:
    """Return the state of a result that mixes examples."""
    return tracker.opaque(f"{label(func)}, which mixes examples,")


def unknown(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Operations without a rule: the result is opaque if it depends on examples."""
    every = [t for value in (*args, *kwargs.values()) for t in tensors_in(value)]
    state, done = trivial_state(tracker, func, [tracker.state(tensor) for tensor in every])
    if done and not isinstance(state, Owned):
        return state
    return tracker.opaque(f"{label(func)}, whose effect on examples is unknown,")


def constant(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Operations whose results depend on nothing but the shapes of their inputs."""
    return None


for _name in (
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "zero", "arange",
    "uniform", "normal_", "exponential", "random", "log_normal", "cauchy", "geometric",
    "_local_scalar_dense", "equal", "is_same_size",
):  # fmt: skip
    RULES[_name] = constant


def combined(
    tracker: Tracker, func: Any, parts: Iterable[tuple[Tensor, State | None]], shape: Sequence[int]
) -> State | None:
    """Return the state of the result of an elementwise operation, with broadcasting."""
    dims = len(shape)
    axis: int | None = None
    owners: Owners | None = None
    last: Owned | None = None
    derived = False
    for tensor, state in parts:
        if state is None:
            continue
        if not isinstance(state, Owned):
            if isinstance(state, Opaque):
                return state
            derived = True
            continue
        here, those = state.axis, state.owners
        if here is not None:
            there = here + dims - tensor.dim()
            if there < 0:
                return mixed(tracker, func)
            # a single row is broadcast to all
            here = there if tensor.shape[here] == shape[there] else None
        if owners is None:
            axis, owners, last = here, those, state
            continue
        if here == axis:
            if those is not owners:
                joint = owners.joined(those)
                if joint is None:
                    return mixed(tracker, func)
                owners = joint
        elif here is None or axis is None:
            alone, others = (those, owners) if here is None else (owners, those)
            if alone.only is None or alone.only not in (NO_OWNER, others.only):
                return mixed(tracker, func)
            axis, owners = (axis, owners) if here is None else (here, those)
        else:
            return mixed(tracker, func)
    if derived and torch.is_grad_enabled():
        if owners is not None:
            return tracker.opaque(f"{label(func)}, where a parameter meets examples unrecorded,")
        return DERIVED
    if owners is None or last is None:
        return None
    return last if last.axis == axis and last.owners is owners else Owned(axis, owners)


def of_first(body: Rule) -> Rule:
    """Apply a rule only where the first argument is owned along some axis."""

    @wraps(body)
    def checked(tracker: Tracker, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        state = tracker.state(args[0])
        if not isinstance(state, Owned) or state.axis is None:
            return state
        return body(tracker, func, args, kwargs, result, state)

    return checked


def owned_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations whose first argument is owned along some axis."""

    def register(body: Rule) -> Rule:
        return rule(*names)(of_first(body))

    return register


def by_elements(tracker: Tracker, func: Any, elements: Tensor) -> State | None:
    """Return the state of a tensor from the owner of each of its elements."""
    found = from_elements(elements, tracker.examples)
    if found is False:
        return tracker.opaque(
            f"{label(func)}, which does not leave the examples along one dimension,"
        )
    return found or None
