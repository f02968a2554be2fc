"""From evidence to a score: how much an example drags. Higher is more suspicious.

| method | score | needs |
| --- | --- | --- |
| "group" | mean log norm relative to the step, over the micro-batches that an example was in | - |
| "refined" | the same taken apart: regression of those logarithms on who was in | - |
| "loss" | mean loss above the step's median; by regression, if of micro-batches | losses |
| "late_loss" | the same over the last third of training only | a loss per example |
| "raw_loss" | mean loss as it was | losses |
| "combined" | "refined" and "loss", each in standard deviations, added up | losses |
| "auto" | "loss" if there are losses, else "refined" | - |

What "auto" does was decided by measurement: benchmarks/RESULTS.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from microclip.draggers.evidence import Evidence, gather
from microclip.draggers.series import Values
from microclip.draggers.source import Source

METHODS = ("auto", "group", "refined", "loss", "late_loss", "raw_loss", "combined")
OF_LOSSES = ("loss", "late_loss", "raw_loss", "combined")


@dataclass(frozen=True)
class Judged:
    """Evidence and what was made of it."""

    evidence: Evidence
    method: str  # never "auto"
    scores: Values  # NaN: nothing is known
    certain: Values  # bool: not finite whenever it was seen, and therefore put first


def judge(source: Source, method: str) -> Judged:
    """Read a ledger and score its examples."""
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
    # Seen, and every single time beside others whose gradients were finite: no score can say more.
    certain = (evidence.broken.counts > 0) & (evidence.broken.mean == 1)
    if certain.any():
        highest = np.nanmax(scores, initial=-np.inf)
        scores[certain] = highest if np.isfinite(highest) else 0.0
    return Judged(evidence, chosen, scores, certain)


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
        # whoever was not seen late is judged by what was seen
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
            f"method='late_loss' needs a loss per example, but the ledger {source.path} has only "
            "those of micro-batches. Use method='loss', which takes their members apart."
        )
    if not source.has_losses:
        raise ValueError(
            f"method={method!r} needs losses, but the ledger {source.path} has none: its steps "
            "were folded without them. Give them to fold(loss=...) or use backward(loss_fn, "
            "batch); from norms alone, use method='refined'."
        )
