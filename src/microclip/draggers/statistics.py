"""Pure array functions: norms and losses relative to their step, and running means per example.

Norms and losses change as training goes on and differ between tasks, so a micro-batch is only ever
compared with others of the same step (and domain); `groups` numbers the step (and domain) of every
value. `Series` then sums such values per example; `HeldBack` says when one had little weight. Knows
nothing about files.

| norm | its logarithm relative to the median |
| --- | --- |
| more than 1000 times the median, or NaN or inf | log 1000: no single step may decide everything |
| less than a 1000th of the median, or 0 | -log 1000 |
| the only one of its step (and domain) | unknown, NaN: there is nothing to compare it with |
| in a step without a finite norm above 0 | unknown, NaN |
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

LIMIT = float(np.log(1000.0))
THIRDS = ("early", "middle", "late")
Z = 1.959964  # 95 % of a normal distribution lies within this many standard deviations
LITTLE = 0.5  # an example with less weight is held back, as in `Outcome.held_back`
NEVER = -1


def log_norms(norms: Values, groups: Numbers) -> Values:
    """Return log(norm / median norm of the group), for every norm.

    >>> log_norms(np.array([1.0, 2.0, 4.0]), np.array([0, 0, 0])) / np.log(2)
    array([-1.,  0.,  1.])
    """
    counts = np.isfinite(norms) & (norms > 0)
    logs = np.full(len(norms), np.nan)
    np.log(norms, out=logs, where=counts)
    relative = np.clip(logs - medians(logs, groups), -LIMIT, LIMIT)
    relative[norms == 0] = -LIMIT
    relative[~np.isfinite(norms)] = LIMIT
    relative[~comparable(norms, groups)] = np.nan
    return relative


def excess_losses(losses: Values, groups: Numbers) -> Values:
    """Return loss - median loss of the group; NaN or inf counts as the largest finite loss there.

    >>> excess_losses(np.array([0.5, 1.0, 3.0, np.nan]), np.array([0, 0, 0, 0]))
    array([-0.5,  0. ,  2. ,  2. ])
    """
    finite = np.isfinite(losses)
    known = np.where(finite, losses, np.nan)
    highest = np.full(_count(groups), -np.inf)
    np.maximum.at(highest, groups[finite], losses[finite])
    excess: Values = np.where(finite, known, highest[groups]) - medians(known, groups)
    excess[~comparable(np.where(finite, 1.0, np.nan), groups)] = np.nan
    return excess


def comparable(norms: Values, groups: Numbers) -> npt.NDArray[np.bool_]:
    """Return which values are not alone in their group, with a finite value above 0 in it."""
    counts = np.isfinite(norms) & (norms > 0)
    enough = (np.bincount(groups) > 1) & (np.bincount(groups, weights=counts) > 0)
    found: npt.NDArray[np.bool_] = enough[groups]
    return found


def medians(values: Values, groups: Numbers) -> Values:
    """Return the median of its group for every value, ignoring NaNs.

    >>> medians(np.array([1.0, 5.0, 2.0, 7.0, np.nan]), np.array([0, 1, 0, 0, 1]))
    array([2., 5., 2., 2., 5.])
    """
    order = np.lexsort((values, groups))  # NaNs, which do not count, come last in their group
    ordered = values[order]
    sizes = np.bincount(groups, minlength=_count(groups))
    known = np.bincount(groups, weights=~np.isnan(values), minlength=len(sizes)).astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    lower, upper = starts + (known - 1) // 2, starts + known // 2
    middle = np.full(len(sizes), np.nan)
    some = known > 0
    middle[some] = (ordered[lower[some]] + ordered[upper[some]]) / 2
    return middle[groups]


def _count(groups: Numbers) -> int:
    return int(groups.max(initial=-1)) + 1


class Series:
    """Mean, interval and trend of a quantity, per example.

    Keeps sums by example and third of training, so memory grows with the number of examples, not
    with the number of steps.
    """

    def __init__(self) -> None:
        self._sums = np.zeros((3, 0))
        self._counts = np.zeros((3, 0), dtype=np.int32)
        self._squares = np.zeros(0)

    def add(self, examples: Numbers, values: Values, thirds: Numbers, total: int) -> None:
        """Add values of examples (NaN: no value); `total` examples are known by now."""
        self._grow(total)
        known = ~np.isnan(values)
        for third in range(3):
            chosen = known & (thirds == third)
            if not chosen.any():
                continue
            rows, added = examples[chosen], values[chosen]
            self._sums[third] += np.bincount(rows, added, minlength=self._size)
            self._counts[third] += np.bincount(rows, minlength=self._size).astype(np.int32)
            self._squares += np.bincount(rows, np.square(added), minlength=self._size)

    def finish(self, total: int) -> Series:
        """Resize to exactly this many examples."""
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


class HeldBack:
    """When each example was held back: its weight was below 1/2.

    Attributes:
        times: How often.
        first: The first such step; NEVER (-1) if there is none.
        last: The last such step.
        since: If it was held back at its last visit: since which step without a break, else NEVER.
    """

    def __init__(self) -> None:
        self.times: Numbers = np.zeros(0, dtype=np.int64)
        self.first: Numbers = np.zeros(0, dtype=np.int64)
        self.last: Numbers = np.zeros(0, dtype=np.int64)
        self.since: Numbers = np.zeros(0, dtype=np.int64)

    def add(self, examples: Numbers, weights: Values, steps: Numbers, total: int) -> None:
        """Add the visits of some steps, all later than those before; in any order among them."""
        self.finish(total)
        held = weights < LITTLE
        those, when = examples[held], steps[held]
        self.times += np.bincount(those, minlength=total)
        np.maximum.at(self.last, those, when)
        earliest = np.full(total, np.iinfo(np.int64).max)
        np.minimum.at(earliest, those, when)
        self.first = np.where(self.first == NEVER, _known(earliest), self.first)
        free = np.full(total, NEVER)  # the last step in which it had its weight
        np.maximum.at(free, examples[~held], steps[~held])
        self.since[free != NEVER] = NEVER
        again = when > free[those]
        earliest.fill(np.iinfo(np.int64).max)
        np.minimum.at(earliest, those[again], when[again])
        self.since = np.where(self.since == NEVER, _known(earliest), self.since)

    def finish(self, total: int) -> HeldBack:
        """Resize to this many examples."""
        more = total - len(self.times)
        self.times = np.pad(self.times, (0, more))
        for name in ("first", "last", "since"):
            padded = np.pad(getattr(self, name), (0, more), constant_values=NEVER)
            setattr(self, name, padded)
        return self


def _known(earliest: Numbers) -> Numbers:
    found: Numbers = np.where(earliest == np.iinfo(np.int64).max, NEVER, earliest)
    return found


def _divide(sums: Values, counts: npt.NDArray[np.integer]) -> Values:
    result = np.full(sums.shape, np.nan)
    np.divide(sums, counts, out=result, where=counts > 0)
    return result
