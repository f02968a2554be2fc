"""What a convergence theorem promises: a part that stays and a part that fades with the steps."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Bound"]


@dataclass(frozen=True)
class Bound:
    """An upper bound of `min_t E|g_t|`, the gradient norm at the best of T steps.

    >>> Bound(bias=0.25, transient=0.5).total
    0.75
    """

    bias: float
    """What stays however long one trains."""
    transient: float
    """What falls with the number of steps T."""

    @property
    def total(self) -> float:
        """The bound itself, the sum of both."""
        return self.bias + self.transient
