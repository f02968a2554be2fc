"""The trial of "auto": on a real batch, check whether the single-pass engine is exact and faster.

Kept apart from `select` because it imports the single-pass engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch import nn

from microclip.engines.base import CannotFuseError, Engine, MeanLossError
from microclip.engines.dropout import DropoutDisabled
from microclip.engines.gradients import Gradients
from microclip.engines.losses import LossFn
from microclip.engines.single_pass.engine import Fused
from microclip.engines.single_pass.verify import AutocastWatch, Comparison
from microclip.engines.snapshot import Memory, Snapshot
from microclip.engines.step_record import Policy, StepRecord
from microclip.engines.stream import Stream
from microclip.engines.two_pass import TwoPass
from microclip.microbatches import MicrobatchList

NOT_FINITE = "The first gradients are not finite, so nothing could be compared yet."
ROUNDS = 3  # the first warms up, the others count
MORE_ROUNDS = 6  # while the race is close:
CLOSE = 1.3  # one is at most this much faster,
PATIENCE = 20.0  # and no more than this many seconds have passed


@dataclass(frozen=True)
class EngineReport:
    """Which engine `engine="auto"` uses, and why."""

    engine: str
    reason: str
    seconds: dict[str, float] = field(default_factory=dict)  # per step, by engine
    error: float | None = None  # of the single-pass gradient, relative to the other's norm
    suspect: str | None = None  # the parameter with the largest error, if too large
    refused: bool = False  # whether the model does something that a single pass cannot handle


def reliable(policy: Policy) -> type[Engine]:
    """Return the engine that works for every model."""
    return Stream if policy.rule.streams else TwoPass


def try_out(
    model: nn.Module,
    make: Callable[[type[Engine], StepRecord], Engine],
    loss_fn: LossFn,
    microbatches: MicrobatchList,
    policy: Policy,
    memory: Memory,
) -> EngineReport:
    """Run a batch through the single-pass engine and the reliable one, and compare."""
    policy = replace(policy, nonfinite="propagate")
    devices = {parameter.device for parameter in model.parameters()}
    before = memory.snapshot(loss_fn)
    edited: bool | None = None
    fallback = reliable(policy)
    autocast = AutocastWatch(model, {device.type for device in devices})

    def run(engine: type[Engine]) -> tuple[Gradients, float]:
        nonlocal edited
        before.restore()
        record = StepRecord(policy, step=0)
        own = microbatches.keep_copy().pristine.keep_copy()  # loss_fn may write to its batch
        start = time.perf_counter()
        with DropoutDisabled():
            made = make(engine, record)
            made.fold(loss_fn, own, final=True)
            gradients = made.finish()
        _wait_for(devices)
        before.learn()
        edited = bool(edited) or own.were_edited
        return gradients, time.perf_counter() - start

    try:
        with autocast:
            return _compare(run, fallback, before, autocast)
    except CannotFuseError as error:
        return EngineReport(fallback.name, str(error), refused=not isinstance(error, MeanLossError))
    except torch.OutOfMemoryError:
        return EngineReport(fallback.name, "A single pass does not fit into memory.")
    finally:
        before.restore()
        if edited is not None:
            memory.edits_batches = edited


def _compare(
    run: Callable[[type[Engine]], tuple[Gradients, float]],
    fallback: type[Engine],
    before: Snapshot,
    autocast: AutocastWatch,
) -> EngineReport:
    seconds: dict[str, float] = {}
    rounds: list[tuple[float, float]] = []
    start = time.perf_counter()
    for turn in range(ROUNDS + MORE_ROUNDS):
        if turn >= ROUNDS and (
            max(seconds.values()) > CLOSE * min(seconds.values())
            or time.perf_counter() - start > PATIENCE
        ):
            break
        try:
            fused, single = run(Fused)
        except (CannotFuseError, torch.OutOfMemoryError):
            raise
        except Exception as failure:
            # If the mistake is the user's, the reliable engine will raise it as well.
            return EngineReport(fallback.name, f"A single pass failed: {failure!r}")
        still = not before.has_drawn()
        trusted, several = run(fallback)
        if turn:
            rounds.append((single, several))
            # within a round, both are slowed down equally by other load
            typical = median(several for _, several in rounds)
            ratio = median(single / several for single, several in rounds)
            seconds = {"fused": typical * ratio, fallback.name: typical}
    comparison = _compared(fused, trusted)
    error, suspect = comparison.error, comparison.suspect(autocast.seen)
    if not math.isfinite(error):
        return EngineReport(fallback.name, NOT_FINITE)
    if suspect is not None and not still:
        return EngineReport(
            fallback.name,
            "The model draws random numbers that cannot be fixed for a comparison.",
            seconds,
            error,
        )
    if suspect is not None:
        return EngineReport(
            fallback.name,
            f"A single pass gives a gradient that differs by {error:.1e} of its norm, most in "
            f"parameter {suspect!r}: the model seems to mix examples, or to change from call to "
            "call.",
            seconds,
            error,
            suspect,
        )
    faster = min(seconds, key=seconds.__getitem__)
    times = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items())
    return EngineReport(faster, f"Both are exact, and it is faster ({times}).", seconds, error)


def _compared(found: Gradients, trusted: Gradients) -> Comparison:
    comparison = Comparison()
    for name in found.keys() | trusted.keys():
        comparison.add(name, found.get(name), trusted.get(name))
    return comparison


def _wait_for(devices: set[torch.device]) -> None:
    """Wait for accelerators, so that the clock shows the actual work."""
    for device in devices:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
