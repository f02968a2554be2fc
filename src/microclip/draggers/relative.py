"""Norms and losses relative to what the others had in the same step (and domain).

Training goes on: norms and losses of late steps are another matter than those of early ones, and
of one task than of another. What is compared is always a micro-batch with its contemporaries.
Pure functions of arrays; `groups` numbers the step (and domain) of every value.

| norm | its logarithm relative to the median |
| --- | --- |
| more than 1000 times the median, or NaN or inf | log 1000: no single step may decide all |
| less than a 1000th of the median, or 0 | -log 1000 |
| the only one of its step (and domain) | unknown, NaN: there is nobody to compare it with |
| in a step without a finite norm above 0 | unknown, NaN |
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Groups = npt.NDArray[np.int64]

LIMIT = float(np.log(1000.0))


def log_norms(norms: Values, groups: Groups) -> Values:
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


def excess_losses(losses: Values, groups: Groups) -> Values:
    """Return loss - median loss of the group; NaN or inf counts as the largest finite one there.

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


def comparable(norms: Values, groups: Groups) -> npt.NDArray[np.bool_]:
    """Say which values have others beside them, and a finite one above 0 among them all."""
    counts = np.isfinite(norms) & (norms > 0)
    enough = (np.bincount(groups) > 1) & (np.bincount(groups, weights=counts) > 0)
    found: npt.NDArray[np.bool_] = enough[groups]
    return found


def medians(values: Values, groups: Groups) -> Values:
    """Return, for every value, the median of its group; NaNs do not count.

    >>> medians(np.array([1.0, 5.0, 2.0, 7.0, np.nan]), np.array([0, 1, 0, 0, 1]))
    array([2., 5., 2., 2., 5.])
    """
    order = np.lexsort((values, groups))  # NaN, what does not count, comes last in its group
    ordered = values[order]
    sizes = np.bincount(groups, minlength=_count(groups))
    known = np.bincount(groups, weights=~np.isnan(values), minlength=len(sizes)).astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    lower, upper = starts + (known - 1) // 2, starts + known // 2
    middle = np.full(len(sizes), np.nan)
    some = known > 0
    middle[some] = (ordered[lower[some]] + ordered[upper[some]]) / 2
    return middle[groups]


def _count(groups: Groups) -> int:
    return int(groups.max(initial=-1)) + 1
