"""One loss and one gradient norm per step, how far each stands out, and the rows of some steps.

A step is compared with the median of a window of earlier steps, in robust standard deviations
(1.4826 times the median absolute deviation): earlier spikes in the window hardly matter. Knows
ledgers; nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib.stride_tricks import sliding_window_view

from microclip.draggers.source import Source, column, whole_steps
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


def examples_of(source: Source, steps: Numbers) -> dict[int, dict[str, Any]]:
    """Return ids and losses, and sizes, norms and ranks of micro-batches, for some steps."""
    found: dict[int, dict[str, Any]] = {}
    wanted = pa.array(steps)
    columns = ("step", "rank", "microbatch", "ids", "size", "norm", "loss")
    for table in whole_steps(source.microbatches, columns):
        table = table.filter(pc.is_in(table["step"], value_set=wanted))
        for step in pc.unique(table["step"]).to_pylist():
            rows = table.filter(pc.equal(table["step"], step)).combine_chunks()
            rows = rows.sort_by([("rank", "ascending"), ("microbatch", "ascending")])
            sizes = rows["size"].to_numpy().astype(np.int64)
            ids = column(rows, "ids").flatten()
            found[step] = {
                "id": ids.cast(pa.int64()) if source.integers else ids,
                "of": np.repeat(np.arange(len(rows)), sizes),
                "sizes": sizes,
                "ranks": rows["rank"].to_numpy(),
                "norms": pc.fill_null(rows["norm"], np.nan).to_numpy(),
                "losses": None,
            }
    for table in whole_steps(source.examples, ("step", "rank", "microbatch", "loss")):
        table = table.filter(pc.is_in(table["step"], value_set=wanted))
        for step in pc.unique(table["step"]).to_pylist():
            rows = table.filter(pc.equal(table["step"], step)).combine_chunks()
            rows = _in_order(rows)
            if len(rows) == len(found[step]["of"]):
                found[step]["losses"] = rows["loss"].to_numpy().astype(np.float64)
    return found


def _in_order(rows: pa.Table) -> pa.Table:
    """Sort by rank and micro-batch; within one, rows stay in their order."""
    keys = rows["rank"].to_numpy(), rows["microbatch"].to_numpy()
    return rows.take(pa.array(np.lexsort(keys[::-1])))


def shares(values: Values) -> Values:
    """Return the share of each value in the total; values that are not finite share everything."""
    finite = np.isfinite(values)
    if not finite.all():
        broken: Values = (~finite) / (~finite).sum()
        return broken
    values = values - min(float(values.min(initial=0.0)), 0.0)
    largest = float(values.max(initial=0.0))
    if largest == 0:
        return np.full(len(values), 1 / max(len(values), 1))
    found: Values = values / values.sum()
    return found
