"""Draggers: a table with a row for every example, the most suspicious first, and ways to use it.

It can be written for other tools: as CSV, Parquet, a data map, or a list of ids. Knows nothing
about how scores were computed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from microclip.files import open_whole

PathLike = str | os.PathLike[str]
Id = int | str
FORMULA = r"^[=+\-@\t\r]"
AT_ONCE = 10_000  # rows converted to Python objects at a time


@dataclass(frozen=True, eq=False)
class Draggers:
    """Every example in a ledger with its score and the evidence, the most suspicious first.

    Attributes:
        table: A pyarrow table, sorted by score; docs/draggers.md explains its columns.
        method: How scores were computed; never "auto", but what "auto" picked.
        losses: "example", "microbatch" or "none": what the ledger has losses of.
        steps: How many steps were recorded.
    """

    table: pa.Table
    method: str
    losses: str
    steps: int
    confidence: pa.Table | None = None  # for the same rows: mean and deviation of exp(-loss)

    def __len__(self) -> int:
        return len(self.table)

    def __repr__(self) -> str:
        return f"Draggers({len(self)} examples in {self.steps} steps, method={self.method!r})"

    def top(self, n: int = 20) -> pa.Table:
        """Return the rows of the n most suspicious examples, fewer if there are fewer."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise ValueError(f"n must be 0 or a positive integer, but got {n!r}.")
        return self.table.slice(0, n)

    def ids(
        self,
        *,
        fraction: float | None = None,
        n: int | None = None,
        threshold: float | None = None,
    ) -> list[Id]:
        """Return the ids of the most suspicious examples, the worst first.

        Args:
            fraction: This fraction of the examples in the ledger, rounded.
            n: This many of them.
            threshold: Those with at least this score.
        """
        count = self._count(fraction, n, threshold)
        found: list[Id] = self.table["id"].slice(0, count).to_pylist()
        return found

    def kept_ids(
        self,
        *,
        fraction: float | None = None,
        n: int | None = None,
        threshold: float | None = None,
        all_ids: Iterable[Id] | None = None,
    ) -> list[Id]:
        """Return the ids that remain after removing `ids(...)` with the same arguments.

        Args:
            fraction: See `ids`.
            n: See `ids`.
            threshold: See `ids`.
            all_ids: The ids of the whole data set, whose order is kept. Examples that training
                never saw are kept as well. Without it, the ids in the ledger are returned in
                ascending order.
        """
        left_out = self.ids(fraction=fraction, n=n, threshold=threshold)
        return remaining_ids(self.table["id"], left_out, all_ids)

    def to_csv(self, path: PathLike) -> None:
        """Write the table as CSV.

        Ids and domains that begin with = + - @, a tab or a carriage return get an apostrophe in
        front, because spreadsheets would run them as formulas.
        """
        write_csv(self.table, path)

    def to_parquet(self, path: PathLike) -> None:
        """Write the table as Parquet, unchanged."""
        write_parquet(self.table, path)

    def to_cartography(self, path: PathLike) -> None:
        """Write a data map: a JSON line per example with guid, confidence and variability.

        Confidence is the mean over appearances of exp(-loss), which for cross-entropy is the
        probability of the given label; variability is its standard deviation. Both come from
        training steps, dropout included, not from a pass over the data after each epoch.
        """
        if self.confidence is None:
            raise ValueError(
                "A data map needs a loss per example, but the ledger has "
                f"{'none' if self.losses == 'none' else 'losses of micro-batches only'}. Let "
                "loss_fn return one loss per example, not their mean."
            )
        _write_cartography(self.table, self.confidence, path)

    def to_pruned_ids(
        self,
        path: PathLike,
        *,
        fraction: float | None = None,
        n: int | None = None,
        threshold: float | None = None,
        all_ids: Iterable[Id] | None = None,
    ) -> None:
        """Write the ids of the pruned data set: `kept_ids` with the same arguments.

        A JSON list if the file name ends in .json, else one id per line.
        """
        kept = self.kept_ids(fraction=fraction, n=n, threshold=threshold, all_ids=all_ids)
        write_ids(kept, path)

    def _count(self, fraction: float | None, n: int | None, threshold: float | None) -> int:
        given = {"fraction": fraction, "n": n, "threshold": threshold}
        chosen = [name for name, value in given.items() if value is not None]
        if len(chosen) != 1:
            raise ValueError(
                "Pass exactly one of fraction=, n= and threshold=, but got "
                f"{' and '.join(chosen) or 'none'}."
            )
        scores = self.table["score"]
        scored = len(scores) - scores.null_count
        if threshold is not None:
            return int(pc.sum(pc.greater_equal(scores, threshold)).as_py() or 0)
        if fraction is not None:
            if not 0 <= fraction <= 1:
                raise ValueError(f"fraction must be between 0 and 1, but got {fraction!r}.")
            return min(round(fraction * len(self)), int(scored))
        if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= scored:
            raise ValueError(
                f"n must be an integer between 0 and {scored}, the number of examples with a "
                f"score, but got {n!r}."
            )
        return n


