"""How much probability a model gave to which class of which example, summed over visits.

`Votes.winners` says which class it preferred, `Votes.contested` how many labels it contests, in the
way of confident learning (Northcutt et al. 2021). Knows nothing about ledgers.
"""

from __future__ import annotations

import numpy as np

from microclip.draggers.statistics import Numbers, Values

WIDTH = 2**31
NONE = -1


class Votes:
    """Sums by example and class; memory grows with the pairs that occur."""

    def __init__(self) -> None:
        self._codes: Numbers = np.zeros(0, dtype=np.int64)
        self._sums: Values = np.zeros(0)

    def add(self, examples: Numbers, classes: Numbers, probabilities: Values) -> None:
        """Add what a model said at some visits."""
        codes = np.concatenate([self._codes, examples * WIDTH + classes])
        sums = np.concatenate([self._sums, probabilities])
        self._codes, places = np.unique(codes, return_inverse=True)
        self._sums = np.bincount(places, sums, len(self._codes)).astype(np.float64, copy=False)

    def winners(self, total: int) -> tuple[Numbers, Values]:
        """Return the class with the most votes for each example, and its share of them."""
        examples, classes = np.divmod(self._codes, WIDTH)
        order = np.lexsort((self._sums, examples))
        chosen, shares = np.full(total, NONE), np.full(total, np.nan)
        chosen[examples[order]] = classes[order]  # the last one, with the most votes, stays
        sums = np.bincount(examples, self._sums, minlength=total)
        most = np.zeros(total)
        most[examples[order]] = self._sums[order]
        np.divide(most, sums, out=shares, where=sums > 0)
        return chosen, shares

    def contested(self, labels: Numbers, visits: Numbers) -> float:
        """Return the share of labels that are contested; NaN without votes for any label.

        A model is confident of a class if it gives it at least the probability that it gives, on
        average, to examples labeled so. Of the examples of a label, as many are contested as there
        are confident of another class for each that is confident of its own. This makes up for
        classes that the model is always unsure of, and for few or many examples of a class.

        Args:
            labels: The label of each example, NONE if unknown. It got a vote at every visit.
            visits: At how many visits each example got votes.
        """
        examples, classes = np.divmod(self._codes, WIDTH)
        known = labels[examples] != NONE
        examples, classes = examples[known], classes[known]
        means = self._sums[known] / visits[examples]
        own = classes == labels[examples]
        if not own.any():
            return float("nan")
        width = int(max(classes.max(), labels.max())) + 1
        sizes = np.bincount(labels[examples[own]], minlength=width)
        usual = np.full(width, np.inf)
        given = np.bincount(classes[own], means[own], minlength=width)
        np.divide(given, sizes, out=usual, where=sizes > 0)
        confident = means >= usual[classes] - 1e-9
        examples, classes, means = examples[confident], classes[confident], means[confident]
        order = np.lexsort((means, examples))
        guess = np.full(len(labels), NONE)
        guess[examples[order]] = classes[order]
        some = guess != NONE
        counted = np.bincount(labels[some], minlength=width)
        other = np.bincount(labels[some], (guess != labels)[some], minlength=width)
        shares = np.divide(other, counted, out=np.zeros(width), where=counted > 0)
        return float(shares @ sizes / sizes.sum())
