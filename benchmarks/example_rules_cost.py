"""What rules that weight examples cost: the step, on one process and on two, and their memory.

    python benchmarks/example_rules_cost.py                 all three parts
    python benchmarks/example_rules_cost.py --parts memory  only the memory, up to 10 million ids

Steps are run by turns with plain ones, on a transformer of about 3 million parameters; the ratio is
the median of the ratios within a round, with its quartiles. The rule is holding examples back while
it is measured, and every batch has different ids. Optimizer steps are included in both.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from microclip import Clipper
from microclip.rules import LossHistory, NormHistory, Seen, Unit

from measure import interleaved, ratio
from models import TASKS, Task

EXAMPLES = 100_000


def holding(rule: LossHistory) -> LossHistory:
    """Return a rule that knows all examples and holds a fifth of them back."""
    keys = torch.arange(EXAMPLES)
    bad = keys % 5 == 0
    generator = torch.Generator().manual_seed(0)
    for step in range(40):
        noise = 0.1 * torch.rand(EXAMPLES, generator=generator, dtype=torch.float64)
        losses = torch.where(bad, 2.5, 2.5 * 0.8**step) + noise
        zeros = torch.zeros(EXAMPLES, dtype=torch.int64)
        rule.remember(Seen(step, keys, losses, rule.weigh(keys, None), zeros, losses))
    assert rule.phase == "holding", rule.phase
    return rule


def batches(task: Task) -> Iterator[Tensor]:
    """Yield the ids of batch after batch."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield from torch.randperm(EXAMPLES, generator=generator).split(len(task.batch[1]))[:-1]


def steps_of(model: nn.Module, task: Task, arms: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """Return plain and weighted steps of one model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = batches(task)

    def losses(batch: Any) -> Tensor:
        return task.loss(model(batch[0]), batch[1])

    def plain() -> None:
        optimizer.zero_grad()
        losses(task.batch).mean().backward()
        optimizer.step()

    def weighted(clipper: Clipper) -> Callable[[], object]:
        def step() -> None:
            optimizer.zero_grad()
            clipper.backward(losses, task.batch, ids=next(ids))
            optimizer.step()

        return step

    made = {name: Clipper(model, b, rule=holding(rule(40))) for name, (rule, b) in arms.items()}
    return {"plain": plain, **{name: weighted(clipper) for name, clipper in made.items()}}


ARMS: dict[str, Any] = {
    "LossHistory": (LossHistory, 1),
    "NormHistory": (NormHistory, 1),
    "LossHistory + Unit, b = 4": (lambda steps: LossHistory(steps, clip=Unit()), 4),
}


def one_process(options: argparse.Namespace) -> None:
    """Measure steps in this process."""
    task = TASKS[options.task](options.batch_size)
    size = sum(p.numel() for p in task.model.parameters())
    seconds = interleaved(steps_of(task.model, task, ARMS), options.rounds)
    plain = 1000 * sorted(seconds["plain"])[len(seconds["plain"]) // 2]
    print(f"one process, {options.task}, {size / 1e6:.1f} million parameters, B = "
          f"{options.batch_size}: plain step {plain:.1f} ms")  # fmt: skip
    for name in ARMS:
        middle, low, high = ratio(seconds, name, "plain")
        print(f"  {name:28} {middle:.3f} ({low:.3f} to {high:.3f})")


def rank(number: int, store: str, options: argparse.Namespace) -> None:
    """Measure steps on one of two ranks; the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    task = TASKS[options.task](options.batch_size // 2)
    model = DistributedDataParallel(task.model)
    arms = {"LossHistory": ARMS["LossHistory"]}
    seconds = interleaved(steps_of(model, task, arms), options.rounds)
    if number == 0:
        plain = 1000 * sorted(seconds["plain"])[len(seconds["plain"]) // 2]
        middle, low, high = ratio(seconds, "LossHistory", "plain")
        print(f"two ranks, B = {options.batch_size}: plain step {plain:.1f} ms")
        print(f"  {'LossHistory':28} {middle:.3f} ({low:.3f} to {high:.3f})")
    dist.barrier()
    dist.destroy_process_group()


def two_ranks(options: argparse.Namespace) -> None:
    """Measure steps on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            rank, (os.path.join(folder, "store"), options), nprocs=2, start_method="spawn"
        )


def memory(options: argparse.Namespace) -> None:
    """Measure the state for up to 10 million ids: integers, and others."""
    for kind in ("integers", "strings (64-bit digests)"):
        for count in (1_000_000, 10_000_000):
            rule = LossHistory(10**6)
            generator = torch.Generator().manual_seed(0)
            order = torch.randperm(count, generator=generator)
            keys = order if kind == "integers" else order * 0x9E3779B97F4A7C1 - 2**62
            start = time.perf_counter()
            for part in keys.split(100_000):
                losses = torch.rand(len(part), generator=generator, dtype=torch.float64)
                zeros = torch.zeros(len(part), dtype=torch.int64)
                rule.remember(Seen(0, part, losses, torch.ones(len(part)), zeros))
            seconds = time.perf_counter() - start
            rule.table.compact()  # as after every epoch
            state = rule.state_dict()["table"]
            saved = sum(column.nbytes for column in state["columns"].values())
            saved += 0 if state["keys"] is None else state["keys"].nbytes
            start = time.perf_counter()
            rule._fit()
            fit = time.perf_counter() - start
            print(
                f"{count:>11,} {kind}: {rule.table.nbytes / count:.1f} bytes each in memory, "
                f"{saved / count:.1f} in a checkpoint; adding {1e6 * seconds / count:.2f} us each, "
                f"a look at all of them {fit:.2f} s"
            )


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="*", default=["step", "ranks", "memory"])
    parser.add_argument("--task", default="gpt", choices=list(TASKS))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    known = {"step": one_process, "ranks": two_ranks, "memory": memory}
    for part in options.parts:
        if part not in known:
            parser.error(f"there is no part {part!r}; there are {', '.join(known)}")
        known[part](options)


if __name__ == "__main__":
    main()
