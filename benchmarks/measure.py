"""Measuring side by side: interleaved times as ratios, and peak memory to the byte."""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], object]


def interleaved(
    steps: dict[str, Step],
    rounds: int,
    warmup: int = 2,
    seldom: Collection[str] = (),
    wait: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Return the seconds that each step took in each round; a round runs each of them once.

    The order is drawn anew every round, since a step takes longer after some neighbours than after
    others. Those that are `seldom` run take part in every third round only, and have NaN elsewhere.
    `wait` waits for a device that steps only give work to.
    """
    names, chance = list(steps), random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + rounds):
        for name in chance.sample(names, len(names)):
            if name in seldom and turn >= warmup and (turn - warmup) % 3:
                seconds[name].append(math.nan)
                continue
            start = time.perf_counter()
            answer = steps[name]()
            if wait is not None:
                wait()
            if turn >= warmup:
                timed = isinstance(answer, float)  # elsewhere, by itself
                seconds[name].append(answer if timed else time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> tuple[float, float, float]:
    """Return the median and the quartiles of the ratio to a base, taken within each round."""
    ratios = [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]
    low, middle, high = statistics.quantiles([r for r in ratios if not math.isnan(r)], n=4)
    return middle, low, high


def peak_memory_of(device: torch.device, step: Step) -> int | None:
    """Return how many bytes a step took at once above what was there before; None if unknown."""
    if device.type == "cpu":
        return peak_memory(step)
    module = torch.get_device_module(device)
    if not hasattr(module, "reset_peak_memory_stats"):  # MPS
        return None
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    step()
    return int(module.max_memory_allocated(device)) - int(before)


def peak_memory(step: Step) -> int:
    """Return how many bytes of CPU tensors were alive at once, above what was alive before.

    Counted from the allocator's own events, so it does not depend on what the system does.
    """
    with (
        _silent_stderr(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
    ):
        step()
    alive = peak = 0
    for event in _allocations(recorded):
        alive += event
        peak = max(peak, alive)
    return peak


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Keep the profiler's own log lines, which come from C++, out of the table."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _allocations(recorded: profile) -> list[int]:
    """Return bytes allocated (positive) and freed (negative) in the order they happened."""
    results = recorded.profiler.kineto_results  # type: ignore[union-attr]
    events = [
        e
        for e in results.events()
        if e.name() == "[memory]" and e.device_type() == torch.autograd.DeviceType.CPU
    ]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
