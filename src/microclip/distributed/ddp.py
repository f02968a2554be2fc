"""DistributedDataParallel: keep it from averaging gradients before they are clipped.

Finding wrappers is left to `microclip.wrappers`, exchanging norms and gradients to `ranks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from microclip.distributed.ranks import Ranks
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
