"""The three convergence rates of the paper's Table 1, exactly as printed.

All are for the learning rate 1/(L sqrt T) and bound min_t E|g_t|, where g_t is the mean gradient
of *benign* examples. Two of the three do not hold as printed: `counterexamples` shows where,
`corrected` what holds instead. What the letters mean: `symbols`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from microclip_lab.theory.conditions import smallest_b
from microclip_lab.theory.symbols import check, check_order

__all__ = ["bu_et_al", "micro_batch_clipping", "sgd_with_draggers"]


@dataclass(frozen=True)
class Bound:
    """An upper bound of `min_t E|g_t|`, the gradient norm at the best of T steps.

    >>> Bound(bias=0.25, transient=0.5).total
    0.75
    """

    bias: float
    """What stays however long you train."""
    transient: float
    """What falls with the number of steps T."""

    @property
    def total(self) -> float:
        """The bound itself, the sum of both."""
        return self.bias + self.transient


def bu_et_al(*, T: int, B: int, sigma: float, L: float, gap: float) -> Bound:
    """Return the rate of SGD without draggers and without clipping (Bu et al., Theorem 9).

    ::

        min_t E|g_t|  <=  T^(-1/4) sqrt( 2 L (L_0 - L_*) + sigma^2 / B )

    The paper writes sigma_b for sigma in its table; one standard deviation is meant.

    >>> bu_et_al(T=16, B=4, sigma=2.0, L=1.0, gap=4.0)  # sqrt(8 + 4/4) / 2
    Bound(bias=0.0, transient=1.5)
    """
    check(T=T, B=B, sigma=sigma, L=L, gap=gap)
    return Bound(0.0, T**-0.25 * math.sqrt(2 * L * gap + sigma**2 / B))


def sgd_with_draggers(
    *, T: int, B: int, epsilon: float, sigma: float, L: float, gap: float
) -> Bound:
    """Return the printed rate of SGD with draggers.

    ::

        min_t E|g_t|  <=  T^(-1/4) sqrt( 4 L (L_0 - L_*) / (1-epsilon)^2
                                         + 2 sigma^2 / ((1-epsilon) B) )

    The statement names no condition on C; its proof takes C = `conditions.chosen_dragger_limit`.

    >>> sgd_with_draggers(T=16, B=4, epsilon=0.5, sigma=1.0, L=1.0, gap=0.5)  # sqrt(8 + 1) / 2
    Bound(bias=0.0, transient=1.5)
    """
    check(T=T, B=B, epsilon=epsilon, sigma=sigma, L=L, gap=gap)
    benign = 1 - epsilon
    return Bound(0.0, T**-0.25 * math.sqrt(4 * L * gap / benign**2 + 2 * sigma**2 / (benign * B)))


def micro_batch_clipping(
    *, T: int, b: int, epsilon: float, c: float, C: float, sigma: float, L: float, gap: float
) -> Bound:
    """Return the printed rate of SGD with unit-normalised micro-batch gradients.

    ::

        bias       =  sigma / ( (sqrt(b) epsilon - sqrt(epsilon (1-epsilon))) (1 + c) )

        transient  =  T^(-1/2)  sqrt(b epsilon) / (sqrt(b epsilon) - sqrt(1-epsilon))
                      * 2 L (1 + 2 epsilon C) / (1-epsilon)  * (L_0 - L_* + 1/(2L))

    It is for epsilon > 1/(b+1) only. (Printed is >=, but equality divides by zero.) It is about
    the update of `microclip.rules.Unit`, not about the paper's Algorithm 1, `MinNorm`.

    >>> bound = micro_batch_clipping(
    ...     T=100, b=4, epsilon=0.5, c=1.0, C=1.0, sigma=1.0, L=1.0, gap=0.5
    ... )
    >>> round(bound.bias, 12)  # 1 / ((2 * 0.5 - 0.5) * 2)
    1.0
    >>> round(bound.transient, 12)  # 0.1 * sqrt(2) / (sqrt(2) - sqrt(0.5)) * 2 * 2 / 0.5 * 1
    1.6
    """
    check(T=T, b=b, epsilon=epsilon, sigma=sigma, L=L, gap=gap)
    check_order(c, C)
    # the two denominators, written so that rounding cannot give them a sign of their own
    margin = math.sqrt(b * epsilon) - math.sqrt(1 - epsilon)
    if epsilon * (b + 1) <= 1 or margin <= 0:
        remedy = f"; for this epsilon, b must be at least {smallest_b(epsilon)}" if epsilon else ""
        raise ValueError(
            f"The theorem needs epsilon > 1/(b+1) = {1 / (b + 1):g}, but got epsilon = "
            f"{epsilon:g} with b = {b}{remedy}."
        )
    bias = sigma / (math.sqrt(epsilon) * margin * (1 + c))
    speed = math.sqrt(b * epsilon) / margin * 2 * L * (1 + 2 * epsilon * C) / (1 - epsilon)
    return Bound(bias, speed * (gap + 1 / (2 * L)) / math.sqrt(T))
