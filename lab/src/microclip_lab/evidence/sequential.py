"""The decision rule: relative effects, intervals that may be looked at several times, and power.

Seeds come in blocks. After each block (a look) the interval is computed at a confidence of
1 - 0.05 / looks, Bonferroni's correction: the chance that any of the looks misses the truth is at
most 5 %, whenever one stops. Knows nothing of tasks or records.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import stdtrit  # type: ignore[import-untyped]

ALPHA = 0.05  # the chance that any look misses the truth
POWER = 0.8

Outcome = Literal["gain", "harm", "nothing", "undecided"]


@dataclass(frozen=True)
class Interval:
    """A mean, its interval, and the spread of a single pair of runs."""

    mean: float
    low: float
    high: float
    count: int
    deviation: float


def t_value(freedom: int, tail: float) -> float:
    """Return the quantile of Student's t that leaves this much above it.

    >>> round(t_value(7, 0.025), 3), round(t_value(7, 0.05 / 6), 3)
    (2.365, 3.128)
    """
    return float(stdtrit(freedom, 1 - tail))


def interval(values: Sequence[float], looks: int = 1) -> Interval | None:
    """Return the mean with an interval that holds at all looks; None for fewer than two values.

    >>> found = interval([1.0, 2.0, 3.0])  # 2 -+ 4.303 / sqrt(3)
    >>> round(found.low, 3), round(found.high, 3)
    (-0.484, 4.484)
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    half = t_value(len(values) - 1, ALPHA / looks / 2) * deviation / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, len(values), deviation)


def relative(base: Sequence[float], other: Sequence[float], looks: int = 1) -> Interval | None:
    """Return by how much other errors are smaller than the base's, in percent of the base's.

    The ratio R of two means, with the spread of difference - R x base: the base's own spread counts
    only as far as the difference does not follow it.

    >>> found = relative([10.0, 20.0], [9.0, 18.0])  # exactly a tenth less, whatever the seed
    >>> round(found.mean, 9), round(found.high - found.low, 9)
    (10.0, 0.0)

    A run that diverged has no error; an arm with one is as bad as can be.

    >>> relative([10.0, 20.0], [9.0, math.inf]).high
    -inf
    """
    if len(base) < 2 or not all(map(math.isfinite, base)):
        return None
    if not all(map(math.isfinite, other)):
        return Interval(-math.inf, -math.inf, -math.inf, len(base), math.nan)
    mean = statistics.fmean(base)
    if mean <= 0:
        return None
    differences = [one - two for one, two in zip(base, other, strict=True)]
    ratio = statistics.fmean(differences) / mean
    rest = [
        100 * (difference - ratio * one) / mean
        for difference, one in zip(differences, base, strict=True)
    ]
    return interval([100 * ratio + each for each in rest], looks)


def outcome(found: Interval | None, margin: float) -> Outcome:
    """Return what an interval says; "nothing" if it lies within the margin on both sides.

    >>> outcome(Interval(3, 1, 5, 8, 1), 2), outcome(Interval(0, -1, 1, 8, 1), 2)
    ('gain', 'nothing')
    >>> outcome(Interval(0, -3, 1, 8, 1), 2), outcome(Interval(-2, -3, -1, 8, 1), 2)
    ('undecided', 'harm')
    """
    if found is None:
        return "undecided"
    if found.low > 0:
        return "gain"
    if found.high < 0:
        return "harm"
    return "nothing" if -margin < found.low and found.high < margin else "undecided"


def seeds_needed(deviation: float, effect: float, looks: int = 1) -> int:
    """Return the seeds at which an effect of this size would be seen, with a power of 80 %.

    >>> seeds_needed(deviation=10.0, effect=5.0)
    34
    """
    count = 2
    while count < 100_000:
        needed = t_value(count - 1, ALPHA / looks / 2) + t_value(count - 1, 1 - POWER)
        if needed * deviation / math.sqrt(count) <= abs(effect):
            return count
        count += 1 + count // 50
    return count
