"""Ranks on the stand-in device: Gloo underneath, which sees the device's memory as the host's.

Child processes import it by name. What each of them computes on the device is compared with what
it computes on the host, with the same ranks.
"""

from __future__ import annotations

import logging
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import device_cells
import torch
import torch.distributed as dist
from device_cells import ENGINES, Cell
from torch import Tensor, multiprocessing
from torch.nn.parallel import DistributedDataParallel as Ddp

import processes
import stand_in_device


def _seen(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors as Gloo can handle them."""
    away = stand_in_device.NAME
    return [stand_in_device.alias(t) if t.device.type == away else t for t in tensors]


class Relay(dist.ProcessGroup):
    """A process group for tensors of the host and of the stand-in device."""

    def __init__(self, gloo: Any, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self._gloo = gloo

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._done(self._gloo.allreduce(_seen(tensors), opts or dist.AllreduceOptions()))

    def allgather(self, found: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Any:
        return self._done(self._gloo.allgather([_seen(each) for each in found], _seen(tensors)))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._done(self._gloo.broadcast(_seen(tensors), opts or dist.BroadcastOptions()))

    def barrier(self, opts: Any = None) -> Any:
        return self._done(self._gloo.allreduce([torch.ones(1)]))

    def getBackendName(self) -> str:  # noqa: N802
        return "relay"

    def _done(self, work: Any) -> Any:
        work.wait()
        return work


def _make(store: Any, rank: int, world: int, timeout: timedelta) -> Relay:
    return Relay(dist.ProcessGroupGloo(store, rank, world, timeout=timeout), rank, world)


CELLS = {
    **{f"{engine}: MinNorm": Cell(engine) for engine in ENGINES},
    "two_pass: Median": Cell("two_pass", "Median"),
    "fused: Median": Cell("fused", "Median"),
    "one micro-batch": Cell(b=None),
    "sum": Cell("fused", reduction="sum"),
    "domains": Cell("fused", domains=True),
    "domains, streamed": Cell(domains=True),
    "skip": Cell("fused", nonfinite="skip", bad=True),
    "raise": Cell(nonfinite="raise", bad=True),
    "chunks": Cell("fused", how="fold"),
    "LossHistory": Cell(rule="LossHistory"),
    "LossHistory, clipped": Cell("fused", rule="LossHistory, clipped"),
    "NormHistory": Cell("fused", rule="NormHistory"),
    "LossWeight": Cell(rule="LossWeight"),
}


def run(world: int, folder: Path, names: list[str], float64: bool) -> list[dict[str, Any]]:
    """Return what each rank found, cell by cell."""
    multiprocessing.start_processes(
        _enter,
        (world, str(folder), names, float64),
        nprocs=world,
        start_method=processes.start_method(),
    )
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def _enter(rank: int, world: int, folder: str, names: list[str], float64: bool) -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    counting = stand_in_device.install(float64).counts
    dist.Backend.register_backend("relay", _make, devices=["cpu", stand_in_device.NAME])
    dist.init_process_group(
        "relay",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    found = {
        name: device_cells.compare(CELLS[name], stand_in_device.NAME, counting, Ddp, rank)
        for name in names
    }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()  # a process that exits closes connections that others may still wait on
    dist.destroy_process_group()
