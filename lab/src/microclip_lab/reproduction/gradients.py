"""What the moments of a run say, in single numbers: mean cosines, ratios of norms, their slope.

Works on the JSON of moments as records hold it; how they were measured is `moments`' business.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from microclip_lab.reproduction.records import Record

Matched = Literal["step", "loss"]
MATCHED: tuple[Matched, ...] = ("step", "loss")


def moments_of(record: Record) -> list[Mapping[str, Any]]:
    """Return the moments of a run in the order of their steps."""
    return sorted(record.moments, key=lambda moment: moment["step"])


def value(moment: Mapping[str, Any], name: str) -> float:
    """Return a figure of a moment without its interval; NaN if it is not known.

    >>> value({"loss_benign": 0.5, "dragger_benign": [0.1, 0.0, 0.2]}, "dragger_benign")
    0.1
    """
    found = moment.get(name)
    if isinstance(found, list | tuple):
        found = found[0]
    return math.nan if found is None else float(found)


def level(record: Record, name: str) -> float | None:
    """Return the mean of a figure over all moments but the first; None if one is not known."""
    values = [value(moment, name) for moment in moments_of(record)[1:]]
    if not values or not all(math.isfinite(each) for each in values):
        return None
    return statistics.fmean(values)


def ratios(runs: Sequence[Record], name: str, matched: Matched) -> list[float] | str:
    """Return a ratio of each run, at the last step or at a common loss; or why there is none."""
    found: list[float] = []
    for record in runs:
        if not record.moments:
            return f"{record.id} was not looked into"
    ends = [moments_of(record)[-1] for record in runs]
    if matched == "step" and len({end["step"] for end in ends}) > 1:
        return f"{runs[0].id} and the others were not last looked into at the same step"
    losses = [value(end, "loss_benign") for end in ends]
    if matched == "loss" and not all(math.isfinite(loss) for loss in losses):
        return f"{runs[0].id} or another one ended with a loss that is not finite"
    target = max(losses)
    for record, end in zip(runs, ends, strict=True):
        ratio = value(end, name) if matched == "step" else at_loss(record, name, target)
        if ratio is None:
            return f"{record.id} has a lower loss than {target:.4g} as soon as it is looked into"
        if not math.isfinite(ratio) or ratio <= 0:
            return f"{record.id} has no {name.replace('_', ' ')}"
        found.append(ratio)
    return found


def at_loss(record: Record, name: str, target: float) -> float | None:
    """Return a ratio where the loss of benign examples first comes down to the target.

    Between two moments its logarithm is taken for linear in the loss. None if the first moment is
    below the target already: nothing is known of what was before.
    """
    moments = moments_of(record)
    losses = [value(moment, "loss_benign") for moment in moments]
    for place, loss in enumerate(losses):
        if not loss <= target:
            continue
        here = value(moments[place], name)
        if loss == target:
            return here
        if place == 0:
            return None
        before, above = value(moments[place - 1], name), losses[place - 1]
        if not (before > 0 and here > 0):
            return math.nan
        share = (above - target) / (above - loss)
        return math.exp((1 - share) * math.log(before) + share * math.log(here))
    return math.nan


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the slope of the line that fits best, by least squares.

    >>> slope([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])
    2.0
    """
    return statistics.linear_regression(xs, ys).slope
