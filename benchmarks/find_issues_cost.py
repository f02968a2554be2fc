"""What recording costs: steps with and without `ledger.record`, taking turns in random order.

The processor's time inside the ledger, writing included, is measured as well: it can be told from
nothing even where a machine's noise is larger than the difference of two steps.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import microclip
from microclip.report.statistics import estimate

BATCH, EXAMPLES, CYCLE = 64, 4096, 64  # a cycle of steps ends with a flush
WAYS = ("plain", "losses", "losses and predictions")


def network() -> nn.Module:
    """A small convolutional network for images of 32 x 32."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 1, 1), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64, 10)),
    )


class Timed:
    """A ledger, and the processor's seconds spent inside it."""

    def __init__(self, path: Path) -> None:
        self.ledger = microclip.Ledger(path, flush_every=10**6, flush_seconds=None)
        self.seconds = 0.0

    def record(self, ids: Tensor, losses: Tensor, **more: Tensor) -> None:
        start = time.process_time()
        self.ledger.record(ids, losses, **more)
        self.seconds += time.process_time() - start

    def flush(self) -> None:
        start = time.process_time()
        self.ledger.flush()
        self.seconds += time.process_time() - start


def cost(seconds: float) -> dict[str, Any]:
    """Return what recording adds to a step, in percent, with 95 % intervals over cycles."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    chance = random.Random(0)
    by_clock: dict[str, list[float]] = {way: [] for way in WAYS[1:]}
    inside: dict[str, list[float]] = {way: [] for way in WAYS[1:]}
    steps: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        ledgers = {way: Timed(Path(folder) / way.replace(" ", "-")) for way in WAYS[1:]}

        def step(way: str) -> None:
            optimizer.zero_grad()
            logits = model(images)
            losses = F.cross_entropy(logits, labels, reduction="none")
            torch.autograd.backward(losses.mean())
            optimizer.step()
            ids = torch.randint(0, EXAMPLES, (BATCH,))  # the loader's
            if way != "plain":
                more = {"logits": logits, "labels": labels} if way == WAYS[2] else {}
                ledgers[way].record(ids, losses, **more)

        for way in WAYS * 3:
            step(way)
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(steps) < 2:
            spent, used = dict.fromkeys(WAYS, 0.0), 0.0
            for timed in ledgers.values():
                timed.seconds = 0.0
            for turn in range(CYCLE):
                for way in chance.sample(WAYS, len(WAYS)):
                    start, before = time.perf_counter(), time.process_time()
                    step(way)
                    if way != "plain" and turn == CYCLE - 1:
                        ledgers[way].flush()
                    spent[way] += time.perf_counter() - start
                    used += time.process_time() - before if way == "plain" else 0.0
            for way in WAYS[1:]:
                by_clock[way].append(100 * (spent[way] / spent["plain"] - 1))
                inside[way].append(100 * ledgers[way].seconds / used)
            steps.append(1000 * spent["plain"] / CYCLE)
        for timed in ledgers.values():
            timed.ledger.close()

    def interval(values: list[float]) -> list[float]:
        found = estimate(values)
        return [round(v, 3) for v in (found.mean, found.low or 0.0, found.high or 0.0)]

    return {
        "cycles": len(steps),
        "milliseconds of a plain step": interval(steps),
        "more by the clock, %": {way: interval(values) for way, values in by_clock.items()},
        "inside the ledger, %": {way: interval(values) for way, values in inside.items()},
    }
