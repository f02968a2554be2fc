"""Interrupt a step at every line of the library that it executes, one after the other.

    python benchmarks/interrupts.py                      # every line, each engine, both ways
    python benchmarks/interrupts.py --every 5 --engine fused

Each time, `.grad` must be what it was before the step, or the step must be finished and counted;
nothing in between. And the next step must give what it would have given.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import interrupted

WAYS = {"raised": interrupted.raise_interrupt, "sent": interrupted.send_signal}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="strike at every n-th line")
    parser.add_argument("--engine", nargs="*", default=["stream", "two_pass", "fused"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failed = 0
    print(
        "| engine | `.grad` before | interrupt | places | wrong |\n| --- | --- | --- | --- | --- |"
    )
    for engine in options.engine:
        for full in (True, False):
            for way, strike in WAYS.items():
                cell = interrupted.Cell(engine, full)
                places = range(1, len(cell.lines()) + 1, options.every)
                wrong = Counter(filter(None, (cell.strike(line, strike) for line in places)))
                failed += wrong.total()
                before = "full" if full else "empty"
                print(
                    f"| {engine} | {before} | {way} | {len(places)} | {dict(wrong) or 0} |",
                    flush=True,
                )
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
