"""What a ledger costs: steps with and without it, interleaved; or how much memory a long one takes.

    python benchmarks/ledger_cost.py                        about three minutes on two cores
    python benchmarks/ledger_cost.py --rows 10_000_000      writes that many micro-batches

Steps with and without take turns one by one, and a cycle lasts from one flush to the next, so its
ratio has everything in it: recording, converting, writing, and waiting for the disk. Beside it
stands the time spent inside the ledger alone, as a share of the steps without, by the clock and by
the processor's time: those can be told from nothing where a machine's noise is larger than the
difference of two steps, and the last one also while others compute.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from microclip import Clipper, Ledger, Outcome
from microclip.ledger import open_ledger

from models import Task, gpt

IMAGES = 900


class Stopwatch:
    """Adds up time by the clock, and of the processor."""

    def __init__(self) -> None:
        self.clock = self.processor = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def __exit__(self, *error: object) -> None:
        self.clock += time.perf_counter() - self._start[0]
        self.processor += time.process_time() - self._start[1]


class Timed(Ledger):
    """A ledger that knows how long it took."""

    watch = Stopwatch()

    def record(self, outcome: Outcome, rank: int | None = None) -> None:
        with self.watch:
            super().record(outcome, rank)


def demo() -> Task:
    """The network and the batches of `microclip demo`, on numbers at random."""
    sizes = [64, 128, 128, 10]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, targets, reduction="none")

    batch = torch.randn(32, 64), torch.randint(0, 10, (32,))
    return Task(nn.Sequential(*layers[:-1]), batch, loss)


def compare(name: str, task: Task, b: int, flush_every: int, cycles: int) -> None:
    """Print the ratio of steps with a ledger to steps without."""
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-6)
    size = len(task.batch[0])

    def step(clipper: Clipper, watch: Stopwatch) -> None:
        ids = torch.randint(0, IMAGES, (size,))
        with watch:
            optimizer.zero_grad()
            clipper.backward(task.losses, task.batch, ids=ids)
            optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        ledger = Timed(folder, flush_every=flush_every, flush_seconds=None)
        bare, recorded = Clipper(task.model, b), Clipper(task.model, b, ledger=ledger)
        for _ in range(5):
            step(bare, Stopwatch())
            step(recorded, Stopwatch())
        ledger.flush()
        ratios, by_clock, by_processor, milliseconds = [], [], [], []
        for _ in range(cycles):
            ledger.watch, without, with_ledger = Stopwatch(), Stopwatch(), Stopwatch()
            for turn in range(flush_every):
                pair = [(bare, without), (recorded, with_ledger)]
                for clipper, watch in pair if turn % 2 else reversed(pair):
                    step(clipper, watch)
            ratios.append(with_ledger.clock / without.clock)
            by_clock.append(ledger.watch.clock / without.clock)
            by_processor.append(ledger.watch.processor / without.processor)
            milliseconds.append(without.clock / flush_every * 1e3)
        ledger.close()
        rows = open_ledger(folder).rows
    print(
        f"{name:>5} b={b:<2} {size // b:>3} micro-batches, step of "
        f"{statistics.median(milliseconds):6.2f} ms, flushed every {flush_every}: "
        f"ratio {spread(ratios, '.3f')}, inside the ledger {spread(by_clock, '.2%')} by the clock, "
        f"{spread(by_processor, '.2%')} of the processor ({rows} rows)",
        flush=True,
    )


def spread(values: list[float], form: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} ({low:{form}}-{high:{form}})"


def outcomes(rows: int, b: int, per_step: int = 500) -> Iterator[Outcome]:
    """Yield steps of made-up micro-batches."""
    for step in range(-(-rows // per_step)):
        norms = torch.rand(per_step)
        ids = torch.randint(0, 100_000, (per_step, b)).tolist()
        each = torch.rand(per_step * b)
        yield Outcome(
            step=step,
            loss=each.mean(),
            losses=each.view(-1, b).mean(1),
            example_losses=each,
            norms=norms,
            weights=norms.min() / norms,
            bounds=norms.min().expand(per_step),
            sizes=torch.full((per_step,), b),
            skipped=torch.zeros(per_step, dtype=torch.bool),
            domains=("de", "en") * (per_step // 2),
            ids=tuple(map(tuple, ids)),
            engine="none",
        )


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def write(folder: Path, rows: int, b: int) -> None:
    """Print how much memory and room a long ledger takes, and that it reads back."""
    before = peak()
    print(f"imports: {before:.0f} MiB")
    inside = 0.0
    with Ledger(folder) as ledger:
        for outcome in outcomes(rows, b):
            start = time.perf_counter()
            ledger.record(outcome)
            inside += time.perf_counter() - start
    files = list(folder.glob("*/*.parquet"))
    room = sum(file.stat().st_size for file in files)
    print(
        f"written: {rows} micro-batches and {rows * b} examples in {len(files)} parts, "
        f"{room / 2**20:.0f} MiB ({room / rows:.1f} bytes a micro-batch), {inside:.0f} s in the "
        f"ledger; peak {peak():.0f} MiB"
    )
    record = open_ledger(folder)
    start = time.perf_counter()
    found = sum(batch.num_rows for batch in record.microbatches())
    found += sum(batch.num_rows for batch in record.examples())
    print(f"read: {found} rows in {time.perf_counter() - start:.0f} s; peak {peak():.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, help="write a ledger of so many micro-batches instead")
    parser.add_argument("--out", type=Path, help="with --rows: keep the ledger in this folder")
    parser.add_argument("--cycles", type=int, default=7, help="flushes per line")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.rows is not None:
        with tempfile.TemporaryDirectory() as folder:
            write(options.out or Path(folder), options.rows, 4)
        return
    print(f"{torch.get_num_threads()} threads, {options.cycles} cycles, torch {torch.__version__}")
    print("medians and quartiles over cycles\n")
    for b in (1, 4, 16):
        compare("demo", demo(), b, 2000, options.cycles)
    for b in (1, 4):  # a flush every 25 steps is 80 times as many as there would be
        compare("gpt", gpt(32), b, 25, options.cycles)


if __name__ == "__main__":
    main()
