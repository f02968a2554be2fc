"""What a cell is, a small model with its data, and how a rank runs cells."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

WORLD = 2
CELLS: dict[str, Callable[[int], Any]] = {}


class Net(nn.Module):
    """Small enough to be quick, with something in the middle that may be wrapped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


class Halves(nn.Module):
    def __init__(self, net: Net, body: Any, head: Any) -> None:
        super().__init__()
        self.body, self.head = body(net.body), head(net.head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def batch(rank: int, size: int = 6, turn: int = 0) -> Any:
    generator = torch.Generator().manual_seed(100 + rank + 10 * turn)
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64) * (1 + rank)
    return x, torch.randint(0, 3, (size,), generator=generator)


def losses(model: Any) -> Callable[[Any], torch.Tensor]:
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def grads(net: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def cell(function: Callable[..., Any]) -> Callable[..., Any]:
    CELLS[function.__name__] = function
    return function


def cases(*values: Any) -> Callable[..., Any]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for value in values:
            name = f"{function.__name__} {value}"
            CELLS[name] = lambda rank, value=value: function(rank, value)
        return function

    return register


def work(rank: int, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result, error = CELLS[name](rank), ""
            except (Exception, AssertionError) as failure:
                result, error = None, f"{type(failure).__name__}: {failure}"
        heard = [str(w.message) for w in caught if w.category is RuntimeWarning]
        found[name] = result, error, heard
        if dist.is_initialized():
            dist.barrier()
    return found
