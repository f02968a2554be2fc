"""Detects what the Clipper's model does not show: wrappers further out, losses that communicate.

The model may be wrapped further out, sharded late, or not wrapped at all although there are several
ranks. And `loss_fn` itself may communicate (all-reduced sums, gathered embeddings, SyncBatchNorm):
then every rank must call it equally often, or they wait for each other forever. So there are no
trials and no checks, which each rank would make on its own; ranks go micro-batch by micro-batch and
check beforehand that they have the same number. Nothing here communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from microclip.engines.gradients import LossFn, communicates
from microclip.engines.snapshot import SideEffects, Snapshot
from microclip.user_warnings import warn
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
            warn(
                f"There are {world_size()} ranks, but the model is not wrapped, so each rank clips "
                "its own micro-batches to its own bound, and the models drift apart unless you "
                "average `.grad` yourself. For one mini-batch over all ranks, use "
                "Clipper(DistributedDataParallel(model)) or fully_shard(model).",
                RuntimeWarning,
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


class LossCommunication:
    """Detects whether `loss_fn` communicates, on its first call."""

    def __init__(self, model: nn.Module) -> None:
        self.found = ""  # the first operation that would have communicated
        self._model = model
        self._known: set[Any] = set()

    def run(self, fold: Callable[[LossFn], None], loss_fn: LossFn) -> bool:
        """Fold unless `loss_fn` communicates; return whether it was done.

        If not, nothing was sent, and buffers and random states are restored.
        """
        if self.found:
            return False
        function: Any = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
        kind = (getattr(function, "__code__", type(function)), self._model.training)
        if kind in self._known:
            fold(loss_fn)
            return True
        watched = _Watched(loss_fn, self._model)
        try:
            fold(watched)
        except _CommunicatesError as error:
            self.found = str(error)
            watched.undo()
            return False
        self._known.add(kind)
        return True


class _CommunicatesError(BaseException):
    """Something is about to be sent; a BaseException, so that it is not handled as a failure."""


class _Watched:
    """A loss function whose first call is monitored."""

    def __init__(self, loss_fn: LossFn, model: nn.Module) -> None:
        self.__wrapped__ = loss_fn  # so that it is recognized as the same loss function
        self._model = model
        self._before: Snapshot | None = None
        self._error: RuntimeError | None = None

    def __call__(self, batch: Any) -> Tensor:
        if self._error is not None:  # also when the call is retried
            raise self._error
        if self._before is not None:
            return self.__wrapped__(batch)
        self._before = SideEffects(self._model).snapshot(self.__wrapped__)
        handle = register_module_forward_pre_hook(self._refuse_unknown_wrapper)
        try:
            with _without_compiling(), _Interception():  # type: ignore[no-untyped-call]
                return self.__wrapped__(batch)
        finally:
            handle.remove()

    def _refuse_unknown_wrapper(self, module: nn.Module, inputs: Any) -> None:
        """Refuse a DDP wrapper outside the Clipper's model, which would average gradients."""
        if (
            isinstance(module, DistributedDataParallel)
            and torch.is_grad_enabled()
            and module.require_backward_grad_sync
            and any(parameter.requires_grad for parameter in module.parameters())
        ):
            mine = {id(parameter) for parameter in self._model.parameters()}
            inside = any(id(parameter) in mine for parameter in module.parameters())
            self._error = inner_model_error() if inside else _unknown_wrapper_error(module)
            raise self._error

    def undo(self) -> None:
        """Undo the effects of an interrupted call."""
        if self._before is not None:
            self._before.restore()


def _without_compiling() -> AbstractContextManager[Any]:
    """Run compiled functions eagerly: compiled, they would hide what they call."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def _unknown_wrapper_error(wrapper: DistributedDataParallel) -> RuntimeError:
    return RuntimeError(
        "loss_fn calls a DistributedDataParallel wrapper that the Clipper does not know, around a "
        f"{type(wrapper.module).__name__}, which averages gradients over ranks in every "
        "micro-batch. If it is trained, make the Clipper with it, as in Clipper(ModuleList([model, "
        "other])); if not, call it under torch.no_grad() or without its wrapper."
    )


class _Interception(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops before anything is sent."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # avoids importing the compiler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if communicates(func):
            raise _CommunicatesError(func._schema.name)
        return func(*args, **(kwargs or {}))
