"""Ranks that a Clipper was not told of: a wrapper around its model, or none at all."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from microclip.engines.gradients import modules_of


def ranks_around() -> int:
    """Return how many processes there are in all."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Outside:
    """Notices a DistributedDataParallel that the model is called by, but does not contain."""

    def __init__(self, model: nn.Module) -> None:
        self._watch = _Watch.over(list(_callable(model)))
        self._warned = False

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Inside the block, such a wrapper is an error before it does any harm."""
        self._watch.refuses = True
        try:
            yield
        finally:
            self._watch.refuses = False

    def expect_none(self) -> None:
        """Check that no wrapper outside the model has averaged the gradients in `.grad`."""
        seen, self._watch.seen = self._watch.seen, False
        if seen:
            raise inside_error()

    def warn_of_replicas(self) -> None:
        """Say, once, that every rank clips alone."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"There are {ranks_around()} ranks, but the model is not wrapped, so each clips "
                "its own micro-batches to a bound of its own, and the models drift apart unless "
                "you average `.grad` yourself. For one mini-batch over all ranks, use "
                "Clipper(DistributedDataParallel(model)) or fully_shard(model).",
                RuntimeWarning,
                stacklevel=4,
            )


class _Watch:
    """A hook; it knows nothing of the Clipper, so that models can be copied and saved with it."""

    def __init__(self) -> None:
        self.refuses = False
        self.seen = False

    @classmethod
    def over(cls, modules: list[nn.Module]) -> _Watch:
        """Return the one of some modules, which all their Clippers share."""
        hooks = [hook for module in modules for hook in module._forward_pre_hooks.values()]
        found = next((hook for hook in hooks if isinstance(hook, cls)), cls())
        for module in modules:
            if found not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(found)
        return found

    def __call__(self, module: Any, inputs: Any) -> None:
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is None or wrapper is module:
            return
        if torch.is_grad_enabled() and wrapper.require_backward_grad_sync:
            if self.refuses:
                raise inside_error()
            self.seen = True


def inside_error() -> RuntimeError:
    """Return what to say of a Clipper that was made with what is inside of a wrapper."""
    return RuntimeError(
        "The model that is clipped is called by a DistributedDataParallel wrapper that the Clipper "
        "does not know, which averages gradients over ranks before they can be clipped. Make the "
        "Clipper with the wrapper, Clipper(ddp), not with what is inside of it."
    )


def refuse_other_wrappers(model: nn.Module) -> None:
    """Refuse wrappers that spread a gradient over ranks in a way that cannot be followed."""
    for module in modules_of(model):
        kind = type(module)
        if kind.__name__ == "FullyShardedDataParallel" and kind.__module__.startswith("torch"):
            raise NotImplementedError(
                "The model is wrapped with FullyShardedDataParallel (FSDP1), which reduces "
                "gradients before they can be clipped. Use fully_shard(model) (FSDP2)."
            )
        if kind.__module__.partition(".")[0] == "deepspeed" and kind.__name__.endswith("Engine"):
            raise NotImplementedError(
                f"The model is wrapped with DeepSpeed's {kind.__name__}, which reduces gradients "
                "before they can be clipped. Use DistributedDataParallel or fully_shard(model)."
            )


def _callable(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model, or what lies in a container that is never called itself."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        for child in model.children():
            yield from _callable(child)
    else:
        yield model
