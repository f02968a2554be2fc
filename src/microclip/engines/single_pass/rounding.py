"""How much of a difference between two gradients rounding explains.

A gradient may be ill-conditioned: that of an example the model is certain about, or of two answers
that cancel, is a small difference of large numbers. Two ways to compute it then differ visibly,
though both are exact. So the computation is repeated with rounding errors of a known size added to
every operation. What those do to the gradient, the order of additions may do as well.

Knows nothing about micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from microclip import multitensor
from microclip.engines.gradients import Gradients
from microclip.engines.single_pass.verify import Comparison

WIDER = 32.0  # times the usual rounding error, in the second run:
LINEAR = 4.0  # times the effect is what rounding has at least, and nothing else
REPEATS = 3  # of each run, because errors may cancel
# Times what one rounding error per operation does is still rounding: sums have many. In half
# precision they are added up in float32, and rounded once.
NOISE, NOISE_HALF = 16.0, 2.0


class ExtraRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Multiplies every result inside the block by 1 plus or minus some units in the last place.

    Integers in floating point (masks, counts, lengths) stay as they are. A computation that is
    repeated gets the same errors again.
    """

    def __init__(self, units: float = 1.0, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._units, self._seed = units, seed
        self.has_halves = False  # whether any result was in half precision

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(result.alias_info is not None for result in func._schema.returns):
            return found  # a view, or written in place
        return tree_map_only(Tensor, self._round, found)

    def _round(self, exact: Tensor) -> Tensor:
        if not exact.is_floating_point() or exact.layout != torch.strided or not exact.numel():
            return exact
        if bool((exact == exact.round()).all()):
            return exact
        self.has_halves |= exact.dtype in multitensor.HALF
        error = self._units * torch.finfo(exact.dtype).eps
        rounded = exact * (1 + error * self._signs(exact))
        return torch.where(rounded.isfinite(), rounded, exact)

    def _signs(self, exact: Tensor) -> Tensor:
        """Return 1 or -1 for each number, by a hash of its value and its place."""
        values = torch.frexp(exact.to(torch.float32)).mantissa * 2**24
        places = torch.arange(exact.numel(), device=exact.device).view(exact.shape)
        mixed = values.to(torch.int64) + places * 7919 + self._seed * 104729
        for _ in range(2):
            mixed = mixed * 2654435761
            mixed = mixed ^ (mixed >> 15)
        return (mixed % 2 * 2 - 1).to(exact.dtype)


def rounding_explains(
    difference: Comparison, gradients: Callable[[], Gradients], rounded: bool
) -> bool:
    """Return whether rounding may have caused a difference.

    Its effect grows with the size of the errors. That of anything else does not: a model that
    changes from call to call is not excused.

    Args:
        difference: Between two computations of some gradients.
        gradients: One of the two, to repeat.
        rounded: Whether autocast was seen.
    """
    try:
        exact = gradients()
        noise, has_halves = _most_moved(gradients, exact, 1.0)
        if difference.suspect(rounded, noise, NOISE_HALF if has_halves else NOISE) is not None:
            return False
        wider, _ = _most_moved(gradients, exact, WIDER)
        if compared(gradients(), exact).error > noise.error:
            return False  # it was the calls that made the difference
    except Exception:  # an operation that cannot stand it: nothing is known
        return False
    return math.isfinite(wider.error) and LINEAR * noise.error <= wider.error


def _most_moved(
    gradients: Callable[[], Gradients], exact: Gradients, units: float
) -> tuple[Comparison, bool]:
    """Return what rounding errors do, and whether any of them were those of half precision."""
    found, has_halves = [], False
    for seed in range(REPEATS):
        with ExtraRounding(units, seed) as rounding:
            again = gradients()
        found.append(compared(again, exact))
        has_halves |= rounding.has_halves
    return max(found, key=lambda each: each.error), has_halves


def compared(found: Gradients, wanted: Gradients) -> Comparison:
    """Compare all gradients of two computations."""
    comparison = Comparison()
    for name in found.keys() | wanted.keys():
        comparison.add(name, found.get(name), wanted.get(name))
    return comparison
