"""Finding out, on a real batch, whether the single-pass engine is exact and faster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch import nn

from microclip.engines.base import CannotFuseError, Engine, MeanLossError
from microclip.engines.gradients import Gradients
from microclip.engines.losses import LossFn
from microclip.engines.single_pass.engine import Fused
from microclip.engines.single_pass.verify import AutocastWatch, Comparison
from microclip.engines.snapshot import Memory, Snapshot
from microclip.engines.stillness import Still
from microclip.engines.stream import Stream
from microclip.engines.tally import Policy, Tally
from microclip.engines.two_pass import TwoPass
from microclip.microbatches import Cuts

NOT_FINITE = "The first gradients are not finite, so nothing could be compared yet."
ROUNDS = 3  # of which the first warms up and the others count
MORE_ROUNDS = 6  # while it is a close race,
CLOSE = 1.3  # one being at most so much faster,
PATIENCE = 20.0  # and for so many seconds


@dataclass(frozen=True)
class EngineReport:
    """Which engine `engine="auto"` uses, and why."""

    engine: str
    reason: str
    seconds: dict[str, float] = field(default_factory=dict)  # of one step, by engine
    error: float | None = None  # of the single-pass gradient, relative to the other's norm
    suspect: str | None = None  # the parameter with the largest error, if it is too large
    refused: bool = False  # whether the model does something that a single pass cannot follow


def certain(policy: Policy) -> type[Engine]:
    """Return the engine that works for every model."""
    return Stream if policy.rule.streams else TwoPass


def try_out(
    model: nn.Module,
    make: Callable[[type[Engine], Tally], Engine],
    loss_fn: LossFn,
    cuts: Cuts,
    policy: Policy,
    memory: Memory,
) -> EngineReport:
    """Run a batch through the single-pass engine and one that is certain, and compare."""
    policy = replace(policy, nonfinite="propagate")
    devices = {parameter.device for parameter in model.parameters()}
    before = memory.snapshot(loss_fn)
    edited: bool | None = None
    fallback = certain(policy)
    autocast = AutocastWatch({device.type for device in devices})

    def run(engine: type[Engine]) -> tuple[Gradients, float]:
        nonlocal edited
        before.restore()
        tally = Tally(policy, step=0)
        own = cuts.keep_copy().pristine.keep_copy()  # loss_fn may write to its batch
        start = time.perf_counter()
        with Still():
            made = make(engine, tally)
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
            # Whoever made the mistake, the certain engine will show it or do without.
            return EngineReport(fallback.name, f"A single pass failed: {failure!r}")
        still = not before.has_drawn()
        trusted, several = run(fallback)
        if turn:
            rounds.append((single, several))
            # within a round both were as much disturbed by whatever else goes on
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
            "The model draws random numbers that cannot be held still for a comparison.",
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
    return EngineReport(faster, f"All are exact, and it is the fastest ({times}).", seconds, error)


def _compared(found: Gradients, trusted: Gradients) -> Comparison:
    comparison = Comparison()
    for name in found.keys() | trusted.keys():
        comparison.add(name, found.get(name), trusted.get(name))
    return comparison


def _wait_for(devices: set[torch.device]) -> None:
    """Let accelerators finish, so that the clock shows what the work took."""
    for device in devices:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
