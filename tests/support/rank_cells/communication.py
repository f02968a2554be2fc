"""Cells: losses that communicate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp

from microclip import Clipper

from rank_cells.base import WORLD, Net, batch, cases, cell, grads, losses


def normalised(model: Any) -> Callable[[Any], torch.Tensor]:
    """Each micro-batch's losses, divided by a number that all ranks have a say in."""

    def loss_fn(batch: Any) -> torch.Tensor:
        counted = (batch[1] == 0).sum().double() + 1
        dist.all_reduce(counted)
        return losses(model)(batch).sum() / counted

    return loss_fn


def logged(model: Any) -> Callable[[Any], torch.Tensor]:
    """Losses per example, with something that is only told to the others."""

    def loss_fn(batch: Any) -> torch.Tensor:
        found = losses(model)(batch)
        told = found.detach().mean()
        dist.all_reduce(told)
        dist.barrier()
        return found

    return loss_fn


def gathered(model: Any) -> Callable[[Any], torch.Tensor]:
    """Losses per example that look at the outputs of the other ranks."""

    def loss_fn(batch: Any) -> torch.Tensor:
        output = model(batch[0])
        parts = [torch.empty_like(output) for _ in range(WORLD)]
        dist.all_gather(parts, output.detach())
        everybody = torch.cat(parts)
        return torch.logsumexp(output @ everybody.T, 1) - output.gather(1, batch[1][:, None])[:, 0]

    return loss_fn


COMMUNICATES = {"normalised": normalised, "logged": logged, "gathered": gathered}
ENGINES = ("auto", "stream", "two_pass")


@cases(*[f"{kind} {engine}" for kind in COMMUNICATES for engine in ENGINES])
def communicates(rank: int, what: str) -> Any:
    kind, engine = what.split()
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, 2, engine=engine)
    for _ in range(3):
        net.zero_grad()
        clipper.backward(COMMUNICATES[kind](model), batch(rank))
    return grads(net)


@cases("uneven", "idle", "idle first", "finish", "fused", "skip", "chunks uneven", "one rank")
def communicates_and_cannot(rank: int, what: str) -> Any:
    net = Net()
    model = Ddp(net)
    options: dict[str, Any] = {}
    if what == "fused":
        options = {"engine": "fused"}
    elif what == "skip":
        options = {"engine": "two_pass", "nonfinite": "skip"}
    clipper = Clipper(model, 2, **options)
    loss_fn = (logged if what == "fused" else normalised)(model)
    if what == "one rank" and rank == 1:
        loss_fn = losses(model)
    if what == "chunks uneven":
        clipper.fold(loss_fn, batch(rank))
        if rank == 0:
            clipper.fold(loss_fn, batch(rank))
        clipper.finish()
        return
    if what == "finish" and rank == 1:
        clipper.finish()
        return
    sizes = {"uneven": (6, 3), "idle": (6, 0), "idle first": (0, 6)}
    clipper.backward(loss_fn, batch(rank, sizes.get(what, (6, 6))[rank]))


@cell
def communicates_later(rank: int) -> Any:
    """A single pass is chosen for a plain loss; the next one communicates."""
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, 2)
    for _ in range(2):
        clipper.backward(losses(model), batch(rank))
    net.zero_grad()
    clipper.backward(gathered(model), batch(rank))
    return grads(net)


@cell
def communicates_in_a_branch(rank: int) -> Any:
    """One function, which communicates from its third call on; a single pass stops before it."""
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, 2, verify="never")
    switch = SimpleNamespace(on=False)

    def loss_fn(batch: Any) -> torch.Tensor:
        return (gathered if switch.on else losses)(model)(batch)

    for _ in range(2):
        clipper.backward(loss_fn, batch(rank))
        net.zero_grad()
    switch.on = True
    clipper.backward(loss_fn, batch(rank))
    return grads(net)


@cell
def communicates_in_chunks(rank: int) -> Any:
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, 2)
    x, y = batch(rank)
    clipper.fold(normalised(model), (x[:4], y[:4]))
    clipper.fold(normalised(model), (x[4:], y[4:]))
    clipper.finish()
    return grads(net)


@cases("auto", "stream")
def communicates_alone(rank: int, engine: str) -> Any:
    """The model is not wrapped, and the loss is over all ranks."""
    net = Net()
    clipper = Clipper(net, 2, engine=engine)
    for _ in range(2):
        net.zero_grad()
        clipper.backward(normalised(net), batch(rank))
    return grads(net)


@cell
def communicates_and_draws(rank: int) -> Any:
    """The call that is broken off leaves no trace in generators and buffers."""
    found = []
    for engine in ("auto", "stream"):
        torch.manual_seed(rank)
        net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3))
        net.double()
        net.load_state_dict(nn.Sequential(
            Net().body, nn.BatchNorm1d(5), nn.Dropout(), Net().head).state_dict())  # fmt: skip
        model = Ddp(net)
        torch.manual_seed(rank)
        Clipper(model, 2, engine=engine).backward(normalised(model), batch(rank))
        found.append([*grads(net), *(b.clone() for b in net.buffers()), torch.get_rng_state()])
    return found


@cases("partial", "object", "module", "twice")
def communicates_by(rank: int, what: str) -> Any:
    """Loss functions that are no plain functions; the first of their kind may not communicate."""
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, 2)
    loss_fn: Any = normalised(model)
    if what == "partial":
        clipper.backward(functools.partial(losses(model)), batch(rank))
        loss_fn = functools.partial(loss_fn)
    elif what == "object":
        loss_fn = AsObject(loss_fn)
    elif what == "module":
        loss_fn = AsModule(loss_fn)
    else:
        for _ in range(2):
            clipper.backward(loss_fn, batch(rank))
    net.zero_grad()
    clipper.backward(loss_fn, batch(rank))
    return grads(net)


class AsObject:
    def __init__(self, loss_fn: Any) -> None:
        self.loss_fn = loss_fn

    def __call__(self, batch: Any) -> torch.Tensor:
        return self.loss_fn(batch)


class AsModule(nn.Module):
    def __init__(self, loss_fn: Any) -> None:
        super().__init__()
        self.loss_fn = loss_fn

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss_fn(batch)
