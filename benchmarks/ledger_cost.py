"""What a ledger costs: steps with and without it, interleaved; or how much memory a long one takes.

    python benchmarks/ledger_cost.py                        about three minutes on two cores
    python benchmarks/ledger_cost.py --rows 10_000_000      writes that many micro-batches

Steps with and without take turns one by one, and a cycle lasts from one flush to the next, so its
ratio has everything in it: recording, converting, writing, and waiting for the disk. Beside it
stands the time spent inside the ledger alone, as a share of the steps without: two of those ratios
can be told apart where the machine's noise is larger than what is to be seen.
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


class Timed(Ledger):
    """A ledger that knows how long it took."""

    seconds = 0.0

    def record(self, outcome: Outcome, rank: int | None = None) -> None:
        start = time.perf_counter()
        super().record(outcome, rank)
        self.seconds += time.perf_counter() - start


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

    def step(clipper: Clipper) -> float:
        ids = torch.randint(0, IMAGES, (size,))
        start = time.perf_counter()
        optimizer.zero_grad()
        clipper.backward(task.losses, task.batch, ids=ids)
        optimizer.step()
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as folder:
        ledger = Timed(folder, flush_every=flush_every, flush_seconds=None)
        bare, recorded = Clipper(task.model, b), Clipper(task.model, b, ledger=ledger)
        for _ in range(5):
            step(bare)
            step(recorded)
        ledger.flush()
        ratios, shares, milliseconds = [], [], []
        for _ in range(cycles):
            ledger.seconds = without = with_ledger = 0.0
            for turn in range(flush_every):
                if turn % 2:
                    without += step(bare)
                    with_ledger += step(recorded)
                else:
                    with_ledger += step(recorded)
                    without += step(bare)
            ratios.append(with_ledger / without)
            shares.append(ledger.seconds / without)
            milliseconds.append(without / flush_every * 1e3)
        ledger.close()
        rows = open_ledger(folder).rows
    print(
        f"{name:>5} b={b:<2} {size // b:>3} micro-batches, step of "
        f"{statistics.median(milliseconds):6.2f} ms, flushed every {flush_every}: "
        f"ratio {spread(ratios, '.4f')}, inside the ledger {spread(shares, '.2%')} "
        f"({rows} rows)",
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
