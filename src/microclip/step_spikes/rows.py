"""The rows of recorded steps, and what each contributed. Knows ledgers; nothing of models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from microclip.draggers.source import Source, column, whole_steps
from microclip.draggers.statistics import Numbers, Values


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
