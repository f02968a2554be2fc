"""Gradient checkpointing inside a single pass: segments that run again in the backward pass.

A checkpointed segment saves nothing and runs again when the backward pass needs what it saved. It
must then save the same tensors in the same order, so the recorder has to watch it again, with the
same owners for its arguments. `Replay` does that in place of the function that torch calls. What a
segment does with parameters was recorded the first time, and is not counted again.

A reentrant segment (`use_reentrant=True`) runs without gradients at first. What it does with
parameters is recorded when it runs again and is differentiated on its own: `LateRun`.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from microclip.engines.base import CannotFuseError
from microclip.engines.single_pass.owners import DERIVED, Opaque, State
from microclip.engines.single_pass.torch_functions import HostReads, tensors_in, without_compiling

if TYPE_CHECKING:
    from microclip.engines.single_pass.recorder import Recorder

DIFFERENT = (
    "The single-pass engine cannot follow a checkpointed segment that saves other tensors when it "
    "runs again."
)
_PACK = "_checkpoint_hook.__init__.<locals>.pack_hook"
_FORWARD = torch_checkpoint.CheckpointFunction.forward.__code__
_CHECKPOINT = inspect.unwrap(torch_checkpoint.checkpoint).__code__


class _Again:
    """A segment with what is known of its arguments.

    Args:
        recorder: Watches it.
        run: What torch would call.
        arguments: The positional arguments of the first time.
    """

    def __init__(self, recorder: Recorder, run: Callable[..., Any], arguments: Any) -> None:
        self._recorder = recorder
        self._run = run
        # parameters themselves, since the recorder knows them by identity; of others, the state
        self._known: list[Tensor | State | None] = [
            tensor if recorder.is_recorded(tensor) else recorder.state(tensor)
            for tensor in arguments
            if isinstance(tensor, Tensor)
        ]

    def _restored(self, arguments: tuple[Any, ...]) -> list[Any]:
        """Return the arguments with what was known of them."""
        known = iter(self._known)
        return [self._one(each, next(known)) if isinstance(each, Tensor) else each
                for each in arguments]  # fmt: skip

    def _one(self, tensor: Tensor, known: Tensor | State | None) -> Tensor:
        if isinstance(known, Tensor):
            return known
        self._recorder.tracker.set(tensor, known)
        return tensor


class Replay(_Again):
    """Runs a segment again, watched by the recorder that watched it the first time."""

    def __init__(self, recorder: Recorder, segment: Any, arguments: Any) -> None:
        super().__init__(recorder, segment.recompute_fn, arguments)
        self._segment = weakref.ref(segment)  # which holds this

    def __call__(self, *arguments: Any) -> None:
        """Run the segment; what it returns does not matter."""
        try:
            with _replaying(self._recorder):
                self._run(*self._restored(arguments))
        finally:  # torch may stop it early
            segment = self._segment()
            if self._recorder.meter is not None and segment is not None:
                saved = (each.values() for each in segment.recomputed.values())
                self._recorder.meter.replay(chain.from_iterable(saved))


class LateRun(_Again):
    """Runs a reentrant segment with gradients, and records what it does."""

    def __call__(self, *arguments: Any) -> Any:
        """Run the segment; torch differentiates what it returns."""
        recorder = self._recorder
        saved = 0 if recorder.meter is None else recorder.meter.saved
        # the forward pass knew no parameters here, so it made no assumptions, either
        recorder.adopts, before = False, recorder.adopts
        try:
            with _watching(recorder), recorder.metered(recorder.meter):
                results = self._run(*self._restored(arguments))
                self._refuse_opaque(results)
                return results
        finally:
            recorder.adopts = before
            if recorder.meter is not None:  # not saved by the forward pass
                recorder.meter.saved = saved

    def _refuse_opaque(self, results: Any) -> None:
        """Make sure that owners are known of everything that is about to be differentiated."""
        for tensor in tensors_in(results):
            state = self._recorder.state(tensor)
            if tensor.requires_grad and isinstance(state, Opaque):
                raise CannotFuseError(
                    "The single-pass engine cannot tell which example owns what in a reentrant "
                    f"checkpoint: it returns the result of {state.reason}."
                )


def is_segment(recorder: Recorder, hooks: tuple[Any, Any]) -> bool:
    """Whether hooks on saved tensors are those of a checkpointed segment; if so, prepare for it."""
    pack = hooks[0]
    if (
        getattr(pack, "__qualname__", "") != _PACK
        or pack.__module__ != torch_checkpoint.__name__
        or "frame" not in pack.__code__.co_freevars
    ):
        return False
    segment = pack.__closure__[pack.__code__.co_freevars.index("frame")].cell_contents
    if not isinstance(segment.recompute_fn, Replay):
        arguments = _arguments_of(segment)
        segment.recompute_fn = Replay(recorder, segment, arguments)
        recorder.has_segments = True
    return True


def _arguments_of(segment: Any) -> tuple[Any, ...]:
    """Return the positional arguments of the call of checkpoint() that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CHECKPOINT:
            generator = frame.f_locals["gen"].gi_frame
            if generator is not None and generator.f_locals.get("new_frame") is segment:
                found: tuple[Any, ...] = frame.f_locals["args"]
                return found
        frame = frame.f_back
    raise CannotFuseError(
        "The single-pass engine can look inside gradient checkpointing only where it is started by "
        "torch.utils.checkpoint.checkpoint()."
    )


