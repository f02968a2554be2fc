"""A communication hook for DistributedDataParallel: per-rank clipping with plain `loss.backward()`.

Independent of the Clipper; uses no engine.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from microclip import multitensor
from microclip.distributed.ranks import Ranks
from microclip.engines.losses import unscale
from microclip.engines.step_record import Policy, StepRecord
from microclip.microbatches import Microbatch
from microclip.outcome import Outcome
from microclip.rules import MinNorm, Nonfinite, Rule


class RankClip:
    """Makes each rank's gradient one micro-batch, inside DistributedDataParallel's reduction.

    >>> clip = RankClip(ddp)  # doctest: +SKIP
    >>> loss_fn(batch).backward()  # doctest: +SKIP

    With `no_sync()` on earlier sub-steps a rank's micro-batch is what it has accumulated. All
    ranks count the same, whatever the size of their batches, which the hook cannot see.

    Call `zero_grad()` before each step. DistributedDataParallel passes on what is in `.grad`, so
    the result of the last step would be clipped again, which raises an error.

    Args:
        ddp: The wrapped model. It must not have another communication hook.
        rule: How norms become weights; the default is `rules.MinNorm()`.
        nonfinite: What to do about a gradient with NaN or inf, as in `Clipper`.
        grad_scaler: The loss scaler of float16 training, so that norms are those of the unscaled
            loss.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        rule: Rule | None = None,
        nonfinite: Nonfinite = "propagate",
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                f"RankClip needs the DistributedDataParallel wrapper, but got {type(ddp).__name__}."
            )
        if ddp._comm_hooks:
            hook, _ = ddp._comm_hooks[0]
            raise RuntimeError(
                "The DistributedDataParallel wrapper has a communication hook already "
                f"({getattr(hook, '__name__', hook)}) and can only have one."
            )
        self.policy = Policy(MinNorm() if rule is None else rule, None, "mean", nonfinite)
        self.step = 0
        self.outcome: Outcome | None = None  # of the last step, on this rank
        self._ranks = Ranks(ddp.process_group, next(ddp.parameters()).device)
        self._scaler = grad_scaler
        self._failed = False
        self._waiting: list[tuple[Tensor, torch.futures.Future[Tensor]]] = []
        self._window = _Window(ddp)
        ddp.register_comm_hook(self, _take_bucket)
        ddp.register_forward_pre_hook(self._recover)

    def _recover(self, ddp: Any, inputs: Any) -> None:
        """Reset the wrapper after an interrupted backward pass, before the next one."""
        if self._failed:
            self._failed, self._waiting = False, []
            ddp.reducer._reset_state()

    def take(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Keep a bucket until all have arrived, since the norm needs the whole gradient."""
        buffer = bucket.buffer()
        devices: Any = None if multitensor.on_host(buffer) else [buffer.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self._waiting.append((buffer, future))
        if bucket.is_last():
            waiting, self._waiting = self._waiting, []
            self._failed = True
            self._window.close(self.step)
            self._reduce([buffer for buffer, _ in waiting])
            self._failed = False
            for buffer, done in waiting:
                done.set_result(buffer)
        return future

    @torch.no_grad()
    def _reduce(self, buffers: list[Tensor]) -> None:
        norm = unscale(multitensor.norm(buffers, self._ranks.device), self._scaler)
        record = StepRecord(self.policy, self.step, self._ranks)
        record.add(Microbatch(None, range(1), None, (self._ranks.rank,)), norm, None)
        self._ranks.describe(self.policy, self._scaler, {})
        record.sync_ranks()
        if record.leave_out():
            for buffer in buffers:
                buffer.zero_()
        multitensor.multiply_(buffers, record.coefficients().squeeze(0))
        works = [dist.all_reduce(b, group=self._ranks.group, async_op=True) for b in buffers]
        for work in works:
            if work is not None:
                work.wait()
        record.update_rule()
        self.outcome = record.outcome("hook", ())
        self.step += 1


class _Window:
    """The backward passes of one step: tracks whether `.grad` was empty before the first of them.

    Checks one parameter, before anything is added to its gradient. Values are read only if it has
    a gradient then, as after `zero_grad(set_to_none=False)`.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        trained = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
        self._parameter = max(trained, key=lambda parameter: parameter.numel())
        # whether it was empty at some point since the last step; None: no gradient since then
        self._is_clean: bool | None = None

        @torch.utils.hooks.unserializable_hook  # type: ignore[untyped-decorator]
        def before_adding(gradient: Tensor) -> None:
            self._look()

        self._parameter.register_hook(before_adding)  # type: ignore[no-untyped-call]

    def _look(self) -> None:
        if not self._is_clean:
            gradient = self._parameter.grad
            self._is_clean = gradient is None or not bool(gradient.any())

    def close(self, step: int) -> None:
        """End the window of a step; raise if `.grad` still held the result of the previous step."""
        is_clean, self._is_clean = self._is_clean, None
        if step and is_clean is False:
            raise RuntimeError(
                f"`.grad` held the clipped gradient of step {step - 1} when the backward pass of "
                f"step {step} began, so it would be clipped again together with the new one, which "
                "has been added to it. Call optimizer.zero_grad() before each step. To accumulate "
                "several backward passes into one step, do all but the last inside `with "
                "model.no_sync():`; to train on several losses, add them up."
            )


def _take_bucket(clip, bucket):  # type: ignore[no-untyped-def]
    """Call the RankClip; torch wants annotations to be classes, but does not export its own."""
    return clip.take(bucket)
