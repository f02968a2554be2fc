"""Cells: ranks that differ, in settings, parameters or labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp

from microclip import Clipper, rules

from rank_cells.base import Halves, Net, batch, cases, cell, grads, losses


class Own(rules.Rule):
    """Without a repr of its own."""

    def __init__(self, power: float = 1.0) -> None:
        self.power = power

    def weights(self, norms: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return (norms.nan_to_num(1.0).min() / norms) ** self.power


class Remembers(Own):
    def state_dict(self) -> dict[str, Any]:
        return {"power": self.power}


OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "size": lambda rank: {"microbatch_size": 2 + rank},
    "size or none": lambda rank: {"microbatch_size": (2, None)[rank]},
    "rule": lambda rank: {"rule": (rules.MinNorm(), rules.Unit())[rank]},
    "rule's number": lambda rank: {"rule": rules.Fixed(1.0 + rank)},
    "own rule": lambda rank: {"rule": Own(1.0 + rank)},
    "state": lambda rank: {"rule": Remembers(1.0 + rank)},
    "reduction": lambda rank: {"reduction": ("mean", "sum")[rank]},
    "nonfinite": lambda rank: {"nonfinite": ("skip", "propagate")[rank]},
    "scale": lambda rank: {"grad_scaler": torch.amp.GradScaler("cpu", init_scale=2.0**rank)},
    "scaler": lambda rank: {"grad_scaler": (torch.amp.GradScaler("cpu"), None)[rank]},
}


@cases(*OPTIONS)
def differs(rank: int, what: str) -> Any:
    net = Net()
    model = Ddp(net)
    net.body.weight.grad = torch.ones_like(net.body.weight)
    clipper = Clipper(model, **{"microbatch_size": 2, **OPTIONS[what](rank)})
    try:
        clipper.backward(losses(model), batch(rank))
    finally:
        assert bool((net.body.weight.grad == 1).all())
        assert net.head.weight.grad is None


@cases("frozen", "frozen later", "another one frozen", "values", "head", "dtype", "new", "idle")
def parameters_differ(rank: int, what: str) -> Any:
    net = Net()
    model: Any = Ddp(net)
    if rank == 1:
        if what in ("frozen", "idle"):
            net.head.bias.requires_grad_(False)
        elif what == "values":
            with torch.no_grad():
                net.body.bias[0] += 1e-9
        elif what == "new":
            net.more = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    if what == "another one frozen":
        (net.head.bias if rank else net.body.bias).requires_grad_(False)
    if what in ("head", "dtype"):
        head = nn.Linear(5, 3).double()  # not made equal on the ranks
        torch.manual_seed(rank if what == "head" else 0)
        nn.init.normal_(head.weight)
        nn.init.zeros_(head.bias)
        head.to(torch.float32 if rank and what == "dtype" else torch.float64)
        model = Halves(net, Ddp, lambda _: head)
    clipper = Clipper(model, 2)
    if what == "frozen later":
        clipper.backward(losses(model), batch(rank))
        net.head.bias.requires_grad_(rank == 0)
    loss_fn = losses(model)
    if what == "dtype":
        loss_fn = losses(lambda x: head(torch.tanh(model.body(x)).to(head.weight.dtype)).double())
    clipper.backward(loss_fn, batch(rank, 0 if what == "idle" and rank == 1 else 6))


@cases("rule without repr", "unfrozen on all", "looked at later")
def does_not_differ(rank: int, what: str) -> Any:
    net = Net()
    model = Ddp(net)
    if what == "looked at later":  # another object on one rank, of the same value
        clipper = Clipper(model, 2)
        clipper.backward(losses(model), batch(rank))
        with torch.no_grad():
            net.head.bias.copy_(Net().head.bias)
            net.body.weight += 1.0
            net.body.weight -= 1.0
            net.body.weight.copy_(Net().body.weight)
        if rank == 1:
            net.head.bias = nn.Parameter(net.head.bias.detach().clone())
        net.zero_grad()
        clipper.backward(losses(model), batch(rank))
        return grads(net)
    if what == "rule without repr":
        Clipper(model, 2, rule=Own()).backward(losses(model), batch(rank))
        return grads(net)
    net.head.requires_grad_(False)
    clipper = Clipper(model, 2)
    clipper.backward(losses(model), batch(rank))
    net.head.requires_grad_(True)
    net.zero_grad()
    clipper.backward(losses(model), batch(rank))
    return grads(net)


LABELS: dict[str, tuple[list[Any], list[Any]]] = {
    "int and numpy": ([1, 2] * 3, list(numpy.array([1, 2] * 3))),
    "int and bool": ([0, 1] * 3, [False, True] * 3),
    "int and float": ([1, 2] * 3, [1.0, 2.0] * 3),
    "str and numpy": (["a", "b"] * 3, list(numpy.array(["a", "b"] * 3))),
    "int and tensor": ([1, 2] * 3, torch.tensor([1, 2] * 3)),  # type: ignore[dict-item]
    "tuples": ([(1, "a"), (2, "a")] * 3, [(numpy.int32(1), "a"), (2.0, numpy.str_("a"))] * 3),
}


@cases(*LABELS)
def labels(rank: int, what: str) -> Any:
    net = Net()
    model = Ddp(net)
    Clipper(model, 2).backward(losses(model), batch(rank), domains=LABELS[what][rank])
    return grads(net)


class NameOnly:
    """A label that says where it is, and nothing else."""

    def __lt__(self, other: Any) -> bool:
        return id(self) < id(other)


@cell
def label_without_a_name(rank: int) -> Any:
    model = Ddp(Net())
    label = NameOnly()
    Clipper(model, 2).backward(losses(model), batch(rank), domains=[label] * 6)


@cell
def domains_on_one_rank(rank: int) -> Any:
    """Examples without a label are a domain of their own, as on one process."""
    net = Net()
    model = Ddp(net)
    Clipper(model, 2).backward(losses(model), batch(rank), domains=None if rank else ["a"] * 6)
    return grads(net)
