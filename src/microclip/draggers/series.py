"""A quantity seen again and again, example by example: its mean, interval, and course.

Holds sums, not values, so its memory goes by the number of examples and not by that of steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

THIRDS = ("early", "middle", "late")
Z = 1.959964  # 95 % of a normal distribution lie within so many standard deviations

Values = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


class Series:
    """Sums over appearances, by example and third of training."""

    def __init__(self) -> None:
        self._sums = np.zeros((3, 0))
        self._counts = np.zeros((3, 0), dtype=np.int32)
        self._squares = np.zeros(0)

    def add(self, examples: Numbers, values: Values, thirds: Numbers, total: int) -> None:
        """Take note of values (NaN: none) of examples; `total` examples are known by now."""
        self._grow(total)
        known = ~np.isnan(values)
        for third in range(3):
            chosen = known & (thirds == third)
            if not chosen.any():
                continue
            who, what = examples[chosen], values[chosen]
            self._sums[third] += np.bincount(who, what, minlength=self._size)
            self._counts[third] += np.bincount(who, minlength=self._size).astype(np.int32)
            self._squares += np.bincount(who, np.square(what), minlength=self._size)

    def finish(self, total: int) -> Series:
        """Make room for exactly all the examples there are."""
        self._grow(total)
        self._sums, self._counts = self._sums[:, :total], self._counts[:, :total]
        self._squares = self._squares[:total]
        return self

    @property
    def counts(self) -> Numbers:
        """How many values each example had."""
        found: Numbers = self._counts.sum(0, dtype=np.int64)
        return found

    @property
    def total(self) -> Values:
        """The sum of all values."""
        found: Values = self._sums.sum(0)
        return found

    @property
    def mean(self) -> Values:
        """The mean over all values; NaN for examples without any."""
        return _divide(self.total, self.counts)

    def third(self, number: int) -> Values:
        """The mean over the values of one third of training."""
        return _divide(self._sums[number], self._counts[number])

    @property
    def deviation(self) -> Values:
        """The standard deviation over all values; NaN for fewer than two."""
        n = self.counts
        around = np.maximum(self._squares - _divide(np.square(self.total), n), 0)
        return np.sqrt(_divide(around, np.where(n > 1, n - 1, 0)))

    @property
    def half_interval(self) -> Values:
        """Half the width of the 95 % interval of the mean, as if the values were independent."""
        return Z * self.deviation / np.sqrt(np.maximum(self.counts, 1))

    @property
    def _size(self) -> int:
        return len(self._squares)

    def _grow(self, total: int) -> None:
        if total <= self._size:
            return
        more = max(total, self._size + self._size // 2) - self._size
        self._sums = np.pad(self._sums, ((0, 0), (0, more)))
        self._counts = np.pad(self._counts, ((0, 0), (0, more)))
        self._squares = np.pad(self._squares, (0, more))


def _divide(sums: Values, counts: npt.NDArray[np.integer]) -> Values:
    result = np.full(sums.shape, np.nan)
    np.divide(sums, counts, out=result, where=counts > 0)
    return result
