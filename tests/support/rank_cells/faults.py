"""Cells: faults on one rank."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp

from microclip import Clipper

from rank_cells.base import Net, batch, cases, cell, grads, losses


@cell
def a_rank_fails_and_goes_on(rank: int) -> Any:
    """What it does next is its part of the step that the others are in."""
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    model = Ddp(net)
    clipper = Clipper(model, 2)

    def fails(batch: Any) -> torch.Tensor:
        raise MemoryError

    for turn in range(2):
        if rank == 1 and turn == 1:
            with contextlib.suppress(MemoryError):
                clipper.backward(fails, batch(rank))
        net.zero_grad()
        clipper.backward(losses(model), batch(rank))
    return grads(net)


@cases("propagate", "skip")
def scaled(rank: int, nonfinite: str) -> Any:
    """float16 loss scaling: an overflow on one rank is one on all."""
    net = Net()
    model = Ddp(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    clipper = Clipper(model, 2, grad_scaler=scaler, nonfinite=nonfinite)
    scales = []
    for turn in range(3):
        optimizer.zero_grad()
        x, y = batch(rank)
        if turn == 1 and rank == 1:
            x[0] = torch.inf
        clipper.backward(losses(model), (x, y))
        scaler.unscale_(optimizer)
        found = grads(net)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return found, scales
