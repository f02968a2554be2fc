"""Simulated steps of any micro-batch size, from the Gram matrix alone, and what they are worth.

A micro-batch's gradient is the mean of its examples' gradients, so all inner products of
micro-batch gradients are block means of the matrix, and a clipped step U = sum_j c_j m_j has
<U, U> = c^T M c. Everything here is a batch of *draws*: random orders of the examples, each cut
into micro-batches as a training step would be, and judged by examples that are not in it. Nothing
is differentiated.

A step is worth eff(b) = (g . E U)^2 / (|g|^2 E|U|^2). By the descent lemma, the best learning rate
for steps like U lowers a smooth loss by eff(b) times what the exact gradient would, so eff does not
depend on the step's scale. g comes from examples that are not in U, so <g, U> has no bias; |g|^2
from pairs of different examples. The *gain* of a size is eff(b) / eff(plain), in which |g|^2
cancels.

Intervals are over examples, by the multiplier bootstrap: both averages are sums over examples
(what example i adds to <g, U>, as part of U or of g, and to |U|^2), and replicates weight these
parts at random, the same way for all sizes and rules, so that comparisons are paired.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from microclip import rules
from microclip.rules import Rule

AT_ONCE = 2**22  # numbers in a batch of draws
CONFIDENCE = 0.95
TINY = torch.finfo(torch.float64).tiny
Setting = tuple[str, int]  # a rule's name and a micro-batch size


@dataclass(frozen=True)
class Pool:
    """Which examples there are, and how many make up a step."""

    examples: int
    batch_size: int  # B
    held_out: Tensor | None = None  # bool: only judge, never in a step; None: drawn each time

    @property
    def for_steps(self) -> Tensor:
        """Return the indices of the examples that steps are made of."""
        return self.samples[0]

    @property
    def samples(self) -> list[Tensor]:
        """Return the indices of examples that were sampled together: for steps, to judge by."""
        every = torch.arange(self.examples)
        if self.held_out is None:
            return [every]
        return [every[~self.held_out], every[self.held_out]]


def draws_from(
    pool: Pool, count: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield steps (draws, B) and held-out shares (draws, examples), `count` draws in all.

    No example is ever in both.
    """
    members = pool.for_steps
    for portion in _portions(pool, count):
        order = torch.rand(portion, len(members), generator=generator).argsort(1)
        steps = members[order[:, : pool.batch_size]]
        yield steps, _shares(pool, steps)


def _shares(pool: Pool, steps: Tensor) -> Tensor:
    """Return the share of each example in the held-out mean: 0 if it is in the step."""
    shares = torch.ones(len(steps), pool.examples, dtype=torch.float64).scatter_(1, steps, 0.0)
    if pool.held_out is not None:
        shares[:, ~pool.held_out] = 0.0
    return shares / shares.sum(1, keepdim=True)


