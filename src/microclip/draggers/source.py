"""Reading a ledger for scoring: its files by rank, whole steps over all ranks, numbered ids.

Anything relative to a step (a median, a share) needs all rows of that step at once, from every
rank, and nothing more. `WeightReader` says how much each example counted, `trajectories` looks up
every single appearance of a few examples. Knows nothing about scores.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from microclip.draggers.statistics import Numbers, Values, excess_losses, log_norms
from microclip.ledger import Ledger, Record, open_ledger
from microclip.ledger.storage import PART_NAME, damaged_error, read_part
from microclip.ledger.tables import EXAMPLES, MICROBATCHES, with_all_columns

ROWS = 200_000  # about how many rows are held in memory and yielded at once

# What is looked up about single appearances.
MICROBATCH_COLUMNS = ("step", "rank", "microbatch", "ids", "norm", "weight", "domain")
EXAMPLE_COLUMNS = ("step", "rank", "microbatch", "id", "loss", "weight")
PLACE = ("rank", "microbatch")  # of a micro-batch within its step
APPEARANCE = ["step", *PLACE, "id"]

LedgerLike = str | os.PathLike[str] | Ledger | Record
Parts = dict[int, Sequence[Path]]  # the files of each rank, in the order of their steps


def open_record(ledger: LedgerLike) -> Record:
    """Return an open ledger: of a folder, of a `Ledger` that is still being written, or itself."""
    if isinstance(ledger, Ledger):
        ledger.flush()
        ledger = ledger.path
    if not isinstance(ledger, str | os.PathLike | Record):
        raise TypeError(
            "ledger must be a folder, a microclip.Ledger or the result of open_ledger(), but got "
            f"an object of type {type(ledger).__name__}."
        )
    return ledger if isinstance(ledger, Record) else open_ledger(ledger)


@dataclass(frozen=True)
class Source:
    """An open ledger."""

    path: Path
    integers: bool  # whether to read ids as integers
    steps: range
    microbatches: Parts
    examples: Parts  # empty if no per-example losses were recorded

    @classmethod
    def open(cls, ledger: LedgerLike) -> Source:
        """Open a ledger: a folder, a `Ledger` that is still being written, or a `Record`."""
        record = open_record(ledger)
        return cls(
            record.path,
            record.ids_are_integers,
            record.steps,
            _by_rank(record, MICROBATCHES),
            _by_rank(record, EXAMPLES) if record.has_examples else {},
        )

    @cached_property
    def has_losses(self) -> bool:
        """Whether any loss was recorded, per example or per micro-batch."""
        if self.examples:
            return True
        files = (file for files in self.microbatches.values() for file in files)
        return any(_has_values(file) for file in files)

    @cached_property
    def has_example_weights(self) -> bool:
        """Whether a rule weighted single examples."""
        files = (file for files in self.examples.values() for file in files)
        return any("weight" in _columns_of(file) for file in files)

    def thirds(self, steps: Numbers) -> Numbers:
        """Return the third of training that each step falls into: 0, 1 or 2."""
        return np.minimum(3 * (steps - self.steps.start) // max(len(self.steps), 1), 2)


def _columns_of(file: Path) -> list[str]:
    try:
        with pq.ParquetFile(file) as opened:
            names: list[str] = opened.schema_arrow.names
            return names
    except FileNotFoundError as error:
        raise _removed(file) from error


def _has_values(file: Path) -> bool:
    column = read_part(file, ["loss"])["loss"]
    return bool(column.null_count < len(column))


def _by_rank(record: Record, table: str) -> Parts:
    files: dict[int, list[Path]] = {}
    try:
        names = record.dataset(table).files
    except FileNotFoundError as error:
        raise _removed(Path(str(error))) from error
    for name in names:
        match = PART_NAME.fullmatch(Path(name).name)
        assert match is not None
        files.setdefault(int(match[1]), []).append(Path(name))
    return dict(files)


def whole_steps(parts: Parts, columns: Sequence[str], rows: int = ROWS) -> Iterator[pa.Table]:
    """Yield the rows of a ledger in step order; a step is never split between two tables."""
    each = max(rows // max(len(parts), 1), 256)
    ranks = [_RankReader(files, columns, each) for files in parts.values()]
    while ranks:
        slowest = min(ranks, key=lambda rank: rank.reached)
        slowest.read()
        complete = min(rank.reached for rank in ranks)
        if complete == math.inf or sum(rank.waiting_rows for rank in ranks) >= rows:
            taken = [table for rank in ranks for table in rank.take(complete)]
            if taken:
                yield pa.concat_tables(taken).combine_chunks()
        if complete == math.inf:
            return


class _RankReader:
    """The files of one rank, read chunk by chunk in step order."""

    def __init__(self, parts: Sequence[Path], columns: Sequence[str], rows: int) -> None:
        self._tables = self._read(parts, list(columns), rows)
        self._waiting: list[pa.Table] = []
        self.waiting_rows = 0
        self.reached: float = -math.inf  # every row of the steps before this one has been read

    def read(self) -> None:
        """Read the next chunk."""
        table = next(self._tables, None)
        if table is None:
            self.reached = math.inf
            return
        self._waiting.append(table)
        self.waiting_rows += len(table)
        self.reached = table["step"][-1].as_py()

    def take(self, before: float) -> list[pa.Table]:
        """Remove and return the rows of all steps before this one."""
        taken, kept = [], []
        for table in self._waiting:
            cut = int(np.searchsorted(table["step"].to_numpy(), before))
            taken.append(table.slice(0, cut))
            if cut < len(table):
                kept.append(table.slice(cut))
        self._waiting = kept
        self.waiting_rows = sum(map(len, kept))
        return [table for table in taken if len(table)]

    @staticmethod
    def _read(parts: Sequence[Path], columns: list[str], rows: int) -> Iterator[pa.Table]:
        for part in parts:
            try:
                with pq.ParquetFile(part) as file:
                    if not _in_order(file.read(["step"])):
                        # rewritten by another tool; sorting restores the order we rely on
                        whole = file.read(columns).sort_by("step").combine_chunks()
                        batches = iter(whole.to_batches())
                    else:
                        batches = file.iter_batches(rows, columns=columns)
                    for batch in batches:
                        if len(batch):
                            if len(batch.schema) < len(columns):  # only EXAMPLES may lack some
                                batch = with_all_columns(batch, EXAMPLES, columns)
                            yield pa.Table.from_batches([batch])
            except FileNotFoundError as error:
                raise _removed(part) from error
            except (pa.ArrowInvalid, OSError) as error:
                raise damaged_error(part, error) from error


def _removed(part: Path) -> FileNotFoundError:
    return FileNotFoundError(
        f"{part} was removed while the ledger was being read, either by its keep_steps option or "
        "by a run that restarted. Try again."
    )


def _in_order(table: pa.Table) -> bool:
    steps = table["step"].to_numpy()
    return bool((steps[1:] >= steps[:-1]).all())


def step_groups(table: pa.Table, domains: Numbers) -> Numbers:
    """Number the groups of rows that share a step and a domain."""
    _, places = np.unique(table["step"].to_numpy(), return_inverse=True)
    count = int(domains.max(initial=0)) + 1
    groups: Numbers
    _, groups = np.unique(places * count + domains, return_inverse=True)
    return groups


def members(table: pa.Table) -> tuple[pa.Array, Numbers]:
    """Return the ids of all rows, concatenated, and how many each row has."""
    ids = column(table, "ids")
    return ids.flatten(), pc.list_value_length(ids).to_numpy().astype(np.int64)


def column(table: pa.Table, name: str) -> pa.Array:
    """Return a column as one contiguous array."""
    chunks = table[name].chunks
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)


class WeightReader:
    """Reads how much each example counted, next to the micro-batches of the same steps.

    Only for ledgers with weights of examples (`Source.has_example_weights`).
    """

    def __init__(self, source: Source) -> None:
        self._tables = whole_steps(source.examples, ("step", "rank", "microbatch", "weight"))
        self._waiting: pa.Table | None = None

    def read(self, table: pa.Table) -> tuple[Values, Values]:
        """Return weight and factor for every member of every row of the next whole steps.

        The weight is what the rule gave the example, the factor what its gradient was multiplied
        by in all: the recorded weight of a micro-batch contains the mean weight of its examples.
        """
        sizes = pc.list_value_length(column(table, "ids")).to_numpy().astype(np.int64)
        rows = np.repeat(np.arange(len(table)), sizes)
        weights = np.ones(len(rows))
        given = self._take(pc.max(table["step"]).as_py())
        if given is not None:
            own, others = _places(table, given)
            order = np.argsort(others, kind="stable")
            starts = np.searchsorted(others, own, sorter=order)
            found = np.searchsorted(others, own, "right", sorter=order) - starts
            known = (found == sizes)[rows]
            within = np.arange(len(rows)) - (np.cumsum(sizes) - sizes)[rows]
            chosen = order[(starts[rows] + within)[known]]
            weights[known] = pc.fill_null(given["weight"], 1.0).to_numpy()[chosen]
        mean = np.bincount(rows, weights, len(table)) / np.maximum(sizes, 1)
        factors = np.where(weights > 0, table["weight"].to_numpy()[rows], 0.0)
        np.divide(factors * weights, mean[rows], out=factors, where=weights > 0)
        return weights, factors

    def _take(self, last: int) -> pa.Table | None:
        """Return the examples of all steps up to this one that were not returned before."""
        tables = [] if self._waiting is None else [self._waiting]
        while not tables or pc.max(tables[-1]["step"]).as_py() <= last:
            table = next(self._tables, None)
            if table is None:
                break
            tables.append(table)
        if not tables:
            return None
        joined = pa.concat_tables(tables).combine_chunks()
        later = pc.greater(joined["step"], last)
        self._waiting = joined.filter(later) if pc.any(later).as_py() else None
        return joined.filter(pc.invert(later))


def _places(*tables: pa.Table) -> list[Numbers]:
    """Return a number for step, rank and micro-batch of every row, the same in all tables."""
    found: list[Numbers] = [np.zeros(len(table), dtype=np.int64) for table in tables]
    for name in ("step", *PLACE):
        columns = [table[name].to_numpy().astype(np.int64) for table in tables]
        low = min((int(each.min(initial=2**62)) for each in columns), default=0)
        high = max(int(each.max(initial=low)) for each in columns)
        found = [
            numbers * (high - low + 1) + each - low
            for numbers, each in zip(found, columns, strict=True)
        ]
    return found


class IdIndex:
    """Numbers example ids in the order of their first appearance.

    Ids stay in Arrow memory, one copy of each: a Python object for every id of a large data set
    would take more memory than everything learned about it.
    """

    def __init__(self, integers: bool) -> None:
        # large_string: all ids together may exceed the 2 GiB that Arrow's plain strings can hold
        self.type = pa.int64() if integers else pa.large_string()
        self._known: pa.Array = pa.array([], self.type)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def ids(self) -> pa.Array:
        """The ids, each at the position of its number."""
        return self._known

    def look_up(self, ids: pa.Array) -> Numbers:
        """Return the numbers of some ids (strings, as ledgers store them), adding unknown ones."""
        ids = ids.cast(self.type)
        found = pc.index_in(ids, value_set=self._known)
        if found.null_count:
            new = pc.unique(ids.filter(pc.is_null(found)))
            self._known = pa.concat_arrays([self._known, new])
            found = pc.index_in(ids, value_set=self._known)
        numbers: Numbers = found.to_numpy(zero_copy_only=False).astype(np.int64)
        return numbers


def trajectories(ledger: LedgerLike, ids: Sequence[int | str]) -> pa.Table:
    """Return every appearance of some examples, in step order.

    Args:
        ledger: The folder of a ledger, a `microclip.Ledger`, or the result of `open_ledger`.
        ids: Which examples, for instance `draggers.ids(n=20)`.

    The columns are step, rank, microbatch and id; norm and weight of the micro-batch, and log_norm
    relative to the median of step and domain; loss and excess_loss (above the step's median) of
    the example itself, null if the ledger has no loss per example; and example_weight, null if the
    rule does not weight examples.
    """
    source = Source.open(ledger)
    wanted = pa.array(ids, pa.int64() if source.integers else pa.string())
    tables = [
        _norms(table, wanted) for table in whole_steps(source.microbatches, MICROBATCH_COLUMNS)
    ]
    found = pa.concat_tables(tables)
    if missing := set(wanted.to_pylist()).difference(found["id"].to_pylist()):
        some = ", ".join(repr(one) for one in sorted(missing)[:3])
        raise ValueError(
            f"{len(missing)} of the {len(wanted)} ids are not in the ledger {source.path}, for "
            f"instance {some}."
        )
    if source.examples:
        parts = [_losses(table, wanted) for table in whole_steps(source.examples, EXAMPLE_COLUMNS)]
        found = found.join(pa.concat_tables(parts), APPEARANCE, join_type="left outer")
    else:
        for name in ("loss", "excess_loss", "example_weight"):
            found = found.append_column(name, pa.nulls(len(found), pa.float64()))
    return found.sort_by([(name, "ascending") for name in APPEARANCE])


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
    kept = kept.set_column(5, "excess_loss", pa.array(excess, from_pandas=True))
    kept = kept.append_column("example_weight", table["weight"].cast(pa.float64()))
    return kept.filter(pc.is_in(names, value_set=wanted))
