"""How well find_issues finds wrong labels and transcripts, how many it says there are, what others
find, what leaving them out gives, and what recording costs.

    python benchmarks/find_issues.py --seeds 8            every finished run is kept; resumes
    python benchmarks/find_issues.py --stage rates        the same at other learning rates
    python benchmarks/find_issues.py --stage clean        and on data without wrong labels
    python benchmarks/find_issues.py --stage cost         steps with and without recording
    python benchmarks/find_issues.py --stage table        writes table.md from the records

Constants of find_issues were chosen on seeds from 1000 up (`--first 1000`), which are not used
here.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from find_issues_cost import cost
from find_issues_table import tables
from find_issues_trial import RATES, Record, Trial, expect_cleanlab
from microclip.files import append_line, write_whole

CLEAN = ("digits-clean", "cifar-clean")
TASKS = tuple(name for name in RATES if name not in CLEAN)
FACTORS = (0.5, 2.0, 4.0)  # of the tuned learning rate
COST = "cost.jsonl"


def read(out: Path) -> Iterator[Record]:
    """Yield all records of trials; a line that was cut off is skipped."""
    for path in sorted(out.glob("*.jsonl")):
        for line in path.read_text().splitlines() if path.name != COST else ():
            try:
                yield json.loads(line)
            except ValueError:
                continue


def carry_out(out: Path, jobs: list[tuple[str, int, float]], *, whole: bool) -> None:
    """Do what is not on record yet."""
    done = {(r["task"], r["seed"], r["factor"]) for r in read(out)}
    for name, seed, factor in jobs:
        if (name, seed, factor) in done:
            continue
        start = time.monotonic()
        result = Trial(name, seed, factor).result(whole=whole)
        key = {"task": name, "seed": seed, "factor": factor}
        seconds = round(time.monotonic() - start, 1)
        append_line(out / f"{name}.jsonl", json.dumps(key | result | {"seconds": seconds}))
        print(f"{name}, seed {seed}, rate x {factor:g}: {seconds} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = ("run", "rates", "clean", "cost", "table")
    parser.add_argument("--stage", choices=stages, default="run")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK")
    parser.add_argument("--seeds", type=int, default=8, help="how many (default: 8)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=60, help="how long to measure the cost")
    parser.add_argument("--out", type=Path, default=Path("results/find_issues"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    seeds = range(options.first, options.first + options.seeds)
    if options.stage == "run":
        expect_cleanlab()
        jobs = [(name, seed, 1.0) for seed in seeds for name in options.tasks]
        carry_out(options.out, jobs, whole=True)
    elif options.stage == "rates":
        jobs = [(name, s, factor) for s in seeds for factor in FACTORS for name in options.tasks]
        carry_out(options.out, jobs, whole=False)
    elif options.stage == "clean":
        carry_out(options.out, [(name, s, 1.0) for s in seeds for name in CLEAN], whole=False)
    elif options.stage == "cost":
        append_line(options.out / COST, json.dumps(cost(options.seconds)))
    if options.stage in ("run", "cost", "table"):
        costs = options.out / COST
        lines = costs.read_text().splitlines() if costs.exists() else []
        text = tables(list(read(options.out)), [json.loads(line) for line in lines])
        write_whole(options.out / "table.md", text.encode())
        print(f"table: {options.out / 'table.md'}")


if __name__ == "__main__":
    main()
