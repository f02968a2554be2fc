"""Checking single passes: when to check, and what counts as the same gradient.

Owners are tracked with care, but a model can mix its examples out of sight: through a number read
on the host, or in a custom backward pass. So now and then one micro-batch is differentiated alone,
and the gradient of every parameter is compared.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from microclip import multitensor
from microclip.engines.single_pass.tracker import Operation

Verify = Literal["rarely", "always", "never"] | int
SHARE = 0.01  # of the training time that checks may take,
STEPS = 200  # as if there had been at least this many steps
EARLY = 8  # steps that are all checked if the model reads values of several examples
LATER = 0.8  # of a step's time that checks may take in any case, beside those of the first step
ALONE = 1.5  # cost of a micro-batch alone, relative to its share of a step, comparison included
FEW = 3  # micro-batches that are checked together where dropout has to be disabled
TRIES = 4  # micro-batches to run alone, until one is conclusive
MOST_SURPRISES = 64  # checks of new functions that need not fit into the time


@dataclass(frozen=True)
class Tolerance:
    """By how much a parameter's gradient may differ."""

    relative: float  # of its norm,
    absolute: float  # plus this much of the whole gradient's norm

    @classmethod
    def for_(cls, dtypes: set[torch.dtype], rounded: bool) -> Tolerance:
        """Return what the precision of some gradients allows; `rounded`: under autocast."""
        if rounded or dtypes & set(multitensor.HALF):
            return cls(0.1, 0.05)
        if dtypes <= {torch.float64, torch.complex128}:
            return cls(1e-8, 1e-12)
        return cls(2e-3, 1e-6)


