"""The command of the benchmark: tune, evaluate, write the tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from microclip.files import write_whole
from microclip_lab.dirty_data.arms import ARMS
from microclip_lab.dirty_data.catalog import TASKS, task_named
from microclip_lab.dirty_data.plan import Plan, editions
from microclip_lab.dirty_data.records import Record, read_all
from microclip_lab.dirty_data.tables import markdown, summarize
from microclip_lab.dirty_data.task import TUNING_SEEDS
from microclip_lab.tuned_arms.records import Job
from microclip_lab.tuned_arms.runner import work_or_exit
from microclip_lab.tuned_arms.search import EVALUATION_SEEDS, PLAIN

DESCRIPTION = """\
What helps on dirty data? Trains small networks on data with known errors, with our rules and with
what people use instead, and compares each with plain training that was tuned as carefully.

  tune      search for each arm's learning rate, in factors of 2, on noisy validation data
  evaluate  train with the tuned rates and fresh seeds, and measure on clean test data
  table     write table.md and table.json from the records

Every finished run is kept: stop at any time, and run the same command again to continue.

  everything:                  benchmarks/dirty_data.py --workers 2
  one task, a few arms:        benchmarks/dirty_data.py --tasks digits-20 --arms loss-history elr
  more seeds, later:           benchmarks/dirty_data.py --stage evaluate --seeds 20
  what there is:               benchmarks/dirty_data.py --list
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="benchmarks/dirty_data.py",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--stage", choices=("all", "tune", "evaluate", "table"), default="all")
    made.add_argument("--tasks", nargs="+", metavar="TASK", help="default: all; see --list")
    made.add_argument(
        "--arms", nargs="+", metavar="ARM", help="default: all; plain is always included"
    )
    made.add_argument(
        "--seeds",
        type=int,
        default=8,
        help="how many seeds to evaluate (default: 8), from 0 up; tuning uses seeds from "
        f"{TUNING_SEEDS[0]} up",
    )
    made.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    made.add_argument("--out", type=Path, default=Path("results/dirty_data"), help="records")
    made.add_argument("--list", action="store_true", help="describe tasks and arms")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    made = parser()
    options = made.parse_args(arguments)
    console = Console(soft_wrap=True, highlight=False)
    if options.list:
        _describe(console)
        return
    for name in options.arms or ():
        if name not in ARMS:
            made.error(f"there is no arm {name!r}; the arms are {', '.join(ARMS)}")
    if not 2 <= options.seeds <= len(EVALUATION_SEEDS):
        made.error(f"--seeds must be from 2 to {len(EVALUATION_SEEDS)}, but got {options.seeds}")
    if options.workers < 1:
        made.error(f"--workers must be 1 or more, but got {options.workers}")
    try:
        tasks = [task_named(name) for name in options.tasks or TASKS]
    except ValueError as error:
        made.error(str(error))
    stage, out = options.stage, options.out
    records = read_all(out, editions(TASKS.values()))
    plan = Plan(
        tasks,
        options.arms or ARMS,
        options.seeds,
        tuning=stage in ("all", "tune"),
        evaluating=stage in ("all", "evaluate"),
    )
    if stage == "evaluate" and (untuned := plan.untuned(records)):
        made.error(f"run --stage tune first; these have no learning rate: {', '.join(untuned)}")
    if stage != "table":
        work_or_exit(plan, records, out, options.workers, console, run_job)
    if stage in ("all", "evaluate", "table"):
        _write_tables(records, out, options.seeds, console)


def run_job(job: Job, plain_rate: float | None) -> Record:
    """Do one run, in a worker process."""
    from microclip_lab.dirty_data.run import run

    return run(
        job.task,
        job.arm,
        job.seed,
        job.rate,
        plain_rate=plain_rate,
        tested=job.stage == "evaluate",
    )


def _write_tables(records: dict[Job, Record], out: Path, seeds: int, console: Console) -> None:
    """Write the tables of all tasks, even if only some were run now."""
    summary = summarize(records, list(TASKS.values()), seeds)
    if not summary["tasks"]:
        console.print(f"{out} has no evaluation of {PLAIN} training yet, so there is no table.")
        return
    text = json.dumps(summary, indent=1, allow_nan=False) + "\n"
    write_whole(out / "table.json", text.encode())
    write_whole(out / "table.md", markdown(summary).encode())
    console.print(f"tables: {out / 'table.md'}, {out / 'table.json'}")


def _describe(console: Console) -> None:
    for task in TASKS.values():
        console.print(f"{task.name} ({task.purpose}): {task.title}. {task.description}")
    console.print()
    for arm in ARMS.values():
        told = f" Told: {arm.told}." if arm.told else ""
        console.print(f"{arm.name}: {arm.title}; for {', '.join(arm.kinds)}.{told}")
