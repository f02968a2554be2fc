"""Ranks of a sharded model, one of which raises, sleeps or dies in the middle of a step."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import microclip


def go(rank, scope, fault, place, when):
    """Train; return the type of the error that this rank got, and its message."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    clipper = microclip.Clipper(model, 2, scope=scope)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = 0

    def disturb():
        if fault == "raise":
            raise ValueError("a broken example")
        if fault == "die":
            os._exit(9)
        time.sleep(12)

    def loss_fn(x):
        nonlocal calls
        calls += 1
        mine = rank == 1 and clipper.step == when
        if mine and place == "loss":
            disturb()
        result = model(x)
        if mine and place == "backward":
            result.register_hook(lambda gradient: disturb())
        return result.square().mean(1)

    try:
        for step in range(4):
            optimizer.zero_grad()
            if rank == 1 and step == when and place == "before":
                disturb()
            clipper.backward(loss_fn, torch.randn(4, 3))
            optimizer.step()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""
