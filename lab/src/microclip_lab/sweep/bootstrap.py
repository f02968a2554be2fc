"""Intervals by resampling seeds. Unlike t-intervals they assume no shape, and need more seeds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from microclip.report.statistics import CONFIDENCE

DRAWS = 10_000
ALL_OF_THEM = 50_000  # resamples that are all looked at, if there are no more
ENOUGH = 10  # seeds from which on the interval is about as wide as it should be


@dataclass(frozen=True)
class Interval:
    """Where 95 % of the resampled means lie."""

    low: float
    high: float


def bootstrap(values: Sequence[float]) -> Interval | None:
    """Return the percentile interval of the mean; None: one value cannot be resampled.

    Up to six values all their n^n resamples are taken, so nothing is left to chance.

    >>> bootstrap([0.0, 2.0])  # means 0, 1, 1, 2
    Interval(low=0.0, high=2.0)
    """
    count = len(values)
    if count < 2:
        return None
    if count**count <= ALL_OF_THEM:
        places = np.array(list(itertools.product(range(count), repeat=count)))
    else:
        places = np.random.default_rng(0).integers(0, count, (DRAWS, count))
    means = np.asarray(values, dtype=np.float64)[places].mean(axis=1)
    ends = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
    low, high = np.quantile(means, ends, method="inverted_cdf")
    return Interval(float(low), float(high))
