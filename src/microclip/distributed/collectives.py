"""Losses that communicate with other ranks: all-reduced sums, gathered embeddings, SyncBatchNorm.

Every rank must then call `loss_fn` equally often, or they wait for each other forever. So there are
no trials and no checks, which each rank would make on its own; ranks go micro-batch by micro-batch
and check beforehand that they have the same number. This module only detects such losses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from microclip.distributed.outer_wrapper import inner_model_error
from microclip.engines.losses import LossFn, communicates
from microclip.engines.snapshot import Memory, Snapshot


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
        self._before = Memory(self._model).snapshot(self.__wrapped__)
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
