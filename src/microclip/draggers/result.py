"""Draggers: a table with a row for every example, the most suspicious first, and what to take
from it. Knows nothing of how scores came about; files are written by `export`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from microclip.draggers import export
from microclip.draggers.methods import Judged
from microclip.draggers.series import THIRDS, Series, Values

Path = str | os.PathLike[str]
Id = int | str


@dataclass(frozen=True, eq=False)
class Draggers:
    """Every example of a ledger with its score and the evidence, the most suspicious first.

    Attributes:
        table: A pyarrow table, sorted by score; its columns are explained in docs/draggers.md.
        method: How scores were made; never "auto", but what "auto" chose.
        losses: "example", "microbatch" or "none": which losses the ledger has.
        steps: How many steps were recorded.
    """

    table: pa.Table
    method: str
    losses: str
    steps: int
    confidence: pa.Table | None = None  # of the same rows: mean and deviation of exp(-loss)

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
            fraction: So large a share of the examples in the ledger, rounded.
            n: So many of them.
            threshold: Those with this score or a higher one.
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
        """Return the ids that are left when `ids(...)` of the same arguments are taken out.

        Args:
            fraction: See `ids`.
            n: See `ids`.
            threshold: See `ids`.
            all_ids: The ids of the whole data set, whose order is kept. Examples that training
                never saw are kept too: nothing is known against them. Without it, the ids of the
                ledger in ascending order.
        """
        left_out = set(self.ids(fraction=fraction, n=n, threshold=threshold))
        if all_ids is None:
            ordered: list[Id] = pc.array_sort_indices(self.table["id"]).to_pylist()
            known = self.table["id"].to_pylist()
            return [known[place] for place in ordered if known[place] not in left_out]
        everyone = list(all_ids)
        if strangers := left_out.difference(everyone):
            some = ", ".join(repr(one) for one in sorted(strangers, key=str)[:3])
            kind = "integers" if pa.types.is_integer(self.table["id"].type) else "strings"
            raise ValueError(
                f"{len(strangers)} of the {len(left_out)} ids to leave out are not in all_ids, for "
                f"instance {some}. The ledger's ids are {kind}; all_ids must be the same labels "
                "that were given to the Clipper as ids=."
            )
        return [one for one in everyone if one not in left_out]

    def to_csv(self, path: Path) -> None:
        """Write the table as CSV.

        Texts of yours (ids, domains) that begin with = + - @, a tab or a carriage return get an
        apostrophe in front, because spreadsheets would take them for formulas.
        """
        export.csv(self.table, path)

    def to_parquet(self, path: Path) -> None:
        """Write the table as Parquet, everything as it is."""
        export.parquet(self.table, path)

    def to_cartography(self, path: Path) -> None:
        """Write a data map: a line of JSON for every example, with guid, confidence, variability.

        Confidence is the mean over appearances of exp(-loss), which for cross-entropy is the
        probability of the label given; variability its standard deviation. Both are of training
        steps, with dropout and all, and not of a pass over the data after each epoch.
        """
        if self.confidence is None:
            raise ValueError(
                "A data map needs the loss of every example, but the ledger has "
                f"{'none' if self.losses == 'none' else 'only those of micro-batches'}. Let "
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
        """Write the ids that make the pruned data set, those of `kept_ids` of the same arguments.

        As a list in JSON if the name ends with .json, else one id per line.
        """
        kept = self.kept_ids(fraction=fraction, n=n, threshold=threshold, all_ids=all_ids)
        export.ids(kept, path)

    def _count(self, fraction: float | None, n: int | None, threshold: float | None) -> int:
        given = {"fraction": fraction, "n": n, "threshold": threshold}
        chosen = [name for name, value in given.items() if value is not None]
        if len(chosen) != 1:
            raise ValueError(
                "Say how many to take by one of fraction=, n= and threshold=, but got "
                f"{' and '.join(chosen) or 'none of them'}."
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


def tabulate(judged: Judged) -> Draggers:
    """Put the evidence into a table, sorted by score; equal scores by id, unknown ones last."""
    evidence = judged.evidence
    order = _order(judged)
    columns: dict[str, Any] = {
        "id": evidence.roster.ids,
        "score": _array(judged.scores),
        "appearances": pa.array(evidence.appearances),
        "nonfinite": pa.array(evidence.broken.total.astype(np.int64)),
        "mean_weight": _array(evidence.weight.mean),
        "domain": pa.array(evidence.domain_names, pa.string()).take(pa.array(evidence.domains)),
    }
    for name, series in (
        ("log_norm", evidence.norm),
        ("loss", evidence.loss),
        ("excess_loss", evidence.excess),
    ):
        columns |= _described(name, series)
    table = pa.table(columns).take(order)
    rank = np.arange(1, len(table) + 1)
    confidence = None
    if evidence.losses == "example":
        spread = {
            "confidence": _array(evidence.confidence.mean),
            "variability": _array(_population(evidence.confidence)),
        }
        confidence = pa.table(spread).take(order)
    return Draggers(
        table.add_column(1, "rank", pa.array(rank)),
        judged.method,
        evidence.losses,
        evidence.steps,
        confidence,
    )


def _order(judged: Judged) -> pa.Array:
    keys = pa.table(
        {
            "unknown": pa.array(np.isnan(judged.scores)),
            "score": _array(judged.scores),
            "certain": pa.array(judged.certain),
            "id": judged.evidence.roster.ids,
        }
    )
    by = [
        ("unknown", "ascending"),
        ("score", "descending"),
        ("certain", "descending"),
        ("id", "ascending"),
    ]
    return pc.sort_indices(keys, sort_keys=by)


def _described(name: str, series: Series) -> dict[str, pa.Array]:
    mean, half = series.mean, series.half_interval
    course = {f"{name}_{third}": _array(series.third(i)) for i, third in enumerate(THIRDS)}
    return {
        name: _array(mean),
        f"{name}_low": _array(mean - half),
        f"{name}_high": _array(mean + half),
        **course,
    }


def _population(series: Series) -> Values:
    """Return the standard deviation as data maps have it: divided by n, and 0 for one value."""
    n = series.counts
    shrunk = series.deviation * np.sqrt(np.maximum(n - 1, 0) / np.maximum(n, 1))
    found: Values = np.where(n == 1, 0.0, shrunk)
    return found


def _array(values: Any) -> pa.Array:
    return pa.array(values, from_pandas=True)  # NaN, what is unknown, becomes null
