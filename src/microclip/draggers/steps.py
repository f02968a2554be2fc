"""Reading a ledger step by step: whole steps over all ranks, a bounded number of rows at a time.

Every rank has written its own files. What is relative to a step (a median, a share) needs all of
its rows at once, and nothing else does. Knows nothing of what the rows are good for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from microclip.ledger.parts import damaged

ROWS = 200_000  # about as many are held and handed on at once


class Rank:
    """The files of one rank, read piece by piece in the order of their steps."""

    def __init__(self, parts: Sequence[Path], columns: Sequence[str], rows: int) -> None:
        self._tables = self._read(parts, list(columns), rows)
        self._waiting: list[pa.Table] = []
        self.waiting_rows = 0
        self.reached: float = -math.inf  # all rows of the steps before this one were read

    def read(self) -> None:
        """Read on."""
        table = next(self._tables, None)
        if table is None:
            self.reached = math.inf
            return
        self._waiting.append(table)
        self.waiting_rows += len(table)
        self.reached = table["step"][-1].as_py()

    def take(self, before: float) -> list[pa.Table]:
        """Hand over the rows of the steps before one."""
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
                        # somebody rewrote this file; sorted, it is as good as before
                        yield file.read(columns).sort_by("step")
                        continue
                    for batch in file.iter_batches(rows, columns=columns):
                        if len(batch):
                            yield pa.Table.from_batches([batch])
            except FileNotFoundError as error:
                raise vanished(part) from error
            except (pa.ArrowInvalid, OSError) as error:
                raise damaged(part, error) from error


def vanished(part: Path) -> FileNotFoundError:
    """Return the error to raise for a part that was there a moment ago."""
    return FileNotFoundError(
        f"{part} was removed while the ledger was being read, by its own keep_steps or by a run "
        "that started again. Try again."
    )


def _in_order(table: pa.Table) -> bool:
    steps = table["step"].to_numpy()
    return bool((steps[1:] >= steps[:-1]).all())


def whole_steps(
    parts: dict[int, Sequence[Path]], columns: Sequence[str], rows: int = ROWS
) -> Iterator[pa.Table]:
    """Give the rows of a ledger in the order of their steps, never half a step.

    `parts` are the files of each rank, in the order of their steps.
    """
    each = max(rows // max(len(parts), 1), 256)
    ranks = [Rank(files, columns, each) for files in parts.values()]
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


def step_groups(table: pa.Table, domains: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Number the groups of rows that have the same step and the same domain."""
    _, places = np.unique(table["step"].to_numpy(), return_inverse=True)
    count = int(domains.max(initial=0)) + 1
    groups: npt.NDArray[np.int64]
    _, groups = np.unique(places * count + domains, return_inverse=True)
    return groups


def members(table: pa.Table) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Return the ids of all rows one after the other, and how many each row has."""
    ids = column(table, "ids")
    return ids.flatten(), pc.list_value_length(ids).to_numpy().astype(np.int64)


def column(table: pa.Table, name: str) -> pa.Array:
    """Return a column in one piece."""
    chunks = table[name].chunks
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
