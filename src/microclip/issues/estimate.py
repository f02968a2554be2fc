"""How many examples are wrong, and how probable it is of each.

If the numbers of right and wrong examples lie clearly apart, a mixture fitted to them says it all.
If not, it finds the few that stand out, and the others must be counted differently. Both counts
below are too low rather than too high once a model memorizes, each for its own reason, so the
larger one is taken:

* examples that were worse off than at the start: their mean loss over the run is above the typical
  loss at its beginning;
* labels that the predictions of the last third of the run contest (`votes`), after the model has
  seen them many times.

Knows nothing about ledgers or kinds of issues.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from microclip.draggers.statistics import Values
from microclip.issues.history import Flags, History
from microclip.issues.mixture import Bounds, fit, fit_share

TINY = 1e-9  # of a mean cross-entropy
CLEAR = 4.0  # standard deviations between right and wrong; below, the mixture sees a part only


@dataclass(frozen=True, eq=False)
class IssueEstimate:
    """Verdicts on the examples that can be judged.

    Attributes:
        probability: That it is wrong; one per example judged.
        order: What to sort by, for every example, judged or not.
        low: The smallest share of wrong ones.
        high: The largest.
    """

    probability: Values
    order: Values
    low: float
    high: float


def estimate(history: History, judged: Flags) -> IssueEstimate:
    """Say how probable it is of each that it is wrong."""
    numbers = history.numbers[judged]
    mixture, (low, high) = fit(numbers, Bounds(history.floor, history.mirrored))
    probability = mixture.probability(numbers)
    by_predictions = history.statistic == "margin"
    if mixture.separation >= CLEAR or history.statistic == "excess":
        return IssueEstimate(probability, history.numbers, low, high)
    found = float(probability.mean())
    shares: tuple[float, ...]
    worse_off = float(np.mean(history.loss[judged] > history.start))
    if by_predictions:
        contested = float(np.nan_to_num(history.contested))
        doubted = float(np.mean(history.early[judged] > 0))
        shares, order = (found, worse_off, contested), history.unlikely
    else:  # what stands out by its loss may be hard
        doubted = float(np.mean(history.late_loss[judged] > history.start / 2))
        shares, order = (worse_off,), history.numbers
    low, high = min(low, *shares), max(high, doubted, *shares)
    if by_predictions and max(shares) == found:
        return IssueEstimate(probability, history.numbers, low, high)
    # the logarithm of a mean loss is closest to normal where right and wrong overlap
    near_normal = np.log(np.maximum(order - history.numbers, TINY)) if by_predictions else order
    mixture = fit_share(near_normal[judged], max(shares))
    probability = _sorted_like(mixture.probability(near_normal[judged]), order[judged])
    return IssueEstimate(probability, order, low, high)


def _sorted_like(values: Values, keys: Values) -> Values:
    """Return the same values, in the order of the keys."""
    found = np.empty_like(values)
    found[np.argsort(keys, kind="stable")] = np.sort(values)
    return found