def remaining_ids(
    known: pa.ChunkedArray, left_out: Iterable[Id], all_ids: Iterable[Id] | None
) -> list[Id]:
    """Return all ids but those left out: of `all_ids` in its order, else known ones, sorted."""
    removed = set(left_out)
    if all_ids is None:
        ordered: list[Id] = known.take(pc.array_sort_indices(known)).to_pylist()
        return [one for one in ordered if one not in removed]
    every_id = [one.item() if hasattr(one, "item") else one for one in all_ids]
    if unknown := removed.difference(every_id):
        some = ", ".join(repr(one) for one in sorted(unknown, key=str)[:3])
        kind = "integers" if pa.types.is_integer(known.type) else "strings"
        raise ValueError(
            f"{len(unknown)} of the {len(removed)} ids to remove are not in all_ids, for "
            f"instance {some}. The ledger's ids are {kind}; all_ids must hold the same ids "
            "that were recorded."
        )
    return [one for one in every_id if one not in removed]


def write_csv(table: pa.Table, path: PathLike) -> None:
    """Write a table as CSV that is safe to open in a spreadsheet."""
    with open_whole(path) as file:
        pyarrow.csv.write_csv(without_formulas(table), file)


def without_formulas(table: pa.Table) -> pa.Table:
    """Put an apostrophe before every text that a spreadsheet would run as a formula."""
    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            table = table.set_column(place, field.name, _quoted(table[field.name]))
    return table


def _quoted(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    quoted = pc.binary_join_element_wise(
        pa.scalar("'", texts.type), texts, pa.scalar("", texts.type)
    )
    return pc.if_else(pc.match_substring_regex(texts, FORMULA), quoted, texts)


def write_parquet(table: pa.Table, path: PathLike) -> None:
    """Write a table as Parquet."""
    with open_whole(path) as file:
        pq.write_table(table, file)


def _write_cartography(table: pa.Table, confidence: pa.Table, path: PathLike) -> None:
    """Write a data map as JSON lines, in the order of the table."""
    with open_whole(path) as file:
        for start in range(0, len(table), AT_ONCE):
            rows = zip(
                table["id"].slice(start, AT_ONCE).to_pylist(),
                confidence["confidence"].slice(start, AT_ONCE).to_pylist(),
                confidence["variability"].slice(start, AT_ONCE).to_pylist(),
                table["appearances"].slice(start, AT_ONCE).to_pylist(),
                strict=True,
            )
            for guid, mean, deviation, appearances in rows:
                line = {
                    "guid": guid,
                    "confidence": mean,
                    "variability": deviation,
                    "appearances": appearances,
                }
                file.write(f"{json.dumps(line)}\n".encode())


def write_ids(kept: Sequence[int | str], path: PathLike) -> None:
    """Write ids as a JSON list if the file name ends in .json, else one per line."""
    if Path(path).suffix == ".json":
        with open_whole(path) as file:
            file.write(json.dumps(list(kept)).encode())
        return
    for one in kept:
        if isinstance(one, str) and one.splitlines() != [one]:
            raise ValueError(
                f"The id {one[:50]!r} does not fit on a single line. Write the ids to a file whose "
                "name ends in .json instead."
            )
    with open_whole(path) as file:
        file.writelines(f"{one}\n".encode() for one in kept)