def prepare_reentrant(recorder: Recorder) -> None:
    """Prepare for all reentrant segments that are running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FORWARD:
            segment = frame.f_locals["ctx"]
            run = getattr(segment, "run_function", None)  # not set yet where arguments are checked
            if run is not None and not isinstance(run, LateRun):
                arguments = frame.f_locals["args"]
                if any(recorder.state(each) is DERIVED for each in arguments):
                    raise CannotFuseError(
                        "The single-pass engine cannot follow a tensor made of parameters alone "
                        "into a reentrant checkpoint. Make it inside, or pass use_reentrant=False."
                    )
                segment.run_function = LateRun(recorder, run, arguments)
                recorder.has_segments = recorder.has_late_segments = True
        frame = frame.f_back


@contextmanager
def _watching(recorder: Recorder) -> Iterator[None]:
    """Track owners and record parameters inside the block."""
    with ExitStack() as stack:
        stack.callback(setattr, recorder, "is_final", recorder.is_final)
        recorder.is_final = False  # not for gradients taken inside
        stack.enter_context(without_compiling())
        # a gradient taken inside the forward pass finds one or both of them running
        if recorder.tracker not in _get_current_dispatch_mode_stack():
            stack.enter_context(recorder.tracker)
        if recorder not in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            stack.enter_context(recorder)
        yield


@contextmanager
def _replaying(recorder: Recorder) -> Iterator[None]:
    """Watch a segment that runs again, and leave no trace of it in the recorder."""
    tracker = recorder.tracker
    kept = recorder.weights, recorder.reads, recorder.reads_of_several, recorder.is_replaying
    trail, derived = tracker.trail, set(tracker.derived)
    recorder.weights, recorder.reads, recorder.is_replaying = {}, HostReads(), True
    tracker.trail = set()
    try:
        with _watching(recorder):
            yield
    finally:
        recorder.weights, recorder.reads, recorder.reads_of_several, recorder.is_replaying = kept
        tracker.trail = trail
        for key in tracker.derived.keys() - derived:
            del tracker.derived[key]


def saved_as_usual() -> AbstractContextManager[None]:
    """Save tensors made of parameters alone as if there were no segment around them."""
    return torch.autograd.graph.saved_tensors_hooks(_detached, _as_it_is)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach()  # else a result that is saved would hold itself


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
