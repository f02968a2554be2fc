"""Norms, bounds and weights over training, summarized in stretches of consecutive steps.

One pass over a ledger; only the rows of one stretch are in memory. Which examples and domains were
held back is the business of `microclip.draggers` and `microclip.guard`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from microclip.draggers.source import Source, whole_steps

STRETCHES = 120
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
COLUMNS = ("step", "size", "norm", "weight", "bound", "loss", "skipped")

Values = npt.NDArray[np.float64]
Line = list[float | None]


@dataclass
class Timeline:
    """What happened in each stretch; None where nothing was finite."""

    steps: list[float] = field(default_factory=list)  # the middle of each stretch
    norms: dict[float, Line] = field(default_factory=lambda: {q: [] for q in QUANTILES})
    weights: dict[float, Line] = field(default_factory=lambda: {q: [] for q in QUANTILES})
    bound: Line = field(default_factory=list)
    loss: Line = field(default_factory=list)
    first: int = 0
    last: int = 0
    recorded: int = 0  # steps
    microbatches: int = 0
    largest: int = 0  # examples in a micro-batch
    not_finite: int = 0  # micro-batches with a gradient that was not
    mean_weight: float | None = None  # of the average example


def read_timeline(ledger: Path) -> Timeline:
    """Read a ledger from the first step to the last."""
    source = Source.open(ledger)
    timeline = Timeline(first=source.steps.start, last=source.steps.stop - 1)
    count = min(STRETCHES, len(source.steps))
    given = total = 0.0
    for stretch in _stretches(source, count):
        steps = stretch["step"].to_numpy()
        sizes = stretch["size"].to_numpy()
        norms, weights, bounds = (_numbers(stretch, name) for name in ("norm", "weight", "bound"))
        timeline.steps.append(float(steps[0] + steps[-1]) / 2)
        for lines, values in ((timeline.norms, norms), (timeline.weights, weights)):
            for quantile, found in zip(QUANTILES, _quantiles(values), strict=True):
                lines[quantile].append(found)
        timeline.bound.append(_quantiles(bounds)[2])
        timeline.loss.append(_mean(_numbers(stretch, "loss"), sizes))
        timeline.recorded += len(np.unique(steps))
        timeline.microbatches += len(steps)
        timeline.largest = max(timeline.largest, int(sizes.max()))
        timeline.not_finite += int((~np.isfinite(norms)).sum())
        counted = np.isfinite(weights)
        given += float((weights * sizes)[counted].sum())
        total += float(sizes[counted].sum())
    timeline.mean_weight = given / total if total else None
    return timeline


def _stretches(source: Source, count: int) -> Iterator[pa.Table]:
    """Yield the rows of consecutive steps together, in `count` stretches of equal length."""
    waiting: list[pa.Table] = []
    place = 0
    for table in whole_steps(source.microbatches, COLUMNS):
        table = table.sort_by("step")
        places = (table["step"].to_numpy() - source.steps.start) * count // len(source.steps)
        for now in np.unique(places):
            if now != place and waiting:
                yield pa.concat_tables(waiting).combine_chunks()
                waiting = []
            place = now
            first, last = np.searchsorted(places, [now, now + 1])
            waiting.append(table.slice(first, last - first))
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()


def _numbers(table: pa.Table, name: str) -> Values:
    values: Any = table[name].to_numpy()
    found: Values = np.asarray(values, dtype=np.float64)
    return found


def _quantiles(values: Values) -> Line:
    known = values[np.isfinite(values)]
    if not len(known):
        return [None] * len(QUANTILES)
    found: Line = np.quantile(known, QUANTILES).tolist()
    return found


def _mean(values: Values, sizes: npt.NDArray[Any]) -> float | None:
    known = np.isfinite(values)
    if not known.any():
        return None
    return float(np.average(values[known], weights=sizes[known]))
