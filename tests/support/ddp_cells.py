"""What ranks do in the tests of DistributedDataParallel; child processes import it by name."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp

from microclip import Clipper, multitensor
from microclip.distributed import RankClip
from microclip.engines.step_record import NonfiniteGradientError

import processes
import properties


@dataclasses.dataclass(frozen=True)
class Cell:
    engine: str = "stream"
    b: int | None = None
    sizes: tuple[int, ...] = (6, 6, 6, 6)  # examples of each rank
    rule: str = "MinNorm()"
    reduction: str = "mean"
    nonfinite: str = "propagate"
    dtype: torch.dtype = torch.float64
    wrapper: tuple[str, ...] = ()  # options of DistributedDataParallel that are on
    domains: bool = False
    folds: int = 1
    bad: int | None = None  # the rank that has an example with NaN
    zero: int | None = None  # the rank whose gradients are zero
    branch: bool = False  # taken on rank 0 only
    compiled: bool = False
    hook: bool = False


CELLS = {
    **{
        f"{engine} {'whole' if b is None else b} {rule}": Cell(engine, b, rule=rule)
        for engine in ("stream", "two_pass", "fused", "auto")
        for b in (None, 2)
        for rule in ("MinNorm()", "Median(rescale=False)", "Mean(rescale=True)")
        if not (engine == "stream" and "False" in rule)
    },
    "float32": Cell(b=2, dtype=torch.float32),
    "float32 fused": Cell("fused", 2, dtype=torch.float32),
    "uneven": Cell(b=2, sizes=(6, 3, 8, 1)),
    "uneven whole": Cell(sizes=(6, 3, 8, 1)),
    "uneven fused": Cell("fused", 2, sizes=(6, 3, 8, 1)),
    "a rank with nothing": Cell(b=2, sizes=(6, 0, 4, 2)),
    "first rank with nothing": Cell(sizes=(0, 4, 4, 2)),
    "sum": Cell(b=2, reduction="sum"),
    "sum of whole batches": Cell(reduction="sum", sizes=(6, 3, 8, 1)),
    "domains": Cell(b=2, domains=True, sizes=(6, 5, 3, 4)),
    "domains fused": Cell("fused", 2, domains=True, sizes=(6, 5, 3, 4)),
    "skip": Cell(b=2, nonfinite="skip", bad=0),
    "skip elsewhere": Cell(b=2, nonfinite="skip", bad=1),
    "skip fused": Cell("fused", 2, nonfinite="skip", bad=1),
    "skip a whole rank": Cell(nonfinite="skip", bad=1),
    "zero gradients": Cell(b=2, zero=0),
    "bucket views": Cell(b=2, wrapper=("gradient_as_bucket_view",)),
    "static graph": Cell(b=2, wrapper=("static_graph",)),
    "unused": Cell(b=2, wrapper=("find_unused_parameters",)),
    "bucket views fused": Cell("fused", 2, wrapper=("gradient_as_bucket_view", "static_graph")),
    "a branch on one rank": Cell(b=2, branch=True),
    "a branch on one rank, fused": Cell("fused", 2, branch=True),
    "folds": Cell(b=2, folds=2),
    "folds two_pass": Cell("two_pass", 2, folds=2),
    "folds fused": Cell("fused", 2, folds=2),
    "compiled": Cell(b=2, compiled=True),
    "hook": Cell(hook=True),
    "hook with bucket views": Cell(hook=True, wrapper=("gradient_as_bucket_view",)),
    "hook with static graph": Cell(hook=True, wrapper=("static_graph",)),
    "hook with unused": Cell(hook=True, wrapper=("find_unused_parameters",)),
    "hook median": Cell(hook=True, rule="Median(rescale=False)"),
    "hook skip": Cell(hook=True, nonfinite="skip", bad=1),
}


def data(cell: Cell, rank: int) -> Any:
    x, y = processes.batch(rank, cell.sizes[rank], cell.dtype, cell.branch)
    if rank == cell.bad:
        x[1] = torch.nan
    if rank == cell.zero:
        x, y = x.zero_(), torch.full_like(y, -100)  # targets that are ignored
    return x, y


def domains(cell: Cell, rank: int) -> list[str] | None:
    return (["de", "en", "fr"] * 3)[: cell.sizes[rank]] if cell.domains else None


def work(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    """Run these cells on one rank."""
    warnings.simplefilter("ignore")
    return {name: step(CELLS[name], rank, world) for name in names}


def step(cell: Cell, rank: int, world: int) -> Any:
    net = processes.Net(cell.dtype)
    if cell.hook and "find_unused_parameters" not in cell.wrapper:
        net.unused.requires_grad_(False)
        net.branch.requires_grad_(False)
    model: nn.Module = Ddp(net, bucket_cap_mb=1, **dict.fromkeys(cell.wrapper, True))
    rule = properties.RULES[cell.rule]
    examples = data(cell, rank)
    if cell.hook:
        clip = RankClip(model, rule, cell.nonfinite)
        for _ in range(2):  # buckets are rebuilt after the first
            net.zero_grad()
            processes.losses(model)(examples).mean().backward()
        assert clip.step == 2
        return [p.grad for p in net.parameters()], clip.outcome.norms
    if cell.compiled:
        model = torch.compile(model, backend="eager")
    clipper = Clipper(
        model, cell.b, rule=rule, engine=cell.engine, reduction=cell.reduction,
        nonfinite=cell.nonfinite,
    )  # fmt: skip
    for _ in range(2):
        net.zero_grad()
        if cell.folds == 1:
            outcome = clipper.backward(
                processes.losses(model), examples, domains=domains(cell, rank)
            )
        else:
            for part in range(cell.folds):
                rows = slice(part * 4, part * 4 + 4)
                clipper.fold(processes.losses(model), (examples[0][rows], examples[1][rows]))
            outcome = clipper.finish()
    return [p.grad for p in net.parameters()], outcome.norms


def statistics(rank: int, world: int) -> Any:
    """Train a model with BatchNorm, with and without clipping; one micro-batch on each rank."""
    found = {}
    for clipped in (False, True):
        net = processes.Net(torch.float64, batchnorm=True)
        net.unused.requires_grad_(False)
        net.branch.requires_grad_(False)
        model = Ddp(net)
        clipper = Clipper(model)
        for turn in range(3):
            batch = processes.batch(rank + 10 * turn, 6, torch.float64)
            if clipped:
                clipper.backward(processes.losses(model), batch)
            else:
                processes.losses(model)(batch).mean().backward()
        model(processes.batch(0, 6, torch.float64)[0])  # the wrapper's own broadcast
        found[clipped] = [buffer.clone() for buffer in net.buffers()]
    return found


def idle(rank: int, world: int) -> Any:
    """Train with BatchNorm where all ranks but the first have nothing, and only finish."""
    net = processes.Net(torch.float64, batchnorm=True)
    net.unused.requires_grad_(False)
    net.branch.requires_grad_(False)
    model = Ddp(net)
    clipper = Clipper(model, 2)
    for turn in range(2):
        net.zero_grad()
        if rank == 0:
            batch = processes.batch(10 * turn, 6, torch.float64)
            clipper.backward(processes.losses(model), batch)
        else:
            clipper.finish()
    clipper.finish()  # no rank has examples, but buffers are still synced
    return [buffer.clone() for buffer in net.buffers()]


def faults(rank: int, world: int) -> dict[str, str]:
    """Return what each rank hears of what goes wrong."""
    heard = {}
    batch = processes.batch(rank, 6, torch.float64)
    net = processes.Net(torch.float64)
    model = Ddp(net, find_unused_parameters=True)
    clipper = Clipper(model, 2, nonfinite="raise")
    bad = batch[0].clone()
    if rank == 1:
        bad[3] = torch.inf
    try:
        clipper.backward(processes.losses(model), (bad, batch[1]))
    except NonfiniteGradientError as error:
        heard["nonfinite"] = str(error)
    assert all(p.grad is None for p in net.parameters())
    clipper = Clipper(model, 2)
    clipper.step = 5 + rank
    try:
        clipper.backward(processes.losses(model), batch)
    except RuntimeError as error:
        heard["step"] = f"{type(error).__name__}: {error}"
    net = processes.Net(torch.float64)
    model = Ddp(net, find_unused_parameters=True)
    clipper = Clipper(model, 2, engine="stream")
    processes.losses(model)(batch).mean().backward()
    try:
        clipper.fold()
    except RuntimeError as error:
        heard["fold"] = str(error)
    net.zero_grad()
    with model.no_sync():
        processes.losses(model)(batch).mean().backward()
        clipper.fold()
    clipper.finish()
    heard["own backward"] = copy.deepcopy([p.grad for p in net.parameters()])
    clipper = Clipper(model, 2)
    bad = batch[0].clone()
    if rank == 1:
        bad[3] = torch.nan
    clipper.backward(processes.losses(model), (bad, batch[1]))
    heard["propagated"] = bool(net.head.weight.grad.isnan().all())
    return heard


def unread(rank: int, world: int) -> Any:
    """Train as on an accelerator, where nothing may be read on the host within a step."""
    multitensor.on_host = lambda tensor: False
    net = processes.Net(torch.float64)
    model = Ddp(net)
    clipper = Clipper(model, 2, engine="stream")
    sizes = (6, 3, 8, 1)  # the first of these steps agrees on how many there may be
    for turn in range(3):
        net.zero_grad()
        batch = processes.batch(rank, sizes[rank] if turn else 8, torch.float64)
        clipper.backward(processes.losses(model), batch)
    gradients = copy.deepcopy([p.grad for p in net.parameters()])
    net.zero_grad()  # a domain called 0 is a domain
    clipper.backward(processes.losses(model), batch, domains=unread_domains(sizes[rank]))
    of_domains = copy.deepcopy([p.grad for p in net.parameters()])
    net.zero_grad()  # a rank without examples has no domains either
    idle = processes.batch(rank, 0 if rank else sizes[rank], torch.float64)
    labels = None if rank else unread_domains(sizes[rank])
    clipper.backward(processes.losses(model), idle, domains=labels)
    of_first = copy.deepcopy([p.grad for p in net.parameters()])
    clipper.step += rank
    message = ""
    clipper.backward(processes.losses(model), batch)
    try:
        clipper.backward(processes.losses(model), batch)
    except RuntimeError as error:
        message = str(error)
    return gradients, of_domains, of_first, message


def unread_domains(size: int) -> list[int]:
    return [place % 2 for place in range(size)]


def others(rank: int, world: int) -> dict[str, Any]:
    """Return what comes of the rest; the last one changes the process."""
    return {f.__name__: f(rank, world) for f in (statistics, idle, faults, unread)}
