"""A world in which the paper's four assumptions hold to the letter.

The loss is `L |w|^2 / 2`, so g = L w and the least loss is 0. Benign gradients are g plus noise of
one of the laws in `noises`. All draggers of a step share one vector mu, perpendicular to every
benign gradient, in a new random direction each step, of a length between `c|g|` and `C|g|`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from microclip_lab.theory.noises import LAWS, SYMMETRIC, Noise, unit
from microclip_lab.theory.symbols import check, check_order

__all__ = ["World"]


@dataclass(frozen=True)
class World:
    """What the theorems take as given; what the letters mean is in `symbols`.

    >>> World(epsilon=0.2, c=5.0, C=5.0, sigma=1.0, gap=2.0).start(runs=1)
    tensor([[2., 0., 0., 0., 0., 0.]], dtype=torch.float64)
    """

    epsilon: float
    c: float
    C: float
    sigma: float
    L: float = 1.0
    gap: float = 10.0
    noise: Noise = "sphere"
    dimension: int = 6

    def __post_init__(self) -> None:
        check(epsilon=self.epsilon, sigma=self.sigma, L=self.L, gap=self.gap)
        check_order(self.c, self.C)
        if self.noise not in LAWS:
            raise ValueError(f"noise must be one of {', '.join(LAWS)}, but got {self.noise!r}.")
        if self.dimension < 2:
            raise ValueError(
                "dimension must be 2 or more, since draggers are perpendicular to the gradient, "
                f"but got {self.dimension}."
            )

    @property
    def symmetric(self) -> bool:
        """Whether benign noise is symmetric, as the paper's assumption 3 wants it."""
        return self.noise in SYMMETRIC

    def start(self, runs: int) -> Tensor:
        """Return the first w of every run: `L |w|^2 / 2` is the gap."""
        w = torch.zeros(runs, self.dimension, dtype=torch.float64)
        w[:, 0] = math.sqrt(2 * self.gap / self.L)
        return w

    def gradient(self, w: Tensor) -> Tensor:
        """Return the benign gradient g."""
        return self.L * w

    def sample(self, g: Tensor, B: int, generator: Generator) -> Tensor:
        """Return the gradients of B examples, for each g in a row: (runs, B, dimension)."""
        runs, length = g.shape[0], g.norm(dim=-1, keepdim=True)
        side = torch.randn(g.shape, generator=generator, dtype=g.dtype)
        forward = unit(g)
        side = unit(side - (side * forward).sum(-1, keepdim=True) * forward)
        between = torch.rand(runs, 1, generator=generator, dtype=g.dtype)
        mu = (self.c + between * (self.C - self.c)) * length * side
        benign = g[:, None] + LAWS[self.noise](g, side, B, self.sigma, generator)
        drags = torch.rand(runs, B, 1, generator=generator, dtype=g.dtype) < self.epsilon
        return torch.where(drags, mu[:, None], benign)
