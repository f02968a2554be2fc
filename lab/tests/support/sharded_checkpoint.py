"""A rank that trains a sharded model, with and without going through a checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import microclip
from microclip_lab.training.checkpoints import Checkpoints, State
from microclip_lab.training.training_state import TrainingState

STEPS, STOP = 8, 3


def go(rank, folder):
    """Return whether the weights after a resumed run are those of an uninterrupted one."""
    Path(folder).mkdir(exist_ok=True)
    accelerator = SimpleNamespace(
        scaler=None,
        is_main_process=rank == 0,
        process_index=rank,
        num_processes=dist.get_world_size(),
        device=torch.device("cpu"),
        wait_for_everyone=dist.barrier,
    )

    def new():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        clipper = microclip.Clipper(model, 2, engine="two_pass")
        torch.manual_seed(7 + rank)
        return TrainingState(accelerator, model, optimizer, schedule, clipper)

    def train(training, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(10 * step + rank)
            batch = torch.randn(4, 3, generator=generator)
            training.optimizer.zero_grad()
            training.clipper.backward(lambda x: training.model(x).square().mean(1), batch)
            training.optimizer.step()
            training.schedule.step()

    whole, first, second = new(), new(), new()
    torch.manual_seed(7 + rank)
    train(whole, range(STEPS))
    torch.manual_seed(7 + rank)
    train(first, range(STOP))
    checkpoints = Checkpoints(Path(folder), accelerator)
    checkpoints.write(State(STOP), first)
    torch.manual_seed(99)
    assert checkpoints.read(checkpoints.last(), second) == State(STOP)
    train(second, range(STOP, STEPS))
    pairs = zip(whole.model.parameters(), second.model.parameters(), strict=True)
    return all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
