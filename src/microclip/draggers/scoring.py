"""From evidence to a score: how much an example drags. Higher is more suspicious.

| method | score | needs |
| --- | --- | --- |
| "group" | mean log norm, relative to the step, of the micro-batches an example was in | - |
| "refined" | the same, with members separated by a regression on membership | - |
| "loss" | mean loss above the step's median; by regression if it is of micro-batches | losses |
| "late_loss" | the same over the last third of training only | a loss per example |
| "raw_loss" | mean loss as recorded | losses |
| "combined" | "refined" plus "loss", each in standard deviations | losses |
| "auto" | "loss" if there are losses, else "refined" | - |

What "auto" picks was decided by measurement: benchmarks/RESULTS.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from microclip.draggers.evidence import Evidence, gather
from microclip.draggers.result import Draggers
from microclip.draggers.source import LedgerLike, Source
from microclip.draggers.statistics import NEVER, THIRDS, Numbers, Series, Values
from microclip.user_warnings import warn

METHODS = ("auto", "group", "refined", "loss", "late_loss", "raw_loss", "combined")
OF_LOSSES = ("loss", "late_loss", "raw_loss", "combined")


def score(ledger: LedgerLike, method: str = "auto") -> Draggers:
    """Score every example in a ledger: how much does it drag?

    Args:
        ledger: The folder of a ledger, a `microclip.Ledger`, or the result of `open_ledger`.
        method: "auto" picks the best method for what was recorded: "loss" if there are losses,
            else "refined". Or one of "group", "refined" (norms alone), "loss", "late_loss",
            "raw_loss", "combined"; see `microclip.draggers.scoring`.
    """
    scored = _score_source(Source.open(ledger), method)
    if are_positions(scored.evidence):
        last, steps = len(scored.evidence) - 1, scored.evidence.steps
        warn(
            f"The ids 0 to {last} appear in every one of the {steps} steps: they look like "
            "positions in the mini-batch, not like examples. Pass your own ids: "
            "backward(..., ids=...).",
            UserWarning,
        )
    return _tabulate(scored)


@dataclass(frozen=True)
class _Scored:
    """Evidence and the scores computed from it."""

    evidence: Evidence
    method: str  # never "auto"
    scores: Values  # NaN: unknown
    certain: Values  # bool: not finite every time it was seen, so it goes first


def _score_source(source: Source, method: str) -> _Scored:
    if method not in METHODS:
        choices = ", ".join(repr(choice) for choice in METHODS)
        raise ValueError(f"method must be one of {choices}, but got {method!r}.")
    if method in OF_LOSSES:
        _expect_losses(source, method)
    chosen = method
    if method == "auto":
        chosen = "loss" if source.has_losses else "refined"
    evidence = gather(
        source,
        norms=chosen in ("refined", "combined"),
        mean_losses=chosen in ("loss", "combined") and not source.examples,
    )
    try:
        scores = _score(evidence, chosen)
    finally:
        evidence.close()
    # Not finite every single time, while others in those steps were: no score can be worse.
    certain = (evidence.broken.counts > 0) & (evidence.broken.mean == 1)
    if certain.any():
        highest = np.nanmax(scores, initial=-np.inf)
        scores[certain] = highest if np.isfinite(highest) else 0.0
    return _Scored(evidence, chosen, scores, certain)


def _score(evidence: Evidence, method: str) -> Values:
    total = len(evidence)
    if method == "group":
        return evidence.norm.mean
    if method == "refined":
        assert evidence.norms is not None
        return evidence.norms.regress(total)
    if method == "raw_loss":
        return evidence.loss.mean
    if method == "late_loss":
        late = evidence.excess.third(2)
        # examples not seen late are scored by what was seen
        return np.where(np.isnan(late), evidence.excess.mean, late)
    if method == "loss":
        if evidence.mean_losses is not None:
            return evidence.mean_losses.regress(total)
        return evidence.excess.mean
    both = np.stack([_standard(_score(evidence, name)) for name in ("refined", "loss")])
    known = ~np.isnan(both)
    summed: Values = np.where(known.any(0), np.where(known, both, 0.0).sum(0), np.nan)
    return summed


def _standard(scores: Values) -> Values:
    """Return scores in standard deviations from their mean."""
    known = scores[~np.isnan(scores)]
    deviation = known.std() if len(known) else 0.0
    return (scores - (known.mean() if len(known) else 0.0)) / (deviation or 1.0)


def _expect_losses(source: Source, method: str) -> None:
    if method == "late_loss" and source.has_losses and not source.examples:
        raise ValueError(
            f"method='late_loss' needs a loss per example, but the ledger {source.path} has losses "
            "of micro-batches only. Use method='loss', which separates their members."
        )
    if not source.has_losses:
        raise ValueError(
            f"method={method!r} needs losses, but the ledger {source.path} has none: fold() was "
            "called without them. Pass fold(loss=...), use backward(loss_fn, batch), or score by "
            "norms alone with method='refined'."
        )


def are_positions(evidence: Evidence) -> bool:
    """Return whether ids look like those a Clipper assigns by default: 0, 1, ... in each step.

    The last step of an epoch may be smaller, so high ones may appear less often than low ones.
    """
    ids = evidence.index.ids.to_numpy(zero_copy_only=False)
    if evidence.steps < 2 or not len(ids) or ids.dtype != np.int64:
        return False
    order = np.argsort(ids)
    times = evidence.appearances[order]
    counted = bool((ids[order] == np.arange(len(ids))).all())
    return counted and bool(times[0] == evidence.steps and (np.diff(times) <= 0).all())


def _tabulate(scored: _Scored) -> Draggers:
    """Make a table of the evidence, sorted by score, ties by id, unknown scores last."""
    evidence = scored.evidence
    order = _order(scored)
    columns: dict[str, Any] = {
        "id": evidence.index.ids,
        "score": _array(scored.scores),
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
    if (held := evidence.held_back) is not None:
        columns |= {
            "held_back": pa.array(held.times),
            "held_back_first": _step(held.first),
            "held_back_last": _step(held.last),
            "held_back_since": _step(held.since),
        }
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
        scored.method,
        evidence.losses,
        evidence.steps,
        confidence,
    )


def _order(scored: _Scored) -> pa.Array:
    keys = pa.table(
        {
            "unknown": pa.array(np.isnan(scored.scores)),
            "score": _array(scored.scores),
            "certain": pa.array(scored.certain),
            "id": scored.evidence.index.ids,
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
    by_third = {f"{name}_{third}": _array(series.third(i)) for i, third in enumerate(THIRDS)}
    return {
        name: _array(mean),
        f"{name}_low": _array(mean - half),
        f"{name}_high": _array(mean + half),
        **by_third,
    }


def _population(series: Series) -> Values:
    """Return the standard deviation as data maps define it: divided by n, 0 for one value."""
    n = series.counts
    shrunk = series.deviation * np.sqrt(np.maximum(n - 1, 0) / np.maximum(n, 1))
    found: Values = np.where(n == 1, 0.0, shrunk)
    return found


def _step(steps: Numbers) -> pa.Array:
    return pa.array(steps, mask=steps == NEVER)


def _array(values: Any) -> pa.Array:
    return pa.array(values, from_pandas=True)  # NaN (unknown) becomes null
