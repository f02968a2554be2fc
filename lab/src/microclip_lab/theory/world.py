"""A problem that satisfies the paper's four assumptions exactly.

The loss is `L |w|^2 / 2`, so g = L w and the smallest loss is 0. Benign gradients are g plus noise
from one of the distributions in `LAWS`. All draggers of a step share one vector mu, perpendicular
to every benign gradient, in a new random direction each step, of a norm between `c|g|` and `C|g|`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Generator, Tensor

from microclip_lab.theory.symbols import check, check_order

__all__ = ["LAWS", "SYMMETRIC", "Law", "Noise", "World"]

Noise = Literal["sphere", "rare", "along", "flip", "skewed"]
# (g, direction of mu, B, sigma, generator) -> noise; g of shape (runs, dimension)
Law = Callable[[Tensor, Tensor, int, float, Generator], Tensor]


def sphere(g: Tensor, mu: Tensor, B: int, sigma: float, generator: Generator) -> Tensor:
    """Return noise of length sigma in a random direction perpendicular to mu."""
    noise = torch.randn(g.shape[0], B, g.shape[1], generator=generator, dtype=g.dtype)
    noise = noise - (noise * mu[:, None]).sum(-1, keepdim=True) * mu[:, None]
    return unit(noise) * sigma


def rare(g: Tensor, mu: Tensor, B: int, sigma: float, generator: Generator) -> Tensor:
    """Return noise of length 3 sigma for one example in nine, and none for the others."""
    happens = torch.rand(g.shape[0], B, 1, generator=generator, dtype=g.dtype) < 1 / 9
    return happens * sphere(g, mu, B, 3 * sigma, generator)


def along(g: Tensor, mu: Tensor, B: int, sigma: float, generator: Generator) -> Tensor:
    """Return sigma forward or backward along g."""
    return sigma * _signs(g, B, generator) * _direction(g)


def flip(g: Tensor, mu: Tensor, B: int, sigma: float, generator: Generator) -> Tensor:
    """Return +-1.0001 g while sigma allows it: half of the benign gradients point backward.

    This is the hardest law for small micro-batches: normalised, such gradients cancel.
    """
    length: Tensor = (1.0001 * g.norm(dim=-1)).clamp(max=sigma)
    return length[:, None, None] * _signs(g, B, generator) * _direction(g)


def skewed(g: Tensor, mu: Tensor, B: int, sigma: float, generator: Generator) -> Tensor:
    """Return 3 sigma along g for one example in ten, -sigma/3 for the others: not symmetric."""
    happens = torch.rand(g.shape[0], B, 1, generator=generator, dtype=g.dtype) < 0.1
    return torch.where(happens, 3 * sigma, -sigma / 3) * _direction(g)


LAWS: dict[Noise, Law] = {
    "sphere": sphere,
    "rare": rare,
    "along": along,
    "flip": flip,
    "skewed": skewed,
}
SYMMETRIC: tuple[Noise, ...] = tuple(name for name in get_args(Noise) if name != "skewed")


def _signs(g: Tensor, B: int, generator: Generator) -> Tensor:
    evenly = torch.rand(g.shape[0], B, 1, generator=generator, dtype=g.dtype) < 0.5
    return torch.where(evenly, 1.0, -1.0).to(g.dtype)


def _direction(g: Tensor) -> Tensor:
    return unit(g)[:, None]


def unit(vectors: Tensor) -> Tensor:
    """Return vectors of the same directions and of length 1; what has no direction stays 0."""
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / torch.where(lengths > 0, lengths, 1.0)


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
