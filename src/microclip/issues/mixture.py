"""How probable it is that an example is wrong: two normal distributions, right and wrong, fitted to
one number per example.

Both numbers that are used (see `history`) are close to normal among right examples and among wrong
ones, with about the same spread, on every data set that was tried. With the same spread for both,
the probability only ever rises with the number, and there are few parameters to be fooled by. Knows
nothing about ledgers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from microclip.draggers.statistics import Values

BINS = 1000
TAIL = 0.0005  # of all values, at each end; what lies beyond counts as the last bin
STARTS = (2.0, 3.0, 5.0)  # where the wrong ones may lie, in spreads above the median
SHARES = (0.05, 0.3)  # how many there may be
ROUNDS = 500
SMALLEST_SHARE = 1e-4
LARGEST_SHARE = 0.5  # the majority is right: without that, nobody could tell which is which
MIRRORED = 0.5
MOST = 6.0  # standard deviations between right and wrong; more are too good to be true
WIDER = 1.5  # for the interval, wrong ones may have a spread this much larger
RESAMPLES = 60
LEAST = 1.0  # standard deviations between right and wrong, if how many are wrong is known


@dataclass(frozen=True)
class Mixture:
    """Two normal distributions: the right ones at `right`, the wrong ones at `wrong`."""

    right: float
    wrong: float
    deviation: float
    wrong_deviation: float
    share: float  # of wrong ones
    fit: float  # the log-likelihood

    @property
    def separation(self) -> float:
        """How many standard deviations lie between the two."""
        return (self.wrong - self.right) / self.deviation

    def probability(self, values: Values) -> Values:
        """Return how probable it is that an example with this value is wrong; NaN stays NaN."""
        odds = np.clip(self.log_odds(values), -60.0, 60.0)
        found: Values = 1 / (1 + np.exp(-odds))
        return found

    def log_odds(self, values: Values) -> Values:
        """Return the logarithm of how many times likelier wrong is than right."""
        right = np.square((values - self.right) / self.deviation)
        wrong = np.square((values - self.wrong) / self.wrong_deviation)
        spread = np.log(self.deviation / self.wrong_deviation)
        found: Values = np.log(self.share / (1 - self.share)) + spread + (right - wrong) / 2
        return found


@dataclass(frozen=True)
class Bounds:
    """Where wrong examples can lie on average: what lies lower is hard, not wrong.

    Args:
        floor: The lowest value.
        mirrored: Whether 0 means undecided. Then wrong ones are at least half as far above 0 as
            right ones are below it: who is sure of the right ones is not unsure of the wrong ones.
    """

    floor: float
    mirrored: bool

    def lowest(self, right: float) -> float:
        """Return the lowest value, given where the right ones lie."""
        return max(self.floor, right, -MIRRORED * right if self.mirrored else -np.inf)


def fit(values: Values, bounds: Bounds) -> tuple[Mixture, tuple[float, float]]:
    """Fit the mixture; return it, and a 95 % interval of the share of wrong examples.

    The interval is that of resampled examples, for a mixture with equal spreads and for one in
    which the wrong ones may spread more: the fits must agree for it to be narrow.

    Args:
        values: One number per example, higher for wrong ones; no NaN.
        bounds: Where wrong examples can lie.
    """
    centers, counts = _binned(values)
    best = _best(centers, counts, bounds, 1.0)
    draw = np.random.default_rng(0)  # the same interval every time
    shares = []
    for _ in range(RESAMPLES):
        again = draw.multinomial(len(values), counts / len(values)).astype(np.float64)
        some = again > 0
        for wider in (1.0, WIDER):
            found = _best(centers[some], again[some], bounds, wider, best)
            shares.append(float(found.probability(centers[some]) @ again[some]) / len(values))
    interval = np.quantile(shares, [0.025, 0.975])
    return best, (float(interval[0]), float(interval[1]))


def fit_share(values: Values, share: float) -> Mixture:
    """Fit the mixture if it is known how many are wrong, which may be more than are set apart.

    Where right and wrong are, their numbers tell; they are at least one standard deviation apart.
    The probabilities of all values add up to the share.
    """
    centers, counts = _binned(values)
    weights = counts / counts.sum()
    share = float(np.clip(share, SMALLEST_SHARE, LARGEST_SHARE))
    mean = float(weights @ centers)
    variance = float(weights @ np.square(centers - mean))
    apart = LEAST
    now = _apart(mean, variance, share, apart)
    for _ in range(ROUNDS):
        probability = now.probability(centers)
        wrong, right = weights * probability, weights * (1 - probability)
        upper = float(wrong @ centers / max(wrong.sum(), 1e-12))
        lower = float(right @ centers / max(right.sum(), 1e-12))
        within = wrong @ np.square(centers - upper) + right @ np.square(centers - lower)
        before = apart
        apart = float(np.clip((upper - lower) / max(np.sqrt(within), 1e-12), LEAST, MOST))
        now = _apart(mean, variance, share, apart)
        if abs(apart - before) < 1e-6:
            break
    low, high = -60.0, 60.0  # of what is added to the log-odds
    for _ in range(60):
        middle = (low + high) / 2
        odds = middle + now.log_odds(centers)
        if weights @ (1 / (1 + np.exp(-np.clip(odds, -60.0, 60.0)))) > share:
            high = middle
        else:
            low = middle
    prior = np.log(share / (1 - share)) + low
    return replace(now, share=float(1 / (1 + np.exp(-prior))))


def _apart(mean: float, variance: float, share: float, apart: float) -> Mixture:
    """Return the mixture of this mean and variance, with this many deviations between the two."""
    deviation = float(np.sqrt(variance / (1 + share * (1 - share) * apart**2))) or 1e-12
    right = mean - share * apart * deviation
    return Mixture(right, right + apart * deviation, deviation, deviation, share, -np.inf)


def _binned(values: Values) -> tuple[Values, Values]:
    """Return the centers of narrow bins, and how many values are in each."""
    low, high = np.quantile(values, [TAIL, 1 - TAIL])
    counts, edges = np.histogram(np.clip(values, low, high), BINS)
    return (edges[1:] + edges[:-1]) / 2, counts.astype(np.float64)


def _best(
    values: Values, counts: Values, bounds: Bounds, wider: float, near: Mixture | None = None
) -> Mixture:
    """Return the most likely fit from several starts; with `near`, from there only."""
    if near is not None:
        return _climb(values, counts, bounds, wider, near)
    middle = _quantile(values, counts, 0.5)
    spread = 1.4826 * _quantile(np.abs(values - middle), counts, 0.5)
    spread = spread or float(np.ptp(values)) / 10
    found = []
    for start, share in product(STARTS, SHARES):
        wrong = max(middle + start * spread, bounds.lowest(middle))
        first = Mixture(middle, wrong, spread, spread, share, -np.inf)
        found.append(_climb(values, counts, bounds, wider, first))
    return max(found, key=lambda one: one.fit)


def _climb(values: Values, counts: Values, bounds: Bounds, wider: float, start: Mixture) -> Mixture:
    """Expectation-maximization."""
    total, now = counts.sum(), start
    smallest = max(float(np.ptp(values)) / len(values), 1e-12)
    for _ in range(ROUNDS):
        probability = now.probability(values)
        log_right = -np.square((values - now.right) / now.deviation) / 2 - np.log(now.deviation)
        both = np.logaddexp(0.0, now.log_odds(values)) + log_right + np.log1p(-now.share)
        fit = float(counts @ both)
        if fit - now.fit < 1e-7 * total and now is not start:
            break
        wrong, right = counts * probability, counts * (1 - probability)
        share = float(np.clip(wrong.sum() / total, SMALLEST_SHARE, LARGEST_SHARE))
        mean = float(right @ values / max(right.sum(), 1e-9))
        other = max(float(wrong @ values / max(wrong.sum(), 1e-9)), bounds.lowest(mean))
        around, beyond = right @ np.square(values - mean), wrong @ np.square(values - other)
        narrowest = max(smallest, (other - mean) / MOST)
        if wider == 1:
            deviation = wrong_deviation = max(float(np.sqrt((around + beyond) / total)), narrowest)
        else:
            deviation = max(float(np.sqrt(around / max(right.sum(), 1e-9))), narrowest)
            own = float(np.sqrt(beyond / max(wrong.sum(), 1e-9)))
            wrong_deviation = float(np.clip(own, deviation, wider * deviation))
        now = Mixture(mean, other, deviation, wrong_deviation, share, fit)
    return now


def _quantile(values: Values, counts: Values, q: float) -> float:
    order = np.argsort(values)
    reached = np.cumsum(counts[order])
    return float(values[order][np.searchsorted(reached, q * reached[-1])])
