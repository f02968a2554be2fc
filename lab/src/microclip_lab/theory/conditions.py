"""The conditions under which the paper's theorems are stated: on epsilon, on C, and on c.

What the letters mean: `symbols`. The rates themselves are in `rates`.
"""

from __future__ import annotations

import math

from microclip_lab.theory.symbols import check

__all__ = [
    "chosen_dragger_limit",
    "dragger_limit",
    "needed_fall_of_c",
    "smallest_b",
    "smallest_epsilon",
]


def smallest_epsilon(b: int) -> float:
    """Return 1/(b+1): the micro-batch clipping theorem is for a larger share of draggers.

    With few draggers it says nothing about small micro-batches: b = 1 needs more than half of
    the examples to be draggers, b = 4 more than a fifth.

    >>> smallest_epsilon(1), smallest_epsilon(4)
    (0.5, 0.2)
    """
    check(b=b)
    return 1 / (b + 1)


def smallest_b(epsilon: float) -> int:
    """Return the smallest micro-batch size that the theorem covers at this epsilon.

    >>> smallest_b(0.2), smallest_b(0.21), smallest_b(0.6)
    (5, 4, 1)
    """
    check(epsilon=epsilon)
    if epsilon == 0:
        raise ValueError("Without draggers (epsilon = 0) the theorem speaks of no b at all.")
    b = max(1, math.floor(1 / epsilon) - 1)  # b + 1 > 1/epsilon, and a rounding may take one more
    while epsilon * (b + 1) <= 1:
        b += 1
    return b


def dragger_limit(T: int, epsilon: float, *, as_printed: bool = False) -> float:
    """Return the C that SGD's draggers must stay below, from the proof of the paper's rate.

    ::

        C  <  sqrt( (2 (1-epsilon) eta - (1-epsilon)^2 L eta^2) / (epsilon^2 L eta^2) )

    at eta = 1/(L sqrt T), where L cancels. `as_printed` has (1-epsilon^2) in place of
    (1-epsilon)^2, a misprint that makes C slightly smaller and does no harm.

    >>> round(dragger_limit(T=100, epsilon=0.5), 6)  # sqrt((10 - 0.25) / 0.25)
    6.244998
    >>> round(dragger_limit(T=100, epsilon=0.5, as_printed=True), 6)  # sqrt((10 - 0.75) / 0.25)
    6.082763
    """
    check(T=T, epsilon=epsilon)
    if epsilon == 0:
        return math.inf
    square = 1 - epsilon**2 if as_printed else (1 - epsilon) ** 2
    return math.sqrt(2 * (1 - epsilon) * math.sqrt(T) - square) / epsilon


def chosen_dragger_limit(T: int, epsilon: float, *, as_printed: bool = False) -> float:
    """Return the C at which the proof of SGD's rate is carried out: `dragger_limit` / sqrt 2.

    It grows like T^(1/4) sqrt(1-epsilon)/epsilon. Put into the micro-batch clipping rate, whose
    transient is proportional to 1 + 2 epsilon C, it turns 1/sqrt(T) into T^(-1/4).

    >>> round(chosen_dragger_limit(T=100, epsilon=0.5), 6)  # sqrt((10 - 0.25) / 0.5)
    4.41588
    """
    return dragger_limit(T, epsilon, as_printed=as_printed) / math.sqrt(2)


def needed_fall_of_c(*, b: int, B: int, epsilon: float) -> float:
    """Return the ratio (1 + c_b)/(1 + c_B) above which the printed bias prefers b to B.

    ::

        (sqrt(B) epsilon - sqrt(epsilon (1-epsilon)))
        / (sqrt(b) epsilon - sqrt(epsilon (1-epsilon)))

    At a fixed c the printed bias falls with b, so only a c that falls with b can make a smaller
    b better. The paper measured 5.74 at b = 4 and 4.42 at b = 512: a ratio of 1.24.

    >>> round(needed_fall_of_c(b=4, B=512, epsilon=0.8), 1)  # (18.102 - 0.4) / (1.6 - 0.4)
    14.8
    """
    check(b=b, B=B, epsilon=epsilon)
    if epsilon <= smallest_epsilon(b):
        raise ValueError(
            f"The theorem needs epsilon > 1/(b+1) = {smallest_epsilon(b):g}, "
            f"but got epsilon = {epsilon:g} with b = {b}."
        )
    spread = math.sqrt(epsilon * (1 - epsilon))
    return (math.sqrt(B) * epsilon - spread) / (math.sqrt(b) * epsilon - spread)
