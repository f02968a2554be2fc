"""A small training run on several ranks that resumes from its last checkpoint when restarted.

    torchrun --nproc-per-node 2 --max-restarts 3 tests/support/rank_train.py FOLDER --steps 40

`--die SECONDS` makes the last rank kill itself that long after its first step, with SIGKILL.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from microclip import Clipper

import processes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--die", type=float)
    parser.add_argument("--once", action="store_true", help="die at the first start only")
    parser.add_argument("--timeout", type=float, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    store, rank, world = next(rendezvous("env://"))
    dist.init_process_group(
        "gloo",
        # torchrun keeps its store over restarts, with the addresses of ranks that are gone
        store=dist.PrefixStore(f"start {restarts}", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=options.timeout),
    )

    net = processes.Net(torch.float32)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    clipper = Clipper(model, 2, engine="stream")
    checkpoint = options.folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        clipper.load_state_dict(state["clipper"])
        print(f"rank {rank} goes on at step {clipper.step}", flush=True)
    dies = options.die is not None and rank == world - 1 and not (options.once and restarts)

    for step in range(clipper.step, options.steps):
        batch = processes.batch(rank + world * step, 8, torch.float32)
        optimizer.zero_grad()
        clipper.backward(processes.losses(model), batch)
        optimizer.step()
        if rank == 0:
            state = {
                "model": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "clipper": clipper.state_dict(),
            }
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)  # never half a checkpoint
        if dies and step == clipper.step - 1:
            threading.Timer(options.die, os.kill, (os.getpid(), signal.SIGKILL)).start()
            dies = False
    if rank == 0:
        torch.save(net.state_dict(), options.folder / "final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
