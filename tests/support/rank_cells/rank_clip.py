"""Cells: the communication hook `RankClip`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as Ddp

from microclip import rules
from microclip.distributed import RankClip

from rank_cells.base import Net, batch, cases, cell, grads, losses


@cases("", "gradient_as_bucket_view", "static_graph")
def rank_clip(rank: int, option: str) -> Any:
    net = Net()
    model = Ddp(net, bucket_cap_mb=1, **({option: True} if option else {}))
    RankClip(model)
    for _ in range(3):
        net.zero_grad()
        losses(model)(batch(rank, 6)).mean().backward()
    return grads(net)


@cases("one rank", "all ranks")
def rank_clip_zero(rank: int, which: str) -> Any:
    net = Net()
    model = Ddp(net)
    clip = RankClip(model)
    scale = 0.0 if rank == 1 or which == "all ranks" else 1.0
    (losses(model)(batch(rank)).mean() * scale).backward()
    return grads(net), clip.outcome.weights.tolist()


@cell
def rank_clip_twice(rank: int) -> Any:
    model = Ddp(Net())
    RankClip(model)
    RankClip(model)


@cell
def rank_clip_and_another(rank: int) -> Any:
    model = Ddp(Net())
    model.register_comm_hook(None, fp16_compress_hook)
    RankClip(model)


@cell
def rank_clip_scaled(rank: int) -> Any:
    """A fixed bound is one of the loss that was not scaled."""
    net = Net()
    model = Ddp(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    RankClip(model, rules.Fixed(0.1), grad_scaler=scaler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    scaler.scale(losses(model)(batch(rank)).mean()).backward()
    scaler.unscale_(optimizer)
    return grads(net)


@cell
def rank_clip_plain(rank: int) -> Any:
    RankClip(Net())


@cell
def rank_clip_raise(rank: int) -> Any:
    net = Net()
    model = Ddp(net)
    clip = RankClip(model, nonfinite="raise")
    x, y = batch(rank)
    if rank == 1:
        x[0] = torch.nan
    try:
        losses(model)((x, y)).mean().backward()
    except Exception as error:
        heard = f"{type(error).__name__}: {error}"
    net.zero_grad()
    losses(model)(batch(rank)).mean().backward()  # the next step is a step
    return heard, grads(net), clip.step


@cell
def rank_clip_differs(rank: int) -> Any:
    net = Net()
    model = Ddp(net)
    RankClip(model, (rules.MinNorm(), rules.Unit())[rank])
    losses(model)(batch(rank)).mean().backward()


@cell
def rank_clip_accumulates(rank: int) -> Any:
    net = Net()
    model = Ddp(net)
    RankClip(model)
    x, y = batch(rank)
    with model.no_sync():
        (losses(model)((x[:4], y[:4])).sum() / 6).backward()
    (losses(model)((x[4:], y[4:])).sum() / 6).backward()
    return grads(net)


@cases("", "gradient_as_bucket_view", "static_graph", "no_sync", "scaled down")
def rank_clip_left_over(rank: int, how: str) -> Any:
    """The result of one step is in `.grad` when the next one begins; then the loop is mended."""
    net = Net()
    model = Ddp(net, **({how: True} if how in ("gradient_as_bucket_view", "static_graph") else {}))
    clip = RankClip(model)
    heard = ""
    losses(model)(batch(rank, turn=1)).mean().backward()
    try:
        if how == "no_sync":
            with model.no_sync():
                losses(model)(batch(rank, turn=2)).mean().backward()
        if how == "scaled down":
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        losses(model)(batch(rank, turn=3)).mean().backward()
    except RuntimeError as error:
        heard = str(error)
    net.zero_grad()
    losses(model)(batch(rank)).mean().backward()
    return heard, grads(net), clip.step


@cases("to none", "to zeros", "late", "windows", "windows of zeros", "bucket views", "evaluated")
def rank_clip_emptied(rank: int, how: str) -> Any:
    """Steps that are no mistakes."""
    net = Net()
    model = Ddp(net, gradient_as_bucket_view=how == "bucket views")
    RankClip(model)
    x, y = batch(rank)
    for _ in range(3):
        if how == "evaluated":
            model(x)  # with gradients on, and never differentiated
        if how != "late":
            net.zero_grad(set_to_none="zeros" not in how and how != "bucket views")
        if "windows" in how:
            with model.no_sync():
                for rows in (slice(0, 2), slice(2, 4)):
                    (losses(model)((x[rows], y[rows])).sum() / 6).backward()
            loss = losses(model)((x[4:], y[4:])).sum() / 6
        else:
            loss = losses(model)((x, y)).mean()
        if how == "late":
            net.zero_grad()
        loss.backward()
    return grads(net)


@cell
def rank_clip_unused(rank: int) -> Any:
    net = Net()
    model = Ddp(net, find_unused_parameters=True)
    RankClip(model)
    for _ in range(2):
        net.zero_grad()
        if rank == 1:  # the head is not used
            net.forward = lambda x: torch.tanh(net.body(x))
        model(batch(rank)[0])[:, :3].square().mean().backward()
    return grads(net)
