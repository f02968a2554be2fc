"""What clipping costs on several ranks, next to plain data-parallel steps in the same run.

    python benchmarks/ranks.py            two ranks on this machine, gloo

Every rank takes the steps of a round in the same order; times are those of rank 0, as ratios within
a round, median with quartiles. Memory is the peak of rank 0's live tensors beside the plain step's,
in gradient buffers.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from microclip import Clipper
from microclip.distributed import RankClip

from measure import Step, interleaved, peak_memory, ratio
from models import TASKS, Task


def plain(model: nn.Module, task: Task, parts: int = 1) -> None:
    """A plain step, in as many sub-steps as asked."""
    model.zero_grad()
    for x, y in zip(*(tensor.chunk(parts) for tensor in task.batch), strict=True):
        (task.loss(model(x), y).mean() / parts).backward()


def clip(model: nn.Module, task: Task, clipper: Clipper) -> None:
    model.zero_grad()
    clipper.backward(lambda batch: task.loss(model(batch[0]), batch[1]), task.batch)


def replicated(options: argparse.Namespace) -> tuple[nn.Module, Task]:
    task = TASKS[options.task](options.batch_size)
    return DistributedDataParallel(task.model), task


def sharded(options: argparse.Namespace) -> tuple[nn.Module, Task]:
    task = TASKS[options.task](options.batch_size)
    mesh = init_device_mesh("cpu", (options.ranks,))
    for block in task.model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(task.model, mesh=mesh), task


def tables(options: argparse.Namespace) -> Iterator[dict[str, Step]]:
    """Yield what to compare, each with the first of its table, and on a model of its own."""
    size = options.batch_size

    def clipped(make: Any, b: int | None, **more: Any) -> Step:
        model, task = make(options)
        return partial(clip, model, task, Clipper(model, b, **more))

    table: dict[str, Step] = {"plain DDP": partial(plain, *replicated(options))}
    for b in (size, *options.sizes):
        table[f"clipped, b = {b}"] = clipped(replicated, b)
    hooked, task = replicated(options)
    RankClip(hooked)
    table["RankClip hook"] = partial(plain, hooked, task)
    yield table
    table = {"plain FSDP2": partial(plain, *sharded(options))}
    for b in (size, *options.sizes):
        table[f"scope rank, b = {b}"] = clipped(sharded, b)
    yield table
    for b in options.sizes:
        parts = size // b
        yield {
            f"plain FSDP2 in {parts} sub-steps": partial(plain, *sharded(options), parts),
            f"scope world, b = {b}": clipped(sharded, b, scope="world"),
        }


def work(rank: int, port: int, options: argparse.Namespace) -> None:
    """Be one rank."""
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    buffer = TASKS[options.task](1).buffer
    if rank == 0:
        print(f"{options.ranks} ranks of one thread, {options.batch_size} examples each, ", end="")
        print(f"{buffer / 4e6:.2f}M parameters, {options.rounds} rounds, torch {torch.__version__}")
    for table in tables(options):
        seconds = interleaved(table, options.rounds)
        peaks = {name: peak_memory(step) for name, step in table.items()}
        first = next(iter(table))
        if rank == 0:
            print(f"\n{first}: {statistics.median(seconds[first]):.3f} s")
            for name in list(table)[1:]:
                middle, low, high = ratio(seconds, name, first)
                more = (peaks[name] - peaks[first]) / buffer
                print(f"{name:24}{middle:6.2f} ({low:.2f}-{high:.2f}){more:+8.2f} buffers")
    # whoever leaves closes its connections, on which others may still wait
    dist.barrier()
    time.sleep(1)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds")
    parser.add_argument("--batch-size", type=int, default=16, help="examples on each rank")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 8], metavar="B")
    parser.add_argument("--task", default="gpt", choices=["gpt", "wide"])
    options = parser.parse_args()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    multiprocessing.spawn(work, (port, options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
