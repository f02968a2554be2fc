"""What a clipped step costs next to a plain one, engine by engine, for every micro-batch size.

    python benchmarks/step_cost.py                            all four models
    python benchmarks/step_cost.py --tasks gpt --sizes 1 4    a part of it

`accumulate` is plain gradient accumulation with the same b: what a loop over micro-batches costs
without any clipping. `tight` is the single pass with a memory budget of 1.2 times the peak of a
plain step. For b = 1 per-sample gradients by other means follow: torch.func, and Opacus (`pip
install opacus`) with its hooks and with ghost clipping. `untouched` is a plain step in a process
that has not heard of microclip: single passes make the plain steps of their own process faster, too
(see `untouched.py`), and these are what all ratios are taken to. Times are ratios to the plain step
within one round of an interleaved run, median with quartiles; memory is the ratio of the peaks of
live tensors. After `fused` stands its ratio to the untouched step, after `auto` what it chose and
its ratio to the best engine of the row. What no question hangs on takes part in every third round.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from microclip import Clipper
from untouched import Untouched

import per_sample
from measure import Step, interleaved, peak_memory_of, ratio
from models import TASKS, Task

COLUMNS = ("accumulate", "stream", "two_pass", "fused", "tight", "auto")
CANDIDATES = ("stream", "two_pass", "fused")  # of which `auto` is to find the best
OFTEN = (
    "plain",
    "untouched",
    "stream",
    "fused",
    "tight",
    "auto",
)  # the others are run in every third round
ALLOWANCE = 1.2  # of a plain step's memory, for the tight budget


def plain(task: Task) -> None:
    task.model.zero_grad()
    task.losses(task.batch).mean().backward()


def accumulate(task: Task, b: int) -> None:
    task.model.zero_grad()
    examples = len(task.batch[0])
    for part in zip(*(tensor.split(b) for tensor in task.batch), strict=True):
        (task.losses(part).sum() / examples).backward()


def clip(task: Task, clipper: Clipper) -> None:
    task.model.zero_grad()
    clipper.backward(task.losses, task.batch)


def peak(task: Task, step: Step) -> int | None:
    """Return the peak of a step's memory; None if the device does not tell."""
    task.model.zero_grad()
    return peak_memory_of(task.device, step)


def error(task: Task, step: Step, wanted: list[torch.Tensor]) -> float:
    """Return how far a step's gradient is from the one wanted, relative to its norm."""
    task.model.zero_grad()
    step()
    found = [parameter.grad for parameter in task.model.parameters()]
    squares = [(f - w).square().sum() for f, w in zip(found, wanted, strict=True)]
    return float((sum(squares) / sum(w.square().sum() for w in wanted)) ** 0.5)


@dataclass(frozen=True)
class Figure:
    """One line of the table: what a step costs, in units of a plain one."""

    b: int
    name: str
    time: float
    low: float
    high: float
    memory: float | None
    note: str = ""

    def __str__(self) -> str:
        memory = "" if self.memory is None else f"{self.memory:8.2f}x"
        return (
            f"{self.b:>4}  {self.name:12}{self.time:6.2f} ({self.low:.2f}-{self.high:.2f})"
            f"{memory}{self.note}"
        )


def figures(
    task: Task,
    b: int,
    rounds: int,
    untouched: Step | None = None,
    wait: Callable[[], object] | None = None,
) -> tuple[list[Figure], float | None]:
    """Measure all columns for one micro-batch size.

    Also returns the largest difference between clipped gradients, if b = 1. `wait` waits for the
    device.
    """
    steps: dict[str, Step] = {"plain": partial(plain, task)}
    if untouched is not None:
        steps["untouched"] = untouched
    steps["plain"]()
    limit = peak(task, steps["plain"])
    columns = [name for name in COLUMNS[1:] if limit is not None or name != "tight"]
    clippers = {name: Clipper(task.model, b, engine=name) for name in columns if name != "tight"}
    if limit is not None:
        budget = int(ALLOWANCE * limit)
        clippers["tight"] = Clipper(task.model, b, engine="fused", memory_budget=budget)
    steps["accumulate"] = partial(accumulate, task, b)
    for name in columns:
        steps[name] = partial(clip, task, clippers[name])
    if b == 1:
        steps |= per_sample.steps(task)
    seconds = interleaved(steps, rounds, seldom=steps.keys() - set(OFTEN), wait=wait)
    best = min(CANDIDATES, key=lambda name: ratio(seconds, name, "plain")[0])
    base = peak(task, steps["plain"])
    found = []
    for name, step in steps.items():
        if name == "plain":
            continue
        memory, note = None, ""
        if name != "untouched" and base:
            memory = (peak(task, step) or 0) / base
        if name == "fused" and untouched is not None:
            note = f"  ({ratio(seconds, name, 'untouched')[0]:.2f} of untouched)"
        if name == "auto":
            to_best = ratio(seconds, name, best)[0]
            note = f"  ({clippers[name].outcome.engine}; {to_best:.2f} of {best}, the best)"
        found.append(Figure(b, name, *ratio(seconds, name, "plain"), memory, note))
    return found, _largest_difference(task, steps, clippers["stream"]) if b == 1 else None


def _largest_difference(task: Task, steps: dict[str, Step], stream: Clipper) -> float:
    clip(task, stream)
    wanted = [parameter.grad for parameter in task.model.parameters()]
    clipped = steps.keys() - {"plain", "untouched", "accumulate"}
    return max(error(task, steps[name], wanted) for name in clipped)


def row(task: Task, b: int, rounds: int, untouched: Step) -> None:
    """Measure all columns for one micro-batch size, and print them."""
    found, difference = figures(task, b, rounds, untouched)
    print(*found, sep="\n")
    if difference is not None:
        print(
            f"      largest difference between the clipped gradients: {difference:.0e}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21, help="measured rounds per row")
    parser.add_argument("--batch-size", type=int, default=32, help="examples per step")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="B")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of the others, about themselves

    print(f"batch of {options.batch_size}, {torch.get_num_threads()} threads, ", end="")
    print(f"{options.rounds} rounds, torch {torch.__version__}")
    print("ratios to a plain step: time, median (quartiles), and peak memory")
    for name in options.tasks:
        torch.manual_seed(0)
        task = TASKS[name](options.batch_size)
        print(f"\n{name}: {TASKS[name].__doc__} {task.buffer / 4e6:.2f}M parameters")
        with Untouched(name, options.batch_size) as untouched:
            for b in options.sizes:
                row(task, b, options.rounds, untouched.step)


if __name__ == "__main__":
    main()