class Comparison:
    """How far gradients are off, parameter by parameter; no gradient is kept.

    Norms stay on their devices until all of them are read at once.
    """

    def __init__(self) -> None:
        self._errors: dict[str, Tensor] = {}
        self._norms: dict[str, Tensor] = {}
        self._dtypes: set[torch.dtype] = set()

    @torch.no_grad()
    def add(self, name: str, found: Tensor | None, wanted: Tensor | None) -> None:
        """Compare one parameter's gradients; a missing one counts as zero."""
        given = [each for each in (found, wanted) if each is not None]
        self._dtypes |= {each.dtype for each in given}
        nothing = torch.zeros((), dtype=torch.float64)
        self._norms[name] = nothing if wanted is None else _norm(wanted)
        if found is None or wanted is None:
            self._errors[name] = _norm(given[0]) if given else nothing
        else:
            self._errors[name] = _norm(found.to(wanted.dtype) - wanted)

    def __contains__(self, name: str) -> bool:
        return name in self._errors

    @property
    def error(self) -> float:
        """The error of the whole gradient, relative to its norm."""
        errors, norms = self._read()
        total, norm = math.hypot(*errors.values()), math.hypot(*norms.values())
        return total / norm if norm else total

    def suspect(
        self, rounded: bool, noise: Comparison | None = None, times: float = 1.0
    ) -> str | None:
        """Return the parameter that is furthest off, if any is too far off or not finite.

        Args:
            rounded: Whether autocast was seen.
            noise: What rounding does to the same gradients, if that may be more.
            times: How many times that is still rounding.
        """
        tolerance = Tolerance.for_(self._dtypes, rounded)
        errors, norms = self._read()
        whole = math.hypot(*norms.values())
        moved = noise._read()[0] if noise else {}
        worst, suspect = 1.0, None
        for name, error in errors.items():
            if not math.isfinite(error):
                return name
            allowed = tolerance.relative * norms[name] + tolerance.absolute * whole
            if noise is not None:
                rounding = max(noise.error * norms[name], moved.get(name, 0.0))
                allowed = max(allowed, times * rounding)
            if error > allowed and error / (allowed or 1e-300) > worst:
                worst, suspect = error / (allowed or 1e-300), name
        return suspect

    def _read(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return all errors and norms, with one read from each device."""
        tensors = [*self._errors.values(), *self._norms.values()]
        found = [0.0] * len(tensors)
        for device in {tensor.device for tensor in tensors}:
            here = [place for place, tensor in enumerate(tensors) if tensor.device == device]
            together = torch.stack([tensors[place] for place in here])
            for place, value in zip(here, together.tolist(), strict=True):
                found[place] = value
        half = len(self._errors)
        return (
            dict(zip(self._errors, found[:half], strict=True)),
            dict(zip(self._norms, found[half:], strict=True)),
        )


def _norm(gradient: Tensor) -> Tensor:
    gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    found: Tensor = torch.linalg.vector_norm(gradient, dtype=multitensor.widest(gradient.device))
    return found


class Verifier:
    """Decides when to check, so that checks take little time.

    Args:
        how: "rarely": the first batch, steps 2, 4, 8, ..., and whenever the model does something
            new; "always"; "never"; or a number n: also every n-th step.
    """

    def __init__(self, how: Verify = "rarely") -> None:
        self.how = how
        self.steps = 0
        self.listens = False  # only records what the model does, and checks nothing
        self._known: set[Any] = set()
        self._surprises = 0
        self._spent = 0.0  # in steps
        self._first = 0.0  # of that, in the first step
        self._random = random.Random(0)  # private, so that no other random numbers change

    @property
    def is_on(self) -> bool:
        """Whether there will be any checks."""
        return self.how != "never" and not self.listens

    @property
    def expects_check(self) -> bool:
        """Whether the step that begins will be checked, whatever the model does in it."""
        step = self.steps + 1
        early = step <= EARLY or step & (step - 1) == 0
        return self.is_on and (early or self.how != "rarely")

    @property
    def is_first(self) -> bool:
        """Whether this is the first step."""
        return self.steps == 1

    def begin(self) -> None:
        """Count a step that begins."""
        self.steps += not self.listens

    def shuffled(self, count: int) -> list[int]:
        """Return the indices of `count` micro-batches in random order."""
        order = list(range(count))
        self._random.shuffle(order)
        return order

    def is_new(self, trail: set[Any]) -> bool:
        """Whether a pass did something that no earlier one did."""
        return not trail <= self._known

    def is_due(self, trail: set[Any], microbatches: int, is_doubtful: bool = False) -> bool:
        """Whether to check a pass; doubtful ones are checked as often as there is time.

        Args:
            trail: What it did.
            microbatches: How many there were.
            is_doubtful: Whether the model read values of several examples, and so may have mixed
                them.
        """
        new = self.is_new(trail)
        self._known |= trail
        if not self.is_on:
            return False
        if self.how == "always" or (isinstance(self.how, int) and self.steps % self.how == 0):
            return True
        cost = ALONE / max(1, microbatches)
        fits = self._spent + cost <= max(SHARE * max(STEPS, self.steps), self._first + LATER)
        power = self.steps & (self.steps - 1) == 0
        surprise = new and self._surprises < MOST_SURPRISES
        early = is_doubtful and self.steps <= EARLY
        due = surprise or early or ((power or new or is_doubtful) and fits)
        self._surprises += due and new
        return due

    def spend(self, steps: float) -> None:
        """Add the cost of a check, in steps."""
        self._spent += steps
        self._first += steps * self.is_first


def draws_numbers(trail: set[Any]) -> bool:
    """Whether any operation of a pass draws random numbers from torch.

    Attention may or may not, depending on its arguments, and is left to the tracker.
    """
    return any(
        torch.Tag.nondeterministic_seeded in operation.func.tags
        for _, operation in trail
        if isinstance(operation, Operation)
        and "scaled_dot_product" not in operation.func._schema.name
    )


class AutocastWatch:
    """Notices whether any module runs under autocast, which rounds gradients.

    Autocast may be enabled inside loss_fn (Accelerate does so), hence the hook on modules. A model
    that is a single layer has none inside, so its functions are watched instead.
    """

    def __init__(self, model: nn.Module, device_types: set[str]) -> None:
        self.seen = False
        self._types = device_types
        self._is_single_layer = next(model.children(), None) is None

    def __enter__(self) -> AutocastWatch:
        self._stack = ExitStack()
        self._stack.callback(register_module_forward_pre_hook(self._ask).remove)
        if self._is_single_layer:
            self._stack.enter_context(_FunctionWatch(self._ask))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _ask(self, *_: object) -> None:
        self.seen = self.seen or any(map(torch.is_autocast_enabled, self._types))


class _FunctionWatch(TorchFunctionMode):
    """Calls back before every function of torch's."""

    def __init__(self, callback: Callable[[], None]) -> None:
        super().__init__()
        self._callback = callback

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._callback()
        return func(*args, **(kwargs or {}))


def module_of(model: nn.Module, parameter: str) -> str:
    """Describe the module that has a parameter."""
    name, _, _ = parameter.rpartition(".")
    try:
        kind = type(model.get_submodule(name)).__name__
    except AttributeError:
        return ""
    return f" of module {name!r} ({kind})" if name else f" of {kind}"
