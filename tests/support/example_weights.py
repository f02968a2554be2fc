"""Rules whose weights are known in advance, and what they make of gradients: for every stack."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from microclip.rules import ExampleRule

import reference


def weight_of(key: Any) -> Any:
    """Return the weight of a key, or of a tensor of keys: 0, 1/3, 2/3 or 1."""
    return (key % 4) / 3


class ByKey(ExampleRule):
    """Weights examples by `weight_of`, and keeps what it is shown."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[Any] = []

    def weigh(self, keys: torch.Tensor, losses: torch.Tensor | None) -> torch.Tensor:
        weights: torch.Tensor = weight_of(keys)
        return weights

    def remember(self, seen: Any) -> None:
        self.seen.append(seen)


class Given(ByKey):
    """Weights by id, as given."""

    def __init__(self, weights: list[float], **options: Any) -> None:
        super().__init__(**options)
        self.given = torch.tensor(weights, dtype=torch.float64)

    def weigh(self, keys: torch.Tensor, losses: torch.Tensor | None) -> torch.Tensor:
        return self.given[keys]


def weighted_mean(gradients: list[Any], weights: list[float]) -> list[Any]:
    """Return sum w_i g_i / sum w_i."""
    return reference.weighted_sum(gradients, [weight / sum(weights) for weight in weights])


def corners(count: int = 48, wrong: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points around three corners; the first few have the label of another corner."""
    generator = torch.Generator().manual_seed(2)
    y = torch.arange(count) % 3
    x = 3 * F.one_hot(y, 4) + torch.randn(count, 4, generator=generator) / 2
    return x, torch.where(torch.arange(count) < wrong, (y + 1) % 3, y)
