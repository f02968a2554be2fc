"""What a step is worth: eff(b) = (g . E U)^2 / (|g|^2 E|U|^2), with intervals.

By the descent lemma, the best learning rate for steps like U lowers a smooth loss by eff(b) times
what the exact gradient would, so eff does not depend on the step's scale. g comes from examples
that are not in U, so <g, U> has no bias; |g|^2 from pairs of different examples. The *gain* of a
size is eff(b) / eff(plain), in which |g|^2 cancels.

Intervals are over examples, by the multiplier bootstrap: both averages are sums over examples
(what example i adds to <g, U>, as part of U or of g, and to |U|^2), and replicates weight these
parts at random, the same way for all sizes and rules, so that comparisons are paired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from microclip.probing.regroup import Clipped, Draws, Pool, clip, cut, draws_from
from microclip.rules import Rule

CONFIDENCE = 0.95
TINY = torch.finfo(torch.float64).tiny
Setting = tuple[str, int]  # a rule's name and a micro-batch size


@dataclass(frozen=True)
class SettingStats:
    """Statistics of one rule and size over all draws."""

    norms: Tensor  # quantiles of the micro-batch norms: 10 %, 50 %, 90 %
    bound: float  # mean
    bound_spread: float  # standard deviation of its logarithm, to base 10: decades
    mean_weight: float
    effective_sample_size: float
    alignment: float  # mean cosine of U and the held-out mean gradient
    efficiency: float  # eff(b)
    gain: float  # eff(b) / eff(plain)
    gains: Tensor  # of the replicates
    decrease: float  # of the loss, up to a factor: (g . E U)^2 / E|U|^2, negative if it grows
    decreases: Tensor  # of the replicates


@dataclass(frozen=True)
class Simulation:
    """The statistics of all rules and sizes, and of plain steps."""

    stats: Mapping[Setting, SettingStats]
    plain: float  # eff of a plain step
    plain_decreases: Tensor  # of the replicates
    plain_alignment: float
    signal: float  # |g|^2
    noise: float  # E|g_i - g|^2


@dataclass
class _Average:
    """Averages over draws of one kind of step, and each example's part in them."""

    clipped: list[Clipped] = field(default_factory=list)
    cosines: list[Tensor] = field(default_factory=list)
    parts_along: Tensor | float = 0.0  # sums over draws, one per example
    parts_square: Tensor | float = 0.0

    def add(self, draws: Draws, found: Clipped) -> None:
        """Add a portion of the draws."""
        mine, theirs = found.coefficients * draws.toward, draws.held_out * found.products
        self.parts_along = self.parts_along + (mine + theirs).sum(0)
        self.parts_square = self.parts_square + 2 * (found.coefficients * found.products).sum(0)
        lengths = (found.square * draws.held.clamp(min=0)).sqrt().clamp(min=TINY)
        self.cosines.append(found.along / lengths)
        # drop what has one number per example and draw
        empty = found.coefficients[:0]
        self.clipped.append(
            Clipped(
                found.norms, found.weights, found.sizes, found.bounds, empty, empty,
                found.along, found.square,
            )
        )  # fmt: skip

    def of(self, what: str) -> Tensor:
        """Return a field for all draws."""
        return torch.cat([getattr(part, what) for part in self.clipped])

    def decrease(self) -> float:
        """Return sign x (g . E U)^2 / E|U|^2."""
        along, square = self.of("along").mean(), self.of("square").mean().clamp(min=TINY)
        return (along * along.abs() / square).item()

    def decreases(self, multipliers: Tensor) -> Tensor:
        """Return the same for each replicate."""
        count = len(self.of("along"))
        along, square = self.of("along").mean(), self.of("square").mean().clamp(min=TINY)
        along = along + multipliers @ (self.parts_along / count)
        # vary its logarithm, since a square stays positive
        square = square * (multipliers @ (self.parts_square / count / square)).exp()
        return along * along.abs() / square


