"""Two groups of examples, told apart by their average losses. Knows nothing of rules or steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Chosen on development seeds of the dirty-data benchmark, and then left alone.
ITERATIONS = 25
SAMPLE = 100_000  # averages that the mixture is fitted to, at most
ABSURD = 10.0  # times the 99 % quantile, beyond which averages count as that much


@dataclass(frozen=True)
class Mixture:
    """Two normal distributions, fitted to averages of losses."""

    low: float  # means
    high: float
    low_variance: float
    high_variance: float
    share: float  # of the upper one

    @classmethod
    def fit(cls, values: Tensor) -> Mixture | None:
        """Fit by expectation maximization; None if the values do not vary."""
        values = values.double()
        if len(values) > SAMPLE:  # at random, but the same on every rank
            generator = torch.Generator().manual_seed(len(values))
            values = values[torch.randint(len(values), (SAMPLE,), generator=generator)]
        if len(values) < 2:
            return None
        # a few absurd values must not hide the rest
        ordinary = values.kthvalue(math.ceil(0.99 * len(values))).values
        values = values.clamp(max=torch.where(ordinary > 0, ABSURD * ordinary, values.max()))
        variance = values.var(correction=0)
        if not variance > 1e-12 * values.square().mean():
            return None
        floor = 1e-3 * variance
        means = torch.quantile(values, torch.tensor([0.25, 0.9], dtype=torch.float64))
        if means[0] == means[1]:
            means[1] = values.max()
        variances = variance.expand(2).clone()
        shares = torch.tensor([0.5, 0.5], dtype=torch.float64)
        for _ in range(ITERATIONS):
            distance = (values[:, None] - means).square() / variances
            scores = shares.log() - 0.5 * (variances.log() + distance)
            members = scores.softmax(1)
            sizes = members.sum(0).clamp(min=1e-9)
            means = (members * values[:, None]).sum(0) / sizes
            variances = (members * (values[:, None] - means).square()).sum(0) / sizes + floor
            shares = (sizes / len(values)).clamp(1e-6, 1 - 1e-6)
        order = means.argsort().tolist()
        low, high = order
        return cls(
            means[low].item(),
            means[high].item(),
            variances[low].item(),
            variances[high].item(),
            shares[high].item(),
        )

    @property
    def separation(self) -> float:
        """The distance of the means, in standard deviations (the mean of both)."""
        return (
            2
            * (self.high - self.low)
            / (math.sqrt(self.low_variance) + math.sqrt(self.high_variance))
        )

    def weights(self, values: Tensor) -> Tensor:
        """Return the probability of the lower distribution; 1 below its mean, 0 above the other."""
        values = values.double()
        odds = math.log((1 - self.share) / self.share)
        odds -= 0.5 * math.log(self.low_variance / self.high_variance)
        below = (values - self.low).square() / self.low_variance
        above = (values - self.high).square() / self.high_variance
        found = torch.sigmoid(odds - 0.5 * (below - above))
        found = torch.where(values <= self.low, 1.0, found)
        return torch.where(values >= self.high, 0.0, found)
