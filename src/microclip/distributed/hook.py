"""A communication hook: per-rank clipping for those who keep their own `loss.backward()`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from microclip import multitensor
from microclip.distributed.ranks import Ranks
from microclip.engines.tally import Policy, Tally
from microclip.microbatches import Microbatch
from microclip.outcome import Outcome
from microclip.rules import MinNorm, Nonfinite, Rule


class RankClip:
    """Makes each rank's gradient one micro-batch, inside DistributedDataParallel's own reduction.

    >>> clip = RankClip(ddp)  # doctest: +SKIP
    >>> loss_fn(batch).backward()  # doctest: +SKIP

    With `no_sync()` on earlier sub-steps a rank's micro-batch is what it has accumulated. All
    ranks count alike, whatever the size of their batches: the hook cannot see it.

    Args:
        ddp: The wrapped model. It must not have another communication hook.
        rule: How norms become weights; the default is `rules.MinNorm()`.
        nonfinite: What to do about a gradient with NaN or inf, as in `Clipper`.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        rule: Rule | None = None,
        nonfinite: Nonfinite = "propagate",
    ) -> None:
        self.policy = Policy(MinNorm() if rule is None else rule, None, "mean", nonfinite)
        self.step = 0
        self.outcome: Outcome | None = None  # of the last step, on this rank
        self._ranks = Ranks(ddp.process_group, next(ddp.parameters()).device)
        self._waiting: list[tuple[Tensor, torch.futures.Future[Tensor]]] = []
        ddp.register_comm_hook(self, _take_bucket)

    def take(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Keep a bucket until all are there, since the norm needs the whole gradient."""
        buffer = bucket.buffer()
        devices: Any = None if multitensor.on_host(buffer) else [buffer.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self._waiting.append((buffer, future))
        if bucket.is_last():
            waiting, self._waiting = self._waiting, []
            self._reduce([buffer for buffer, _ in waiting])
            for buffer, done in waiting:
                done.set_result(buffer)
        return future

    @torch.no_grad()
    def _reduce(self, buffers: list[Tensor]) -> None:
        norm = multitensor.norm(buffers, self._ranks.device)
        tally = Tally(self.policy, self.step, self._ranks)
        tally.add(Microbatch(None, range(1), None, (self._ranks.rank,)), norm, None)
        tally.settle()
        if tally.leave_out():
            for buffer in buffers:
                buffer.zero_()
        multitensor.multiply_(buffers, tally.coefficients().squeeze(0))
        works = [dist.all_reduce(b, group=self._ranks.group, async_op=True) for b in buffers]
        for work in works:
            if work is not None:
                work.wait()
        self.outcome = tally.outcome("hook", ())
        self.step += 1


def _take_bucket(clip, bucket):  # type: ignore[no-untyped-def]
    """Stand between; annotations would have to be classes, and those of torch have no names."""
    return clip.take(bucket)
