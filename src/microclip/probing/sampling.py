"""Drawing steps and held-out examples at random; no example is ever in both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

AT_ONCE = 2**22  # numbers in a batch of draws


@dataclass(frozen=True)
class Pool:
    """Which examples there are, and how many make a step."""

    examples: int
    batch_size: int  # B
    held_out: Tensor | None = None  # bool: judges only, never in a step; None: drawn each time

    @property
    def for_steps(self) -> Tensor:
        """Return the numbers of the examples that steps are made of."""
        return self.samples[0]

    @property
    def samples(self) -> list[Tensor]:
        """Return the numbers of examples that were sampled together: for steps, to judge by."""
        every = torch.arange(self.examples)
        if self.held_out is None:
            return [every]
        return [every[~self.held_out], every[self.held_out]]


def draws_from(
    pool: Pool, count: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield steps (draws, B) and held-out shares (draws, examples), `count` draws in all."""
    members = pool.for_steps
    for portion in _portions(pool, count):
        order = torch.rand(portion, len(members), generator=generator).argsort(1)
        steps = members[order[:, : pool.batch_size]]
        yield steps, _shares(pool, steps)


def _shares(pool: Pool, steps: Tensor) -> Tensor:
    """Return the share of each example in the held-out mean: none if it is in the step."""
    shares = torch.ones(len(steps), pool.examples, dtype=torch.float64).scatter_(1, steps, 0.0)
    if pool.held_out is not None:
        shares[:, ~pool.held_out] = 0.0
    return shares / shares.sum(1, keepdim=True)


def _portions(pool: Pool, count: int) -> Iterator[int]:
    at_once = max(1, AT_ONCE // max(pool.batch_size**2, pool.examples))
    for start in range(0, count, at_once):
        yield min(at_once, count - start)
