"""Several ranks, but the Clipper's model does not show it: wrapped further out, or not at all.

Looks at the model and at what calls it; communicates with no rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from microclip.wrappers import is_shard, sharded_modules, world_size


class OuterWrapper:
    """Detects a DistributedDataParallel wrapper that calls the model but is not part of it."""

    def __init__(self, model: nn.Module) -> None:
        self._watch = _Watch.over(list(_callable(model)))
        self._warned = False

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Inside the block, such a wrapper raises before it averages anything."""
        self._watch.refuses = True
        try:
            yield
        finally:
            self._watch.refuses = False

    def expect_none(self) -> None:
        """Check that no wrapper outside the model has averaged the gradients in `.grad`."""
        seen, self._watch.seen = self._watch.seen, False
        if seen:
            raise inner_model_error()

    def warn_unwrapped(self) -> None:
        """Warn, once, that every rank clips on its own."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"There are {world_size()} ranks, but the model is not wrapped, so each rank clips "
                "its own micro-batches to its own bound, and the models drift apart unless you "
                "average `.grad` yourself. For one mini-batch over all ranks, use "
                "Clipper(DistributedDataParallel(model)) or fully_shard(model).",
                RuntimeWarning,
                stacklevel=4,
            )


class _Watch:
    """A forward hook that does not hold the Clipper, so models can be copied and saved with it."""

    def __init__(self) -> None:
        self.refuses = False
        self.seen = False

    @classmethod
    def over(cls, modules: list[nn.Module]) -> _Watch:
        """Return the hook of these modules, which all their Clippers share."""
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
                raise inner_model_error()
            self.seen = True


def inner_model_error() -> RuntimeError:
    """Return the error for a Clipper that was made with the model inside a wrapper."""
    return RuntimeError(
        "The clipped model is called by a DistributedDataParallel wrapper that the Clipper does "
        "not know, which averages gradients over ranks before they can be clipped. Make the "
        "Clipper with the wrapper, Clipper(ddp), not with the model inside it."
    )


def refuse_late_sharding(model: nn.Module) -> None:
    """Refuse a model that was sharded after its Clipper was made, or as part of a larger one."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    first = next(model.parameters(), None)
    if (first is not None and is_shard(first)) or sharded_modules(model):
        raise RuntimeError(
            f"{type(model).__name__} is sharded, but the Clipper does not know how: fully_shard() "
            "was called after the Clipper was made, or on a larger model that contains this one. "
            "Make the Clipper with the whole model, after fully_shard()."
        )


def _callable(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model, or the members of a container that is never called itself."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        for child in model.children():
            yield from _callable(child)
    else:
        yield model
