"""Cells: wrappers that are not the whole model."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.utils.checkpoint import checkpoint

from microclip import Clipper

from rank_cells.base import WORLD, Halves, Net, batch, cases, cell, grads, losses


@cases("stream", "two_pass", "fused", "auto")
def beside_a_wrapper(rank: int, engine: str) -> Any:
    net = Net()
    both = nn.ModuleList([Ddp(net.body), net.head])
    clipper = Clipper(both, 2, engine=engine)
    for _ in range(2):
        net.zero_grad()
        clipper.backward(losses(lambda x: both[1](torch.tanh(both[0](x)))), batch(rank))
    return grads(net)


@cases("body", "head", "both")
def wrapped_inside(rank: int, which: str) -> Any:
    net = Net()
    plain: Any = lambda module: module  # noqa: E731
    model = Halves(net, plain if which == "head" else Ddp, plain if which == "body" else Ddp)
    Clipper(model, 2).backward(losses(model), batch(rank))
    return grads(net)


@cell
def beside_a_wrapper_own_backward(rank: int) -> Any:
    net = Net()
    both = nn.ModuleDict({"body": Ddp(net.body), "head": net.head})
    clipper = Clipper(both, engine="stream")
    for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
        with both["body"].no_sync():
            x, y = batch(rank)
            loss = losses(lambda x: both["head"](torch.tanh(both["body"](x))))((x[rows], y[rows]))
            loss.mean().backward()
            clipper.fold(size=2)
    clipper.finish()
    return grads(net)


@cases("group", "in another", "twice", "twice, evaluated", "checkpointed", "compiled")
def wrapped(rank: int, how: str) -> Any:
    net = Net()
    names = list(net.parameters())
    if how == "checkpointed":
        net.body = Checkpointed(net.body)
    inner = torch.compile(net, fullgraph=True, backend="eager") if how == "compiled" else net
    model = Ddp(inner, process_group=dist.new_group([0, 1]) if how == "group" else None)
    if how == "in another":
        model = Ddp(model)
    elif how.startswith("twice"):
        other = Ddp(net)
        if "evaluated" in how:
            other(batch(rank)[0])
    clipper = Clipper(model, 2)
    for _ in range(2):
        net.zero_grad()
        clipper.backward(losses(model), batch(rank))
    return [parameter.grad for parameter in names]


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@cell
def wrapped_twice_and_the_other_called(rank: int) -> Any:
    net = Net()
    model, other = Ddp(net), Ddp(net)
    Clipper(model, 2).backward(losses(other), batch(rank))


@cell
def wrappers_for_different_ranks(rank: int) -> Any:
    net = Net()
    alone = [dist.new_group([r]) for r in range(WORLD)][rank]
    Clipper(nn.ModuleList([Ddp(net.body), Ddp(net.head, process_group=alone)]))


@cases("stream", "two_pass", "fused", "auto")
def inside_of_the_wrapper(rank: int, engine: str) -> Any:
    net = Net()
    model = Ddp(net)
    net.body.weight.grad = torch.ones_like(net.body.weight)
    try:
        Clipper(net, 2, engine=engine).backward(losses(model), batch(rank))
    finally:
        assert bool((net.body.weight.grad == 1).all())
        assert net.head.weight.grad is None


@cases("list", "part", "later", "chunks")
def inside_of_the_wrapper_variant(rank: int, which: str) -> Any:
    net = Net()
    if which == "later":
        clipper = Clipper(net, 2)
    model = Ddp(net)
    if which == "list":
        clipper = Clipper(nn.ModuleList([net, nn.Linear(1, 1)]), 2)
    elif which == "part":
        clipper = Clipper(net.head, 2)
    elif which == "chunks":
        clipper = Clipper(net, 2)
        clipper.fold(losses(model), batch(rank))
        return
    clipper.backward(losses(model), batch(rank))


@cell
def inside_of_the_wrapper_own_backward(rank: int) -> Any:
    net = Net()
    model = Ddp(net)
    clipper = Clipper(net, engine="stream")
    losses(model)(batch(rank)).mean().backward()
    clipper.fold()


@cell
def inside_of_the_wrapper_and_set_right(rank: int) -> Any:
    """After an error, who does it right is not told off again."""
    net = Net()
    model = Ddp(net)
    for attempt in (losses(model), None):
        clipper = Clipper(net, 2, engine="stream")
        with contextlib.suppress(RuntimeError):
            if attempt is None:
                losses(model)(batch(rank)).mean().backward()
                clipper.fold()
            else:
                clipper.backward(attempt, batch(rank))
    net.zero_grad()
    with model.no_sync():
        losses(model)(batch(rank)).mean().backward()
        clipper.fold(size=6)
    clipper.finish()
    net.zero_grad()
    Clipper(model, 2).backward(losses(model), batch(rank))
    return grads(net)


@cell
def inside_of_the_wrapper_but_local(rank: int) -> Any:
    """Each rank alone, and averaged by hand: allowed, with a warning."""
    net = Net()
    model = Ddp(net)
    clipper = Clipper(net, 2, engine="stream")
    for _ in range(2):
        net.zero_grad()
        with model.no_sync():
            clipper.backward(losses(model), batch(rank))
    return grads(net)


@cell
def no_wrapper(rank: int) -> Any:
    net = Net()
    clipper = Clipper(net, 2)
    for _ in range(2):
        net.zero_grad()
        clipper.backward(losses(net), batch(rank))
    return grads(net)


@cell
def copies_and_pickles_of_a_watched_model(rank: int) -> Any:
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, 2)
    lone = Net()
    Clipper(lone, 2)
    copy.deepcopy(lone)(batch(0)[0])
    import pickle

    assert pickle.loads(pickle.dumps(lone))(batch(0)[0]).shape == (6, 3)
    clipper.backward(losses(model), batch(rank))
    return grads(net)


@cell
def fully_sharded_of_old(rank: int) -> Any:
    Clipper(FullyShardedDataParallel(Net(), device_id=torch.device("cpu")))


@cases("trained", "teacher", "frozen", "inside")
def stranger(rank: int, which: str) -> Any:
    """loss_fn calls another wrapper as well."""
    net = Net()
    model, other = Ddp(net), Ddp(Net())
    if which == "frozen":
        other.requires_grad_(False)

    def loss_fn(batch: Any) -> torch.Tensor:
        with torch.no_grad() if which == "teacher" else contextlib.nullcontext():
            told = other(batch[0]) * 0.0
        return losses(lambda x: model(x) + told)(batch)

    clipper = Clipper(nn.ModuleList([model, other]) if which == "inside" else model, 2)
    for _ in range(2):
        net.zero_grad()
        clipper.backward(loss_fn, batch(rank))
    return grads(net)
