"""Issues: a table with a row for every example, the most probably wrong first, and its exports.

Knows nothing about how verdicts were reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from microclip.draggers.result import (
    Id,
    PathLike,
    remaining_ids,
    write_csv,
    write_ids,
    write_parquet,
)

WRONG_LABEL, OUTLIER = "wrong label", "outlier"
NEVER_LEARNED, FORGOTTEN, NOT_FINITE = "never learned", "forgotten often", "not finite"
KINDS = (WRONG_LABEL, OUTLIER, NEVER_LEARNED, FORGOTTEN, NOT_FINITE)


@dataclass(frozen=True, eq=False)
class Issues:
    """Every example in a ledger with a verdict, the most probably wrong first.

    Attributes:
        table: A pyarrow table; docs/find-bad-data.md explains its columns.
        wrong: How many examples are probably wrong: the sum of all probabilities, rounded.
        interval: Between how many and how many are wrong, with 95 % confidence if the mixture that
            was fitted is right; where right and wrong overlap, from those that stand out to all
            that the model doubted.
        notes: What to know before you believe it, in sentences.
        statistic: What examples were judged by: "margin" (predictions), "loss" or "excess".
        threshold: Examples that are wrong with at least this probability are flagged.
        steps: How many steps were recorded.
    """

    table: pa.Table
    wrong: int
    interval: tuple[int, int]
    notes: tuple[str, ...]
    statistic: str
    threshold: float
    steps: int

    def __len__(self) -> int:
        return len(self.table)

    def __repr__(self) -> str:
        low, high = self.interval
        return (
            f"Issues({self.flagged_count} of {len(self)} examples flagged, about {self.wrong} "
            f"({low} to {high}) wrong)"
        )

    @property
    def flagged(self) -> pa.Table:
        """The rows of flagged examples, the most probably wrong first."""
        return self.table.filter(self.table["flagged"])

    @property
    def flagged_count(self) -> int:
        """How many examples are flagged."""
        return int(pc.sum(self.table["flagged"]).as_py() or 0)

    def ids(self) -> list[Id]:
        """Return the ids of flagged examples, the most probably wrong first."""
        found: list[Id] = self.flagged["id"].to_pylist()
        return found

    def kept_ids(self, all_ids: Iterable[Id] | None = None) -> list[Id]:
        """Return the ids of all examples that are not flagged.

        Args:
            all_ids: The ids of the whole data set, whose order is kept. Examples that training
                never saw are kept as well. Without it, the ids in the ledger, in ascending order.
        """
        return remaining_ids(self.table["id"], self.ids(), all_ids)

    def to_csv(self, path: PathLike) -> None:
        """Write the table as CSV; texts that spreadsheets would run get an apostrophe in front."""
        write_csv(self.table, path)

    def to_parquet(self, path: PathLike) -> None:
        """Write the table as Parquet, unchanged."""
        write_parquet(self.table, path)

    def to_pandas(self) -> Any:
        """Return the table as a pandas data frame; pandas must be installed."""
        if find_spec("pandas") is None:
            raise ImportError("to_pandas() needs pandas: pip install pandas")
        return self.table.to_pandas()

    def to_kept_ids(self, path: PathLike, all_ids: Iterable[Id] | None = None) -> None:
        """Write `kept_ids`: a JSON list if the file name ends in .json, else one id per line."""
        write_ids(self.kept_ids(all_ids), path)

    def cleanlab_table(self) -> pa.Table:
        """Return cleanlab's columns, sorted by id.

        They are `is_label_issue`, `label_score` (low for a wrong label), `given_label` and
        `predicted_label`, next to `id`. With integer ids 0, 1, 2, ... the rows have the order of
        the data set, as in cleanlab.
        """
        table = self.table.sort_by("id")
        preferred = pc.and_(
            pc.fill_null(pc.greater(table["margin"], 0), False),
            pc.is_valid(table["suggested_label"]),
        )
        return pa.table(
            {
                "id": table["id"],
                "is_label_issue": table["flagged"],
                "label_score": pc.subtract(1.0, table["probability"]),
                "given_label": table["given_label"],
                "predicted_label": pc.if_else(
                    preferred, table["suggested_label"], table["given_label"]
                ),
            }
        )
