"""DistributedDataParallel: clipping before it averages gradients over ranks, in one of two ways.

`Ddp` keeps the wrappers of a Clipper's model from averaging before a step is clipped. `RankClip` is
a communication hook that makes each rank's gradient one micro-batch, with plain `loss.backward()`;
it needs no Clipper and no engine. Finding wrappers is left to `microclip.wrappers`, exchanging
norms and gradients to `ranks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from microclip import multitensor
from microclip.distributed.ranks import Ranks
from microclip.engines.gradients import unscale
from microclip.engines.step_record import Policy, StepRecord
from microclip.microbatches import Microbatch
from microclip.outcome import Outcome
from microclip.rules import MinNorm, Nonfinite, Rule
from microclip.wrappers import ddp_wrappers


class Ddp:
    """The wrappers of a model that is wrapped, or has wrapped parts.

    All trained parameters are reduced over the ranks, including those outside the wrappers.
    """

    def __init__(self, model: nn.Module, wrappers: list[DistributedDataParallel]) -> None:
        self._wrappers = wrappers
        self._forwards = [_Forwards.of(wrapper) for wrapper in wrappers]
        groups = {tuple(dist.get_process_group_ranks(w.process_group)) for w in wrappers}
        if len(groups) > 1:
            shown = " and ".join(str(list(group)) for group in sorted(groups))
            raise NotImplementedError(
                "The model has several DistributedDataParallel wrappers for different ranks "
                f"({shown}), so they do not share one mini-batch. Use one process group for all."
            )
        device = next(p for p in model.parameters() if p.requires_grad).device
        self.ranks = Ranks(wrappers[0].process_group, device)
        self._begun: int | None = None  # the step that this rank has begun and not ended
        self._is_new = True
        self.check()
        for wrapper in wrappers:
            _refuse_builtin_hook(wrapper)

    @classmethod
    def find(cls, model: nn.Module) -> Ddp | None:
        """Return it for a model with wrappers, compiled or nested; None without."""
        wrappers = ddp_wrappers(model)
        return cls(model, wrappers) if wrappers else None

    def check(self) -> None:
        """Refuse wrappers that do more to gradients than average them."""
        for wrapper in self._wrappers:
            _refuse(wrapper)

    def begin(self, step: int) -> None:
        """Start a step on every rank; a retried step is started only once."""
        self.check()
        if step == self._begun:
            return  # ranks that did not fail are already waiting for norms, and for nothing else
        if self._is_new:
            for wrapper in self._wrappers:
                _refuse_builtin_hook(wrapper)
        self._begun, self._is_new = step, False
        for wrapper, forwards in zip(self._wrappers, self._forwards, strict=True):
            forwards.forget(wrapper)  # on ranks without examples too
        self._align_buffers()

    def end(self) -> None:
        """Note that all ranks have exchanged norms: the next step is a new one."""
        self._begun = None

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside the block, gradients stay on their rank."""
        before = [(w, w.require_backward_grad_sync, w.static_graph) for w in self._wrappers]
        for wrapper, forwards in zip(self._wrappers, self._forwards, strict=True):
            forwards.forget(wrapper)
            wrapper.require_backward_grad_sync = False  # all that its own no_sync() does
            wrapper.static_graph = False  # otherwise the first backward pass would still reduce
            wrapper.require_forward_param_sync = False  # ranks without examples do not take part
        try:
            yield
        finally:
            for wrapper, sync, static in before:
                wrapper.require_backward_grad_sync, wrapper.static_graph = sync, static
                wrapper.require_forward_param_sync = True  # sync buffers in the next forward

    def expect_local(self) -> None:
        """Check that `.grad` holds the gradients of this rank alone."""
        for wrapper, forwards in zip(self._wrappers, self._forwards, strict=True):
            if wrapper.require_backward_grad_sync:
                raise RuntimeError(
                    "DistributedDataParallel averages gradients over ranks before fold() sees "
                    "them. Call loss.backward() and fold() inside `with model.no_sync():`, or use "
                    "microclip.distributed.RankClip."
                )
            if forwards.averaged:
                raise RuntimeError(
                    "fold() was called inside no_sync(), but the model's last forward pass was "
                    "outside of it, so DistributedDataParallel has averaged the gradients over "
                    "ranks before fold() sees them. Call the model, loss.backward() and fold() "
                    "inside one `with model.no_sync():`."
                )

    @torch.no_grad()
    def _align_buffers(self) -> None:
        """Copy the first rank's buffers to every rank, as wrappers do at the start of a step."""
        for wrapper in self._wrappers:
            ignored = wrapper.parameters_to_ignore
            named = wrapper.module.named_buffers()
            buffers = [buffer for name, buffer in named if name not in ignored]
            if buffers and wrapper.broadcast_buffers:
                self.ranks.copy_from_first(buffers)


