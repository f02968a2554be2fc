"""Every single appearance of a few examples, with the norm, weight and loss recorded for it.

Reads the ledger directly; needs no scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from microclip.draggers.source import (
    LedgerLike,
    Source,
    column,
    members,
    step_groups,
    whole_steps,
)
from microclip.draggers.statistics import excess_losses, log_norms

MICROBATCHES = ("step", "rank", "microbatch", "ids", "norm", "weight", "domain")
EXAMPLES = ("step", "rank", "microbatch", "id", "loss")
PLACE = ["step", "rank", "microbatch", "id"]


def trajectories(ledger: LedgerLike, ids: Sequence[int | str]) -> pa.Table:
    """Return every appearance of some examples, in step order.

    Args:
        ledger: The folder of a ledger, a `microclip.Ledger`, or the result of `open_ledger`.
        ids: Which examples, for instance `draggers.ids(n=20)`.

    The columns are step, rank, microbatch and id; norm and weight of the micro-batch, and log_norm
    relative to the median of step and domain; loss and excess_loss (above the step's median) of
    the example itself, null if the ledger has no loss per example.
    """
    source = Source.open(ledger)
    wanted = pa.array(ids, pa.int64() if source.integers else pa.string())
    tables = [_norms(table, wanted) for table in whole_steps(source.microbatches, MICROBATCHES)]
    found = pa.concat_tables(tables)
    if missing := set(wanted.to_pylist()).difference(found["id"].to_pylist()):
        some = ", ".join(repr(one) for one in sorted(missing)[:3])
        raise ValueError(
            f"{len(missing)} of the {len(wanted)} ids are not in the ledger {source.path}, for "
            f"instance {some}."
        )
    if source.examples:
        parts = [_losses(table, wanted) for table in whole_steps(source.examples, EXAMPLES)]
        found = found.join(pa.concat_tables(parts), PLACE, join_type="left outer")
    else:
        nothing = pa.nulls(len(found), pa.float64())
        found = found.append_column("loss", nothing).append_column("excess_loss", nothing)
    return found.sort_by([(name, "ascending") for name in PLACE])


def _norms(table: pa.Table, wanted: pa.Array) -> pa.Table:
    names, sizes = members(table)
    names = names.cast(wanted.type)
    coded = column(table, "domain").dictionary_encode(null_encoding="encode")
    groups = step_groups(table, coded.indices.to_numpy().astype(np.int64))
    relative = log_norms(table["norm"].to_numpy(), groups)
    rows = pa.array(np.repeat(np.arange(len(table)), sizes))
    chosen = pc.is_in(names, value_set=wanted)
    rows = rows.filter(chosen)
    return (
        table.append_column("log_norm", pa.array(relative, from_pandas=True))
        .drop_columns(["ids", "domain"])
        .take(rows)
        .add_column(3, "id", names.filter(chosen))
    )


def _losses(table: pa.Table, wanted: pa.Array) -> pa.Table:
    losses = table["loss"].to_numpy().astype(np.float64)
    excess = excess_losses(losses, step_groups(table, np.zeros(len(table), dtype=np.int64)))
    names = column(table, "id").cast(wanted.type)
    kept = table.set_column(3, "id", names).set_column(4, "loss", pa.array(losses))
    kept = kept.append_column("excess_loss", pa.array(excess, from_pandas=True))
    return kept.filter(pc.is_in(names, value_set=wanted))