def simulate(
    matrix: Tensor,
    pool: Pool,
    sizes: Sequence[int],
    rules: Mapping[str, Rule],
    draws: int,
    replicates: int,
    generator: torch.Generator,
) -> Simulation:
    """Simulate steps of every size and rule."""
    plain, signals = _Average(), []
    averages = {(name, size): _Average() for size in sizes for name in rules}
    for steps, held_out in draws_from(pool, draws, generator):
        drawn = Draws.of(matrix, steps, held_out)
        signals.append(drawn.signal)
        plain.add(drawn, clip(cut(drawn, pool.batch_size), None))
        for size in sizes:
            microbatches = cut(drawn, size)
            for name, rule in rules.items():
                averages[name, size].add(drawn, clip(microbatches, rule))
    multipliers = _multipliers(pool, replicates, generator)
    references = plain.decreases(multipliers)
    signal = torch.cat(signals).mean().item()
    reference = torch.tensor([plain.decrease()], dtype=torch.float64)
    stats = {}
    for setting, average in averages.items():
        decrease, decreases = average.decrease(), average.decreases(multipliers)
        gain = _gains(torch.tensor([decrease], dtype=torch.float64), reference).item()
        gains = _gains(decreases, references)
        stats[setting] = _stats(average, _ratio(decrease, signal), gain, gains, decrease, decreases)
    return Simulation(
        stats,
        plain=_ratio(plain.decrease(), signal),
        plain_decreases=references,
        plain_alignment=torch.cat(plain.cosines).mean().item(),
        signal=signal,
        noise=matrix.diagonal()[pool.for_steps].mean().item() - signal,
    )


def _multipliers(pool: Pool, replicates: int, generator: torch.Generator) -> Tensor:
    """Return random weights of the examples, (replicates, examples), that add up to 0.

    Subtracting the mean within a sample is the same as subtracting it from the examples' parts.
    """
    drawn = torch.randn(replicates, pool.examples, dtype=torch.float64, generator=generator)
    for sample in pool.samples:
        values = drawn[:, sample]
        correction = (len(sample) / (len(sample) - 1)) ** 0.5
        drawn[:, sample] = correction * (values - values.mean(1, keepdim=True))
    return drawn


def _stats(
    average: _Average,
    efficiency: float,
    gain: float,
    gains: Tensor,
    decrease: float,
    decreases: Tensor,
) -> SettingStats:
    norms, weights, bounds = (average.of(what) for what in ("norms", "weights", "bounds"))
    sizes = average.clipped[0].sizes
    shares = sizes / sizes.sum()
    mean, square = (shares * weights).sum(1), (shares * weights.square()).sum(1)
    logs = bounds[bounds > 0].log10()
    return SettingStats(
        norms=_quantiles(norms.flatten()),
        bound=bounds.mean().item(),
        bound_spread=logs.std().item() if len(logs) > 1 else 0.0,
        mean_weight=mean.mean().item(),
        effective_sample_size=(sizes.sum() * mean.square() / square.clamp(min=TINY)).mean().item(),
        alignment=torch.cat(average.cosines).mean().item(),
        efficiency=efficiency,
        gain=gain,
        gains=gains,
        decrease=decrease,
        decreases=decreases,
    )


def _quantiles(values: Tensor) -> Tensor:
    ordered = values.sort().values
    return torch.stack([ordered[int(q * (len(ordered) - 1))] for q in (0.1, 0.5, 0.9)])


def interval(values: Tensor) -> tuple[float, float]:
    """Return the central 95 % of the values; NaN may lie at either end."""
    place = int((1 - CONFIDENCE) / 2 * len(values))
    low = torch.where(values.isnan(), -torch.inf, values).sort().values
    high = torch.where(values.isnan(), torch.inf, values).sort().values
    return low[place].item(), high[-1 - place].item()


def _gains(decreases: Tensor, references: Tensor) -> Tensor:
    """Return ratios: infinite where only the plain step is worth nothing, NaN where both are.

    A plain step compared with itself gives 1, whatever it is worth.
    """
    ratios = torch.where(references > 0, decreases / references, torch.nan)
    ratios = torch.where((references <= 0) & (decreases > 0), torch.inf, ratios)
    return torch.where(torch.isclose(decreases, references, rtol=1e-9, atol=0.0), 1.0, ratios)


def _ratio(one: float, other: float) -> float:
    return one / other if other > 0 else float("nan")