def _portions(pool: Pool, count: int) -> Iterator[int]:
    at_once = max(1, AT_ONCE // max(pool.batch_size**2, pool.examples))
    for start in range(0, count, at_once):
        yield min(at_once, count - start)


@dataclass(frozen=True)
class Draws:
    """Random steps, and what each is judged by; one draw per row."""

    matrix: Tensor  # (examples, examples): the Gram matrix
    steps: Tensor  # (draws, B): the examples of each step, in order
    held_out: Tensor  # (draws, examples): shares in the mean gradient g, adding up to 1
    inner: Tensor  # (draws, B, B): the step's examples with each other
    toward: Tensor  # (draws, examples): every example with g

    @classmethod
    def of(cls, matrix: Tensor, steps: Tensor, held_out: Tensor) -> Draws:
        """Look up the draws' inner products."""
        inner = matrix[steps.unsqueeze(2), steps.unsqueeze(1)]
        return cls(matrix, steps, held_out, inner, held_out @ matrix)

    @property
    def batch_size(self) -> int:
        """Return B, the examples of a step."""
        return self.steps.shape[1]

    @property
    def held(self) -> Tensor:
        """Return |g|^2 as it was measured, noise included."""
        return (self.toward * self.held_out).sum(1)

    @property
    def signal(self) -> Tensor:
        """Return |g|^2 without bias: from pairs of different examples only."""
        squares = self.held_out.square()
        return (self.held - squares @ self.matrix.diagonal()) / (1 - squares.sum(1))


@dataclass(frozen=True)
class Cut:
    """The draws' steps cut into micro-batches of one size."""

    draws: Draws
    sizes: Tensor  # (micro-batches): examples in each; the last may have fewer
    squares: Tensor  # (draws, micro-batches): |m_j|^2

    @property
    def norms(self) -> Tensor:
        """Return |m_j|, (draws, micro-batches)."""
        return self.squares.clamp(min=0).sqrt()


@dataclass(frozen=True)
class Clipped:
    """The draws' steps, clipped by a rule: U = sum_i coefficient_i g_i."""

    norms: Tensor  # (draws, micro-batches)
    weights: Tensor  # (draws, micro-batches)
    sizes: Tensor  # (micro-batches)
    bounds: Tensor  # (draws)
    coefficients: Tensor  # (draws, examples): 0 for those not in the step
    products: Tensor  # (draws, examples): <g_i, U>
    along: Tensor  # (draws): <g, U>
    square: Tensor  # (draws): <U, U>


def cut(draws: Draws, size: int) -> Cut:
    """Cut the steps into micro-batches of consecutive examples."""
    count = -(-draws.batch_size // size)
    sizes = draws.inner.new_full((count,), size)
    sizes[-1] = draws.batch_size - size * (count - 1)
    sums = _sums(_sums(draws.inner, size, 1), size, 2).diagonal(dim1=1, dim2=2)
    return Cut(draws, sizes, sums / sizes.square())


def clip(cut: Cut, rule: Rule | None) -> Clipped:
    """Weight the micro-batches by a rule; None: equally, which is plain training."""
    draws, norms = cut.draws, cut.norms
    if rule is None:
        weights, bounds = torch.ones_like(norms), norms.amax(1)
    else:
        weights, bounds = weigh(rule, norms, cut.sizes)
    # sum_j (size_j / B) w_j m_j: each example of micro-batch j gets w_j / B
    each = weights.repeat_interleave(cut.sizes.long(), 1) / draws.batch_size
    coefficients = torch.zeros_like(draws.held_out).scatter_(1, draws.steps, each)
    products = coefficients @ draws.matrix
    along = (products * draws.held_out).sum(1)
    square = (products * coefficients).sum(1).clamp(min=0)
    return Clipped(norms, weights, cut.sizes, bounds, coefficients, products, along, square)


def weigh(rule: Rule, norms: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rule's weights and bounds for each row of norms."""

    def one(row: Tensor) -> tuple[Tensor, Tensor]:
        verdict = rules.apply(rule, row, sizes, "propagate")
        return verdict.weights, verdict.bound

    try:
        weights, bounds = torch.func.vmap(one)(norms)
    except (RuntimeError, NotImplementedError):  # a rule that reads values, or writes in place
        found = [one(row) for row in norms]
        weights, bounds = (torch.stack(column) for column in zip(*found, strict=True))
    return weights, bounds


def _sums(values: Tensor, size: int, dim: int) -> Tensor:
    """Sum consecutive elements along a dimension, `size` at a time; the last sum may have fewer."""
    length = values.shape[dim]
    whole = length - length % size
    shape = (*values.shape[:dim], whole // size, size, *values.shape[dim + 1 :])
    parts = values.narrow(dim, 0, whole).reshape(shape).sum(dim + 1)
    if whole == length:
        return parts
    rest = values.narrow(dim, whole, length - whole).sum(dim, keepdim=True)
    return torch.cat([parts, rest], dim)


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
