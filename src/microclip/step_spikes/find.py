"""Finding spikes, and ranking the rows of their steps by what they contributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from microclip.draggers.result import PathLike, write_csv
from microclip.draggers.source import LedgerLike, Source
from microclip.draggers.statistics import Values
from microclip.step_spikes.series import (
    FEWEST,
    StepSeries,
    examples_of,
    read_series,
    shares,
    stand_out,
)

NEAR = 1  # spikes at most this many recorded steps apart are one
COLUMNS = pa.schema(
    {
        "step": pa.int64(),
        "loss_score": pa.float64(),
        "norm_score": pa.float64(),
        "id": pa.string(),
        "loss": pa.float64(),
        "loss_share": pa.float64(),
        "microbatch_norm": pa.float64(),
        "energy_share": pa.float64(),
        "microbatch_size": pa.int64(),
    }
)
FAR = 3.0  # times the usual loss or gradient energy, and that of the step's median row


@dataclass(frozen=True, eq=False)
class Spike:
    """One step, or several in a row, whose loss or gradient stands out.

    Attributes:
        step: The first of them.
        last: The last of them.
        loss: The mean loss of the first; None if it was not recorded.
        usual_loss: The median of the steps before it.
        loss_score: How far the loss lies above that, in robust standard deviations.
        norm: The root mean square of its micro-batch gradient norms; None if not recorded.
        usual_norm: The median of the steps before it.
        norm_score: How far the norm lies above that.
        rows: A pyarrow table of its examples, the most suspicious first.
        note: What stands out among the rows, in a sentence.
    """

    step: int
    last: int
    loss: float | None
    usual_loss: float | None
    loss_score: float | None
    norm: float | None
    usual_norm: float | None
    norm_score: float | None
    rows: pa.Table
    note: str

    @property
    def score(self) -> float:
        """The larger of both scores."""
        return max(s for s in (self.loss_score, self.norm_score) if s is not None)


@dataclass(frozen=True, eq=False)
class Spikes:
    """The spikes of a run, the worst first.

    Attributes:
        found: The spikes.
        steps: How many steps were recorded.
        notes: What the ledger cannot tell, in sentences.
        total: How many spikes there are; `found` has no more than `most` of them.
    """

    found: tuple[Spike, ...]
    steps: int
    notes: tuple[str, ...]
    total: int

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, place: int) -> Spike:
        return self.found[place]

    def __repr__(self) -> str:
        of = f" of {self.total}" if self.total > len(self) else ""
        return f"Spikes({len(self)}{of} in {self.steps} steps)"

    @property
    def table(self) -> pa.Table:
        """All rows of all spikes, with the step and its scores."""
        tables = []
        for spike in self.found:
            rows = spike.rows
            for place, name in enumerate(("step", "loss_score", "norm_score")):
                kind = pa.int64() if name == "step" else pa.float64()
                value = pa.scalar(getattr(spike, name), kind)
                rows = rows.add_column(place, name, pa.repeat(value, len(rows)))
            tables.append(rows)
        return pa.concat_tables(tables) if tables else COLUMNS.empty_table()

    def to_csv(self, path: PathLike) -> None:
        """Write `table` as CSV; texts that spreadsheets would run get an apostrophe in front."""
        write_csv(self.table, path)


def spikes(
    ledger: LedgerLike, *, window: int = 30, threshold: float = 5.0, most: int = 20
) -> Spikes:
    """Find steps whose loss or gradient stands out, and rank their rows.

    >>> spike = spikes("runs/first")[0]  # doctest: +SKIP
    >>> spike.step, spike.rows["id"][0]  # doctest: +SKIP

    Args:
        ledger: The folder of a ledger, a `microclip.Ledger`, or the result of `open_ledger`.
        window: A step is compared with this many before it.
        threshold: It stands out if its loss or norm lies this many robust standard deviations
            above their median. NaN and inf always do.
        most: How many spikes to return, the worst.
    """
    for name, value, least in (("window", window, FEWEST), ("most", most, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, but got {value!r}.")
    if not threshold > 0:
        raise ValueError(f"threshold must be above 0, but got {threshold!r}.")
    source = Source.open(ledger)
    series = read_series(source)
    if not series.has_losses and not series.has_norms:
        raise ValueError(f"The ledger {source.path} has neither losses nor norms to look at.")
    loss_scores, usual_losses = _scores(series.losses, series.has_losses, window)
    norm_scores, usual_norms = _scores(series.norms, series.has_norms, window)
    scores = np.maximum(loss_scores, norm_scores)
    every = _events(scores, threshold)
    events = sorted(every, key=lambda event: (-scores[event[0]], event[0]))[:most]
    examples = examples_of(source, series.steps[[first for first, _ in events]])
    found = []
    for first, last in events:
        step = int(series.steps[first])
        rows = _ranked(examples[step], series.has_norms and series.microbatches[first] > 1)
        usual = float(usual_losses[first]), float(usual_norms[first])
        note = _note(rows, step, *usual, is_first=first == 0)
        found.append(
            Spike(
                step=step,
                last=int(series.steps[last]),
                loss=_at(series.losses, first, series.has_losses),
                usual_loss=_at(usual_losses, first, series.has_losses),
                loss_score=_at(loss_scores, first, series.has_losses),
                norm=_at(series.norms, first, series.has_norms),
                usual_norm=_at(usual_norms, first, series.has_norms),
                norm_score=_at(norm_scores, first, series.has_norms),
                rows=rows,
                note=note,
            )
        )
    return Spikes(tuple(found), len(series.steps), _limits(source, series), len(every))


def _scores(values: Values, known: bool, window: int) -> tuple[Values, Values]:
    if not known:
        return np.full(len(values), -np.inf), values
    return stand_out(values, window)


def _at(values: Values, place: int, known: bool) -> float | None:
    return float(values[place]) if known else None


def _events(scores: Values, threshold: float) -> list[tuple[int, int]]:
    """Return the first and last place of each spike; neighbors are one."""
    found: list[tuple[int, int]] = []
    for place in np.flatnonzero(scores >= threshold).tolist():
        if found and place - found[-1][1] <= NEAR:
            found[-1] = (found[-1][0], place)
        else:
            found.append((place, place))
    return found


def _ranked(step: dict[str, Any], by_norm: bool) -> pa.Table:
    """Return the rows of a step, ranked by the larger of their shares."""
    count = len(step["of"])
    losses = np.full(count, np.nan) if step["losses"] is None else step["losses"]
    loss_share = np.full(count, np.nan) if step["losses"] is None else shares(losses)
    norms, sizes = step["norms"], step["sizes"]
    energy_share = np.full(count, np.nan)
    if by_norm:
        largest = np.max(norms, initial=np.finfo(np.float64).tiny, where=np.isfinite(norms))
        energy_share = (shares(np.square(norms / largest) * sizes) / sizes)[step["of"]]
    score = np.fmax(np.nan_to_num(loss_share), np.nan_to_num(energy_share))
    order = np.lexsort((np.arange(count), -score))
    table = pa.table(
        {
            "id": step["id"],
            "loss": pa.array(losses, from_pandas=step["losses"] is None),
            "loss_share": pa.array(loss_share, from_pandas=True),
            "microbatch_norm": pa.array(norms[step["of"]], from_pandas=not by_norm),
            "energy_share": pa.array(energy_share, from_pandas=True),
            "microbatch_size": pa.array(sizes[step["of"]]),
        }
    )
    return table.take(pa.array(order))


def _note(
    rows: pa.Table, step: int, usual_loss: float, usual_norm: float, *, is_first: bool
) -> str:
    """Say who is to blame, or that nobody in this step is."""
    found = []
    if rows["loss_share"].null_count == 0:
        losses = rows["loss"].to_numpy()
        least = min(0.0, *np.nan_to_num([usual_loss, *losses[np.isfinite(losses)]]).tolist())
        out = _far_above(losses - least, usual_loss - least, FAR)
        found.append(("loss", "loss_share", out))
    if rows["energy_share"].null_count == 0:
        out = _far_above(rows["microbatch_norm"].to_numpy(), usual_norm, FAR**0.5)
        found.append(("gradient energy", "energy_share", out))
    if not found:
        return "Neither losses nor norms of single examples are known, so no row can be named."
    blamed = []
    for what, name, out in found:
        those = rows.filter(pa.array(out)).sort_by([(name, "descending")])
        blamed.append((what, those[name].to_pylist(), those))
    what, shares, those = max(blamed, key=lambda one: max(one[1], default=0.0))
    if not shares and is_first:
        return (
            f"No row of step {step} stands out, and it is the first step on record. If training "
            "began there, a high loss is usual; if the loss is NaN or inf, look at the model, its "
            "inputs and the loss function."
        )
    if not shares:
        return (
            f"No row of step {step} stands out: most have a high loss, so an earlier step probably "
            "did the damage. Look at the steps before, the learning rate and the loss scale."
        )
    one, size = those["id"][0].as_py(), those["microbatch_size"][0].as_py()
    if size > 1 and what == "gradient energy":
        return (
            f"The micro-batch of {one!r} has {shares[0] * size:.0%} of the {what}; norms cannot "
            f"tell its {size} members apart."
        )
    even = len(shares) / len(rows)
    who = f"{one!r} has"
    if len(shares) > 1:
        who = f"{one!r} and {len(shares) - 1} more have"
    return f"{who} {sum(shares):.0%} of the {what}, where an even share is {even:.1%}."


def _far_above(values: Values, usual: float, factor: float) -> npt.NDArray[np.bool_]:
    """Return which values are this many times as large as usual, and as most others of the step."""
    values = np.where(np.isfinite(values), values, np.inf)
    median = np.sort(values)[(len(values) - 1) // 2]  # the lower one: half of them may be bad
    found: npt.NDArray[np.bool_] = values > factor * np.fmax(median, usual)
    return found


def _limits(source: Source, series: StepSeries) -> tuple[str, ...]:
    found = []
    if not series.has_norms:
        found.append(
            "Only losses were recorded, so a step whose gradient alone was large cannot be seen: a "
            "Clipper with rule=rules.Keep() records norms of plain training."
        )
    elif (series.microbatches == 1).all():
        found.append(
            "Every step was a single micro-batch, so norms cannot be traced to rows: use a smaller "
            "microbatch_size."
        )
    if not source.examples:
        found.append("There is no loss per example, so losses cannot be traced to rows.")
    if (np.diff(series.steps) > 1).any():
        found.append("Some steps were not recorded; a spike in them cannot be seen.")
    return tuple(found)
