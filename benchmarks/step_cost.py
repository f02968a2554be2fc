"""What a clipped step costs next to a plain one, engine by engine, for every micro-batch size.

    python benchmarks/step_cost.py                            all four models
    python benchmarks/step_cost.py --tasks gpt --sizes 1 4    a part of it

`accumulate` is plain gradient accumulation with the same b: what a loop over micro-batches costs
without any clipping. Times are ratios to the plain step within one round of an interleaved run,
median with quartiles; memory is the ratio of the peaks of live tensors.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from microclip import Clipper

from measure import Step, interleaved, peak_memory, ratio
from models import TASKS, Task

COLUMNS = ("accumulate", "stream", "two_pass", "fused", "auto")


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


def peak(task: Task, step: Step) -> int:
    task.model.zero_grad()
    return peak_memory(step)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds per row")
    parser.add_argument("--batch-size", type=int, default=32, help="examples per step")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="B")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    options = parser.parse_args()

    print(f"batch of {options.batch_size}, {torch.get_num_threads()} threads, ", end="")
    print(f"{options.rounds} rounds, torch {torch.__version__}")
    print("time ratio to a plain step, median (quartiles), and ratio of peak memory")
    for name in options.tasks:
        torch.manual_seed(0)
        task = TASKS[name](options.batch_size)
        print(f"\n{name}: {TASKS[name].__doc__} {task.buffer / 4e6:.2f}M parameters")
        print(f"{'b':>4}" + "".join(f"{column:>28}" for column in COLUMNS))
        for b in options.sizes:
            steps: dict[str, Step] = {"plain": partial(plain, task)}
            steps["accumulate"] = partial(accumulate, task, b)
            for engine in COLUMNS[1:]:
                steps[engine] = partial(clip, task, Clipper(task.model, b, engine=engine))
            seconds = interleaved(steps, options.rounds)
            peaks = {column: peak(task, step) for column, step in steps.items()}
            cells = []
            for column in COLUMNS:
                middle, low, high = ratio(seconds, column, "plain")
                memory = peaks[column] / peaks["plain"]
                cells.append(f"{middle:.2f} ({low:.2f}-{high:.2f}) {memory:.2f}x")
            print(f"{b:>4}" + "".join(f"{cell:>28}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
