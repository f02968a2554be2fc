"""What ranks do in the tests of rules that weight examples; child processes import it by name."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as Ddp

from microclip import Clipper
from microclip.rules import LossHistory, LossWeight, NormHistory, Unit

import processes

EXAMPLES, BATCH, EPOCHS = 48, 12, 16
STEPS = EXAMPLES // BATCH * EPOCHS
RULES = {
    "LossHistory": (lambda: LossHistory(STEPS), 1),
    "LossHistory of strings": (lambda: LossHistory(STEPS), 1),
    "LossHistory + Unit": (lambda: LossHistory(STEPS, clip=Unit()), 3),
    "NormHistory": (lambda: NormHistory(STEPS), 1),
    "LossWeight": (lambda: LossWeight(), 1),
}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return points with a third of the labels wrong."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(EXAMPLES, 5, generator=generator, dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    y[: EXAMPLES // 3] = (y[: EXAMPLES // 3] + 1) % 3
    return x, y


def rows_of(step: int) -> torch.Tensor:
    """Return the examples of a step, in the order of one process."""
    epoch, place = divmod(step, EXAMPLES // BATCH)
    generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(EXAMPLES, generator=generator)
    return order[place * BATCH : (place + 1) * BATCH]


def train(
    name: str,
    rank: int = 0,
    world: int = 1,
    first: int = 0,
    last: int = STEPS,
    state: Any = None,
    shards: bool = False,
) -> dict[str, Any]:
    """Train on this rank's part of every batch; return weights, state and messages."""
    warnings.simplefilter("ignore")
    make, b = RULES[name]
    net = processes.Net(torch.float64)
    net.unused.requires_grad_(False)
    net.branch.requires_grad_(False)
    rule = make()
    state = copy.deepcopy(state)  # optimizers write to it, and processes share it
    if state is not None:
        net.load_state_dict(state["model"])
    model: Any = net
    if shards:
        model = fully_shard(net)
    elif world > 1:
        model = Ddp(net)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.2, momentum=0.5)
    clipper = Clipper(model, None if shards else b, rule=rule)
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
        clipper.load_state_dict(state["clipper"])
    x, y = data()
    messages, weights = [], []
    for step in range(first, last):
        rows = rows_of(step)
        # uneven parts, whole micro-batches of 3 on each rank
        parts = {1: [12], 2: [9, 3], 4: [6, 3, 3, 0]}[world]
        mine = rows[sum(parts[:rank]) : sum(parts[: rank + 1])]
        ids = [f"example {i}" for i in mine] if "strings" in name else mine
        optimizer.zero_grad()
        outcome = clipper.backward(
            processes.losses(model), (x[mine], y[mine]), ids=ids if len(mine) else None
        )
        messages += outcome.notes
        weights.append(outcome.example_weights)
        optimizer.step()
    return {
        "model": {k: (v.full_tensor() if shards else v) for k, v in net.state_dict().items()},
        "optimizer": optimizer.state_dict() if not shards else None,
        "clipper": clipper.state_dict(),
        "messages": messages,
        "phase": getattr(rule, "phase", ""),
        "weights": weights,
    }


def work(rank: int, world: int) -> dict[str, Any]:
    """Train with every rule."""
    found = {name: train(name, rank, world) for name in RULES}
    if world == 2:
        found["FSDP"] = train("LossHistory", rank, world, last=STEPS // 2, shards=True)
    return found


def go_on(rank: int, world: int, state: Any) -> dict[str, Any]:
    """Train the second half, from a checkpoint."""
    return train("LossHistory", rank, world, STEPS // 2, STEPS, state)


def first_half(rank: int, world: int) -> dict[str, Any]:
    """Train the first half."""
    return train("LossHistory", rank, world, 0, STEPS // 2)


def ids_of_different_types(rank: int, world: int) -> dict[str, Any]:
    """Pass integers on the first rank and strings on the second; return the error."""
    model = Ddp(processes.Net(torch.float64), find_unused_parameters=True)
    clipper = Clipper(model, rule=LossHistory(STEPS))
    x, y = data()
    error = ""
    try:
        ids: Any = [0, 1] if rank == 0 else ["2", "3"]
        clipper.backward(processes.losses(model), (x[:2], y[:2]), ids=ids)
    except RuntimeError as found:
        error = str(found)
    return {"error": error, "kind": clipper.state_dict()["ids"], "step": clipper.step}
