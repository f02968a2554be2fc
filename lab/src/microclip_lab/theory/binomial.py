"""How many draggers a batch holds: the binomial distribution, safe for large batches."""

from __future__ import annotations

import math

__all__ = ["binomial"]


def binomial(size: int, probability: float) -> list[float]:
    """Return the probabilities of 0, 1, ..., size successes.

    >>> binomial(2, 0.5)
    [0.25, 0.5, 0.25]
    >>> binomial(3, 0.0)
    [1.0, 0.0, 0.0, 0.0]
    """
    if probability in (0, 1):
        certain = size if probability else 0
        return [float(k == certain) for k in range(size + 1)]
    if size < 60:  # exact coefficients fit
        return [
            math.comb(size, k) * probability**k * (1 - probability) ** (size - k)
            for k in range(size + 1)
        ]
    whole, yes, no = math.lgamma(size + 1), math.log(probability), math.log1p(-probability)
    return [
        math.exp(whole - math.lgamma(k + 1) - math.lgamma(size - k + 1) + k * yes + (size - k) * no)
        for k in range(size + 1)
    ]
