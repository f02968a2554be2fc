"""Draggers: a table with a row for every example, the most suspicious first, and ways to use it.

Knows nothing about how scores were computed; `export` writes the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from microclip.draggers import export

Path = str | os.PathLike[str]
Id = int | str


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
        left_out = set(self.ids(fraction=fraction, n=n, threshold=threshold))
        if all_ids is None:
            ordered: list[Id] = pc.array_sort_indices(self.table["id"]).to_pylist()
            known = self.table["id"].to_pylist()
            return [known[place] for place in ordered if known[place] not in left_out]
        every_id = list(all_ids)
        if unknown := left_out.difference(every_id):
            some = ", ".join(repr(one) for one in sorted(unknown, key=str)[:3])
            kind = "integers" if pa.types.is_integer(self.table["id"].type) else "strings"
            raise ValueError(
                f"{len(unknown)} of the {len(left_out)} ids to remove are not in all_ids, for "
                f"instance {some}. The ledger's ids are {kind}; all_ids must hold the same ids "
                "that were passed to the Clipper as ids=."
            )
        return [one for one in every_id if one not in left_out]

    def to_csv(self, path: Path) -> None:
        """Write the table as CSV.

        Ids and domains that begin with = + - @, a tab or a carriage return get an apostrophe in
        front, because spreadsheets would run them as formulas.
        """
        export.csv(self.table, path)

    def to_parquet(self, path: Path) -> None:
        """Write the table as Parquet, unchanged."""
        export.parquet(self.table, path)

    def to_cartography(self, path: Path) -> None:
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
        export.cartography(self.table, self.confidence, path)

    def to_pruned_ids(
        self,
        path: Path,
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
        export.ids(kept, path)

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
