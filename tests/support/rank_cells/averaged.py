"""Cells: gradients that were averaged, or are about to be, and communication hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as Ddp

from microclip import Clipper
from microclip.distributed import RankClip

from rank_cells.base import Net, batch, cases, cell, grads, losses


@cases("fold", "evaluation", "backward", "loss", "local")
def averaged_before_fold(rank: int, which: str) -> Any:
    """A synchronised backward pass, and only fold() in no_sync."""
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, engine="stream")
    loss = losses(model)(batch(rank)).mean()
    if which != "backward":
        loss.backward()
    if which == "evaluation":
        with torch.no_grad():
            model(batch(rank)[0])
    with clipper.local() if which == "local" else model.no_sync():
        if which == "backward":
            loss.backward()
        clipper.fold(loss=loss if which == "loss" else None)


@cases("stream", "two_pass", "fused", "auto", "own", "own module")
def evaluated_with_gradients(rank: int, engine: str) -> Any:
    """A forward pass without a backward pass leaves the wrapper waiting to average."""
    net = Net()
    model = Ddp(net)
    own = engine.startswith("own")
    clipper = Clipper(model, 6 if own else 2, engine="stream" if own else engine)
    model(batch(rank, turn=1)[0])
    if own:
        with model.no_sync():
            losses(net if engine == "own module" else model)(batch(rank)).mean().backward()
            clipper.fold()
        clipper.finish()
    else:
        clipper.backward(losses(model), batch(rank))
    return grads(net)


@cell
def evaluated_with_gradients_between_chunks(rank: int) -> Any:
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, 2)
    x, y = batch(rank)
    clipper.fold(losses(model), (x[:4], y[:4]))
    model(x)
    clipper.fold(losses(model), (x[4:], y[4:]))
    clipper.finish()
    return grads(net)


@cases("", "static_graph", "gradient_as_bucket_view", "find_unused_parameters")
def plain_and_clipped_steps(rank: int, option: str) -> Any:
    """Both kinds of steps in turn; the second rank has nothing in one of the clipped ones."""
    net = Net()
    model = Ddp(net, bucket_cap_mb=1, **({option: True} if option else {}))
    found = []
    clipper = None
    for turn in range(4):
        for clipped in (False, True):
            net.zero_grad()
            if clipped:
                clipper = clipper or Clipper(model, 2)
                size = 0 if turn == 1 and rank == 1 else 6
                clipper.backward(losses(model), batch(rank, size))
            else:
                losses(model)(batch(rank)).mean().backward()
            found.append(grads(net))
    return found


# communication hooks


@cases("before", "after", "power", "builtin", "builtin after", "rank clip", "rank clip after")
def hooked(rank: int, when: str) -> Any:
    net = Net()
    model = Ddp(net)
    hook: Any = lambda: model.register_comm_hook(None, fp16_compress_hook)  # noqa: E731
    if when == "power":
        state = PowerSGDState(process_group=None, matrix_approximation_rank=1)
        hook = lambda: model.register_comm_hook(state, powerSGD_hook)  # noqa: E731
    elif when.startswith("builtin"):
        hook = lambda: model._register_builtin_comm_hook(  # noqa: E731
            dist.BuiltinCommHookType.FP16_COMPRESS
        )
    elif when.startswith("rank clip"):
        hook = lambda: RankClip(model)  # noqa: E731
    if "after" not in when:
        hook()
    clipper = Clipper(model, 2)
    if when == "after":
        clipper.backward(losses(model), batch(rank))
        net.zero_grad()
    hook()
    try:
        clipper.backward(losses(model), batch(rank))
    finally:
        assert grads(net) == [None] * 4


@cell
def ignored_parameter(rank: int) -> Any:
    net = Net()
    Ddp._set_params_and_buffers_to_ignore_for_model(net, ["head.weight"])
    Clipper(Ddp(net))


@cell
def ignored_and_frozen(rank: int) -> Any:
    net = Net()
    net.head.requires_grad_(False)
    Ddp._set_params_and_buffers_to_ignore_for_model(net, ["head.weight", "head.bias"])
    model = Ddp(net)
    Clipper(model, 2).backward(losses(model), batch(rank))
    return grads(net)[:2]


@cell
def joined(rank: int) -> Any:
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, 2)
    with model.join():
        clipper.backward(losses(model), batch(rank))


@cell
def delayed(rank: int) -> Any:
    net = Net()
    named = [(n, p) for n, p in net.named_parameters() if n.startswith("body")]
    Clipper(Ddp(net, delay_all_reduce_named_params=named, param_to_hook_all_reduce=net.head.weight))
