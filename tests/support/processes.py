"""Running a function on several real ranks, and what they share: models, batches, expectations."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from microclip.microbatches import cut

import reference

SECONDS = 60
# what most ranks import, which takes them longer than what they are tested for
PRELOADED = ("torch._dynamo", "torch.distributed.fsdp", "transformers", "microclip.clipper")


def start_method() -> str:
    """Return how to start ranks: as forks of a server that has `PRELOADED`, if possible.

    Forks end without a word to coverage, so they are new processes where that is measured.
    """
    if sys.platform != "linux" or "COVERAGE_PROCESS_CONFIG" in os.environ:
        return "spawn"
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    return "forkserver"


def run(
    function: Callable[..., Any], world: int, folder: Path, *args: Any, seconds: int = SECONDS
) -> list[Any]:
    """Return what `function(rank, *args)` gives on each rank of a new process group.

    `seconds`: after which a rank gives up waiting for the others.
    """
    multiprocessing.start_processes(
        _enter,
        (function, world, str(folder), args, seconds),
        nprocs=world,
        start_method=start_method(),
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def selected(request: Any, names: Collection[str]) -> list[str]:
    """Return the cells that selected tests ask for by `name`, or all if none does."""
    wanted = {
        item.callspec.params.get("name")
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    return [name for name in names if name in wanted] or list(names)


def _enter(
    rank: int, function: Any, world: int, folder: str, args: tuple[Any, ...], seconds: int
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    try:
        torch.save(function(rank, *args), f"{folder}/{rank}.new")
        os.replace(f"{folder}/{rank}.new", f"{folder}/{rank}.pt")
        # a process that exits closes connections that others may still wait on
        _wait(lambda: all(Path(folder, f"{r}.pt").exists() for r in range(world)))
    finally:
        dist.destroy_process_group()


def _wait(done: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not done() and time.monotonic() < end:
        time.sleep(0.05)


class Net(nn.Module):
    """With a branch that only some examples take, and an unused parameter."""

    def __init__(self, dtype: torch.dtype, batchnorm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh())
        self.mixed = nn.BatchNorm1d(7) if batchnorm else nn.Identity()
        self.branch = nn.Linear(7, 7)
        self.head = nn.Linear(7, 3)
        self.unused = nn.Parameter(torch.zeros(2))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.mixed(self.body(x))
        if bool((x[:, 0] > 100).any()):
            hidden = hidden + self.branch(hidden)
        return self.head(hidden)


def batch(rank: int, size: int, dtype: torch.dtype, branch: bool = False) -> Any:
    """Return the examples of one rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(size, 5, generator=generator).to(dtype) * (1 + rank)
    y = torch.randint(0, 3, (size,), generator=generator)
    if branch and rank == 0:
        x[:, 0] = 101.0
    return x, y


def losses(model: nn.Module) -> Callable[[Any], torch.Tensor]:
    return lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def twin(
    model: nn.Module,
    batches: list[Any],
    b: int | None,
    *,
    rule: str = "MinNorm()",
    reduction: str = "mean",
    domains: list[Any] | None = None,
) -> list[Any]:
    """Return the gradient that one process gets from the micro-batches of all ranks.

    Micro-batches that are not finite are left out.
    """
    pieces = []
    for rank, examples in enumerate(batches):
        if len(examples[0]):
            pieces += cut(examples, b, domains=domains[rank] if domains else None)
    parameters = list(model.parameters())
    gradients = reference.microbatch_gradients(
        lambda batch: losses(model)(batch).mean(), parameters, [piece.batch for piece in pieces]
    )
    finite = [j for j, g in enumerate(gradients) if math.isfinite(reference.norm(g))]
    sizes = [pieces[j].size for j in finite]
    return reference.clipped_gradient(
        [gradients[j] for j in finite],
        sizes,
        reference.WEIGH[rule],
        reduction,
        b or max(sizes),
        [pieces[j].domain for j in finite],
    )[0]
