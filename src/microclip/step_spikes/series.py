"""One loss and one gradient norm per step, and how far each stands out from the steps before it.

A step is compared with the median of a window of earlier steps, in robust standard deviations
(1.4826 times the median absolute deviation): earlier spikes in the window hardly matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
from numpy.lib.stride_tricks import sliding_window_view

from microclip.draggers.source import Source, whole_steps
from microclip.draggers.statistics import Numbers, Values

FEWEST = 10  # steps to compare a step with
AT_ONCE = 10_000  # steps
LEAST = 0.01  # of the median: deviations smaller than this are not told apart


@dataclass(frozen=True)
class StepSeries:
    """What was recorded of each step, in their order."""

    steps: Numbers
    losses: Values  # mean over all examples; NaN: not recorded
    norms: Values  # root mean square of the norms of micro-batches; NaN: not recorded
    microbatches: Numbers
    has_losses: bool
    has_norms: bool


def read_series(source: Source) -> StepSeries:
    """Read a ledger; memory grows with the number of steps only."""
    found: list[tuple[Numbers, Values, Values, Numbers]] = []
    has_losses = has_norms = False
    for table in whole_steps(source.microbatches, ("step", "size", "norm", "loss")):
        steps, groups = np.unique(table["step"].to_numpy(), return_inverse=True)
        sizes = table["size"].to_numpy().astype(np.float64)
        has_losses |= table["loss"].null_count < len(table)
        has_norms |= table["norm"].null_count < len(table)
        losses = pc.fill_null(table["loss"], np.nan).to_numpy()
        norms = pc.fill_null(table["norm"], np.nan).to_numpy()
        total = np.bincount(groups, sizes)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = np.bincount(groups, losses * sizes) / total
            largest = np.full(len(steps), np.finfo(np.float64).tiny)
            np.fmax.at(largest, groups, norms)  # squares of the norms themselves may overflow
            squares = np.square(norms / largest[groups]) * sizes
            norm = largest * np.sqrt(np.bincount(groups, squares) / total)
        found.append((steps, mean, norm, np.bincount(groups)))
    steps, mean, norm, counts = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return StepSeries(steps, mean, norm, counts, has_losses, has_norms)


def stand_out(values: Values, window: int) -> tuple[Values, Values]:
    """Return how far each value lies above the median before it, and that median.

    In robust standard deviations; inf for values that are not finite. The first values, which have
    fewer than ten before them, are compared with the first of the window instead.

    >>> stand_out(np.array([2.0, 1.0] * 10 + [9.0]), 20)[0][-1].round(2)
    np.float64(10.12)
    """
    count = len(values)
    finite = np.where(np.isfinite(values), values, np.nan)
    if np.isfinite(finite).sum() < FEWEST:
        return np.where(np.isfinite(values), 0.0, np.inf), np.full(count, np.nan)
    padded = np.concatenate([np.full(window, np.nan), finite])
    before = sliding_window_view(padded, window)[:count]
    scores, medians = np.zeros(count), np.zeros(count)
    first = finite[: max(window, FEWEST)]
    first = first if np.isfinite(first).any() else finite
    for start in range(0, count, AT_ONCE):
        chunk = slice(start, start + AT_ONCE)
        rows = before[chunk].copy()
        few = np.isfinite(rows).sum(1) < FEWEST
        rows[few] = _resized(first, window)
        middle = np.nanmedian(rows, axis=1)
        spread = 1.4826 * np.nanmedian(np.abs(rows - middle[:, None]), axis=1)
        spread = np.maximum(np.maximum(spread, LEAST * np.abs(middle)), 1e-12)
        scores[chunk] = (finite[chunk] - middle) / spread
        medians[chunk] = middle
    return np.where(np.isfinite(values), scores, np.inf), medians


def _resized(values: Values, size: int) -> Values:
    return np.concatenate([values[:size], np.full(max(size - len(values), 0), np.nan)])
