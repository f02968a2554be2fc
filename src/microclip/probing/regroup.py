"""What a step with any micro-batch size would have been, from the Gram matrix alone.

A micro-batch's gradient is the mean of its examples' gradients, so all inner products of
micro-batch gradients are block means of the matrix, and a clipped step U = sum_j c_j m_j has
<U, U> = c^T M c. Everything here is a batch of *draws*: random orders of the examples, each cut
into micro-batches as a training step would be, and judged by examples that are not in it. Nothing
is differentiated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from microclip import rules
from microclip.rules import Rule

AT_ONCE = 2**22  # numbers in a batch of draws


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
