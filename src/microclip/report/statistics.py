"""Means over seeds with 95 % t-intervals, without a statistics library."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean; with two or more values, also its interval."""

    mean: float
    low: float | None
    high: float | None
    count: int


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean with its t-interval.

    >>> found = estimate([1.0, 2.0, 3.0])  # 2 -+ 4.303 / sqrt(3)
    >>> found.mean, round(found.low, 3), round(found.high, 3)
    (2.0, -0.484, 4.484)
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean, None, None, len(values))
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, len(values))


@functools.cache
def t_quantile(freedom: int) -> float:
    """Return how many standard errors a 95 % interval extends to either side.

    >>> [round(t_quantile(freedom), 4) for freedom in (1, 2, 7, 30)]
    [12.7062, 4.3027, 2.3646, 2.0423]
    """
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < CONFIDENCE else (low, middle)
    return (low + high) / 2


def _within(t: float, freedom: int) -> float:
    """Return P(-t < T < t) by Student's series, which is finite for integer degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    if odd:
        return 2 / math.pi * (angle + sine * total)
    return sine * total
