"""Laws of benign noise g~ - g, as the theorems assume it: mean 0, mean square at most sigma^2.

Each is perpendicular to the dragger and, but for `skewed`, symmetric. A law gets g and mu's
direction for several trainings at once, one in each row, and returns noise for B examples each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Generator, Tensor

__all__ = ["LAWS", "SYMMETRIC", "Law", "Noise"]

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