class _Forwards:
    """Tracks whether a wrapper averages the gradients of its last forward pass.

    After such a forward pass it expects to average until it has done so, even if the backward pass
    never comes (an evaluation with gradients on) and the next one is inside no_sync().
    """

    def __init__(self, averaged: bool) -> None:
        self.averaged = averaged
        self._expects = averaged  # whether the wrapper may still average

    @classmethod
    def of(cls, wrapper: DistributedDataParallel) -> _Forwards:
        """Return the tracker of a wrapper, which all its Clippers share."""
        for hook in wrapper._forward_pre_hooks.values():
            if isinstance(hook, _Forwards):
                return hook
        found = cls(getattr(wrapper, "_lazy_init_ran", True))  # after a forward pass: unknown
        wrapper.register_forward_pre_hook(found)
        return found

    def __call__(self, wrapper: Any, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self.averaged = bool(wrapper.require_backward_grad_sync)
        if self.averaged:
            self._expects = True
        else:
            self.forget(wrapper)

    def forget(self, wrapper: Any) -> None:
        """Reset the wrapper so that it no longer expects to average."""
        if self._expects:
            self._expects = False
            wrapper.reducer._reset_state()


def _refuse(wrapper: DistributedDataParallel) -> None:
    """Refuse settings that clipping would bypass or break; cheap enough for every step."""
    if wrapper._comm_hooks:
        hook, state = wrapper._comm_hooks[0]
        owner = type(state).__name__ if state is not None else None
        _refuse_hook("RankClip" if owner == "RankClip" else getattr(hook, "__name__", repr(hook)))
    if wrapper._join_config.enable:
        raise NotImplementedError(
            "Inside `with model.join():` every forward pass communicates with the other ranks. "
            "Leave join() out: ranks may have different numbers of examples, and one that has none "
            "left calls finish()."
        )
    if wrapper.mixed_precision is not None:
        raise NotImplementedError(
            "DistributedDataParallel(mixed_precision=...) trains copies of the parameters, whose "
            "gradients cannot be clipped. Use torch.autocast instead."
        )
    if getattr(wrapper, "_delay_all_reduce_params", None):
        raise NotImplementedError(
            "DistributedDataParallel(delay_all_reduce_named_params=...) averages some gradients "
            "separately, before they can be clipped. Leave it out."
        )
    if wrapper.parameters_to_ignore:
        for name, parameter in wrapper.module.named_parameters():
            if parameter.requires_grad and name in wrapper.parameters_to_ignore:
                raise NotImplementedError(
                    f"DistributedDataParallel was told to ignore parameter {name!r}, but it is "
                    "trained, by each rank on its own, so it has no common gradient to clip. "
                    "Freeze it, or do not ignore it."
                )


def _refuse_builtin_hook(wrapper: DistributedDataParallel) -> None:
    """Refuse communication hooks that only the wrapper's logger knows about."""
    if wrapper.logger is None:
        return
    name = wrapper.logger._get_ddp_logging_data().strs_map.get("comm_hook")
    if name:
        _refuse_hook(name)


def _refuse_hook(name: str) -> None:
    remedy = (
        "Use either RankClip or Clipper."
        if name == "RankClip"
        else "Leave the hook out, or use it without a Clipper."
    )
    raise NotImplementedError(
        f"The DistributedDataParallel wrapper has a communication hook ({name}), which a Clipper "
        f"would bypass: it reduces clipped gradients itself. {remedy}"
    )


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
