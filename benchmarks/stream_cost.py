"""What clipping costs: `stream` and `two_pass` against plain gradient accumulation, same b.

    python benchmarks/stream_cost.py                 about two minutes on two cores
    python benchmarks/stream_cost.py --rounds 31     a steadier figure

A GPT-like transformer of about 3M parameters on 64 tokens. Times are ratios within one round of
an interleaved run, median with quartiles; memory is the peak of live tensors, to the byte.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from microclip import Clipper

from measure import interleaved, ratio
from models import gpt
from step_cost import accumulate, clip, peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds per row")
    parser.add_argument("--batch-size", type=int, default=32, help="examples per step")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="B")
    options = parser.parse_args()

    torch.manual_seed(0)
    task = gpt(options.batch_size)

    tokens, threads = task.batch[0].shape[1], torch.get_num_threads()
    print(f"{task.buffer / 4e6:.2f}M parameters, {tokens} tokens, ", end="")
    print(f"batch of {options.batch_size}, {threads} threads, {options.rounds} rounds, ", end="")
    print(f"torch {torch.__version__}")
    print("time: ratio to plain accumulation with the same b, median (quartiles)")
    print("memory: peak above plain accumulation's, in gradient buffers\n")
    print(f"{'b':>4}  {'stream time':>22} {'memory':>7}  {'two_pass time':>22} {'memory':>7}")
    for b in options.sizes:
        steps = {"plain": partial(accumulate, task, b)}
        for engine in ("stream", "two_pass"):
            steps[engine] = partial(clip, task, Clipper(task.model, b, engine=engine))
        seconds = interleaved(steps, options.rounds)
        peaks = {name: peak(task, step) for name, step in steps.items()}
        cells = []
        for engine in ("stream", "two_pass"):
            middle, low, high = ratio(seconds, engine, "plain")
            extra = (peaks[engine] - peaks["plain"]) / task.buffer
            cells.append(f"{middle:8.3f} ({low:.3f}-{high:.3f}) {extra:+7.2f}")
        print(f"{b:>4}  {'  '.join(f'{cell:>30}' for cell in cells)}", flush=True)


if __name__ == "__main__":
    main()
