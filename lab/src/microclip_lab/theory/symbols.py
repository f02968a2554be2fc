"""The letters of the paper: what each one means and which values it may take.

Every formula checks its arguments with `check`; there are no formulas in this module.

==========  ==================================================================================
letter      meaning
==========  ==================================================================================
`T`         the number of steps
`B`         the mini-batch size
`b`         the micro-batch size
`epsilon`   the probability that an example is a dragger
`c`, `C`    the length of a dragger's gradient, in units of the benign mean gradient's, is at
            least c and at most C:  `c |g| <= |mu| <= C |g|`
`sigma`     the standard deviation of a benign example's gradient: `E|g~ - g|^2 <= sigma^2`
`L`         the smoothness of the loss: its gradient changes by at most L per unit of distance
`gap`       `L_0 - L_*`, how far the loss can still fall from where training starts
==========  ==================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["check", "check_order"]


@dataclass(frozen=True)
class _Symbol:
    meaning: str
    allowed: str
    accepts: Callable[[float], bool]
    whole: bool = False


_COUNT = ("a whole number of at least 1", lambda value: value >= 1, True)
_SIZE = ("a finite number of at least 0", lambda value: value >= 0)
_SYMBOLS = {
    "T": _Symbol("the number of steps", *_COUNT),
    "B": _Symbol("the mini-batch size", *_COUNT),
    "b": _Symbol("the micro-batch size", *_COUNT),
    "epsilon": _Symbol(
        "the probability of a dragger", "at least 0 and below 1", lambda value: 0 <= value < 1
    ),
    "c": _Symbol("the least length of a dragger in units of |g|", *_SIZE),
    "C": _Symbol("the greatest length of a dragger in units of |g|", *_SIZE),
    "sigma": _Symbol("the standard deviation of benign gradients", *_SIZE),
    "L": _Symbol("the smoothness of the loss", "a finite number above 0", lambda value: value > 0),
    "gap": _Symbol("how far the loss can fall, L_0 - L_*", *_SIZE),
}


def check(**values: float) -> None:
    """Raise a ValueError with the meaning of a letter if its value is not allowed.

    >>> check(epsilon=0.2, b=4)
    >>> check(epsilon=1.2)
    Traceback (most recent call last):
    ValueError: epsilon, the probability of a dragger, must be at least 0 and below 1, but got 1.2.
    """
    for letter, value in values.items():
        symbol = _SYMBOLS[letter]
        kind = int if symbol.whole else int | float
        known = isinstance(value, kind) and not isinstance(value, bool)
        if not known or not math.isfinite(value) or not symbol.accepts(value):
            raise ValueError(
                f"{letter}, {symbol.meaning}, must be {symbol.allowed}, but got {value!r}."
            )


def check_order(c: float, C: float) -> None:
    """Raise a ValueError unless c <= C.

    >>> check_order(c=3.0, C=2.0)
    Traceback (most recent call last):
    ValueError: c |g| <= |mu| <= C |g| needs c <= C, but got c = 3.0 and C = 2.0.
    """
    check(c=c, C=C)
    if c > C:
        raise ValueError(f"c |g| <= |mu| <= C |g| needs c <= C, but got c = {c!r} and C = {C!r}.")
