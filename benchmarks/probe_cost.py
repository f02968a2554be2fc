"""What a probe costs next to a plain step: time and peak memory.

    python benchmarks/probe_cost.py                      64 examples of four models
    python benchmarks/probe_cost.py --batches 1 2 4      as many batches of 64

`gram` is the inner products of all examples' gradients, `probe` that and all simulated steps.
Times are ratios to the plain step within one round of an interleaved run, median with quartiles;
memory is the ratio of the peaks of live tensors.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

import microclip
from microclip.probing import gram_of

from measure import interleaved, peak_memory, ratio
from models import TASKS, Task


def plain(task: Task) -> None:
    task.model.zero_grad()
    task.losses(task.batch).mean().backward()


def gram(task: Task, batches: list) -> None:
    task.model.zero_grad()
    gram_of(task.model, task.losses, batches)


def probe(task: Task, batches: list) -> None:
    task.model.zero_grad()
    microclip.probe(task.model, task.losses, batches)


def measure(name: str, examples: int, counts: list[int], rounds: int) -> None:
    task = TASKS[name](examples)
    others = [task.batch, *(TASKS[name](examples).batch for _ in range(max(counts) - 1))]
    steps = {"plain": partial(plain, task)}
    for count in counts:
        steps[f"gram of {count}"] = partial(gram, task, others[:count])
        steps[f"probe of {count}"] = partial(probe, task, others[:count])
    seconds = interleaved(steps, rounds, warmup=1)
    memory = {}
    for what, step in steps.items():
        task.model.zero_grad()
        memory[what] = peak_memory(step)
    parameters = sum(p.numel() for p in task.model.parameters())
    for what in steps:
        if what == "plain":
            continue
        middle, low, high = ratio(seconds, what, "plain")
        print(
            f"| {name}, {parameters / 1e6:.1f}M | {what} x {examples} | {middle:.2f} "
            f"({low:.2f} to {high:.2f}) | {memory[what] / memory['plain']:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print("| model | batches x examples | time, plain steps | peak memory, of a plain step's |")
    print("| --- | --- | --- | --- |")
    for name in options.tasks:
        measure(name, options.examples, options.batches, options.rounds)


if __name__ == "__main__":
    main()
