"""The command: run the plan, repeat a run, write the page."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from microclip_lab.dirty_data.catalog import task_named
from microclip_lab.dirty_data.training import Engine
from microclip_lab.evidence.arms import ARMS
from microclip_lab.evidence.catalog import BY_NAME, STUDIES, Study, study_named
from microclip_lab.evidence.plan import Plan, editions, gate
from microclip_lab.evidence.records import Record, read_all
from microclip_lab.evidence.verdicts import open_arms
from microclip_lab.evidence.when_to_clip import outside_jobs, outside_records
from microclip_lab.tuned_arms.records import Job
from microclip_lab.tuned_arms.runner import work_or_exit

DESCRIPTION = """\
Evidence that decides: where does micro-batch clipping help, and how can one tell beforehand?

Tasks must pass a gate, every arm is tuned, and seeds are added until intervals decide. Every
finished run is kept: stop at any time, and run the same command again to continue.

  everything:                     benchmarks/evidence.py --workers 2
  a taste (under 10 minutes):     benchmarks/evidence.py --quick --out /tmp/evidence
  repeat a random run:            benchmarks/evidence.py --rerun
  page, advice and thresholds:    benchmarks/evidence.py --publish
  the page alone, to look at it:  benchmarks/evidence.py --page /tmp/evidence.md

{cost}
"""
RESULTS = Path("results/evidence")
CLIPPED = ("minnorm", "unit")  # how the names of arms begin that clip norms
QUICK = ("outliers-7-10", "tuned-canaries")
QUICK_ARMS = ("minnorm-1", "minnorm-4", "unit-4")


class _Parser(argparse.ArgumentParser):
    """Reads what the plan costs from the records, once help is asked for."""

    def format_help(self) -> str:
        self.description = DESCRIPTION.format(cost=cost(read_all(RESULTS, editions())))
        return super().format_help()


def cost(records: Mapping[Job, Record]) -> str:
    """Say what the full plan costs, from the CPU time of the runs on record."""
    plan = Plan(STUDIES)
    left = [study.name for study in STUDIES if plan.missing_of(study, records)]
    hours = sum(record.seconds for record in records.values()) / 3600
    if not records:
        return f"What the full plan costs is unknown here: {RESULTS} has no records."
    if not left:
        return f"The full plan took {len(records):,} runs and {hours:.1f} core-hours."
    done = len(STUDIES) - len(left)
    return (
        f"The full plan has {len(STUDIES)} tasks. {done} are finished; with what there is of the "
        f"others, that took {len(records):,} runs and {hours:.1f} core-hours."
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = _Parser(
        prog="benchmarks/evidence.py",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--tasks", nargs="+", metavar="TASK", help="default: all; see --list")
    made.add_argument("--arms", nargs="+", metavar="ARM", help="besides plain and oracle")
    made.add_argument("--quick", action="store_true", help="two tasks, three arms, one look")
    made.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    made.add_argument("--out", type=Path, default=RESULTS, help="records")
    made.add_argument("--rerun", action="store_true", help="repeat a random run and compare")
    made.add_argument("--seed", type=int, default=None, help="which random run")
    made.add_argument("--page", type=Path, help="write the page from the records; run nothing")
    made.add_argument(
        "--publish",
        action="store_true",
        help="write the page, the library's thresholds and the tables of guide and README from the "
        "records; run nothing, from the root of the repository",
    )
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
    if options.workers < 1:
        made.error(f"--workers must be 1 or more, but got {options.workers}")
    names = options.tasks or (QUICK if options.quick else BY_NAME)
    try:
        studies = [study_named(name) for name in names]
    except ValueError as error:
        made.error(str(error))
    records = read_all(options.out, editions())
    if options.rerun:
        sys.exit(0 if rerun(records, studies, options.seed, console) else 1)
    if options.page:
        from microclip.files import write_whole
        from microclip_lab.evidence.page import page

        write_whole(options.page, page(records, outside_records()).encode())
        console.print(f"page: {options.page}")
        return
    if options.publish:
        publish(records, console)
        return
    arms = options.arms or (QUICK_ARMS if options.quick else None)
    outside = [] if options.quick or options.tasks else outside_jobs(outside_records())
    plan = Plan(studies, arms, 1 if options.quick else None, outside, open_arms)
    work_or_exit(plan, records, options.out, options.workers, console, run_job)
    for study in studies:
        console.print(f"{study.name}: gate {gate(records, study)}")


def publish(records: dict[Job, Record], console: Console) -> None:
    """Write everything that users meet, and say which files changed."""
    from microclip.files import write_whole
    from microclip_lab.evidence.publish import published

    root = Path.cwd()
    for path, text in published(records, outside_records(), root).items():
        kept = root / path
        changed = not kept.exists() or kept.read_text(encoding="utf-8") != text
        if changed:
            write_whole(kept, text.encode())
        console.print(f"{path}: {'written' if changed else 'as it was'}")


def run_job(job: Job, plain_rate: float | None, engine: Engine = "auto") -> Record:
    """Do one run, in a worker process."""
    from microclip_lab.evidence.run import run

    known = BY_NAME.get(job.task)
    task = task_named(job.task) if known is None else known.task
    return run(task, job.arm, job.seed, job.rate, job.stage, engine)


def rerun(
    records: dict[Job, Record], studies: Sequence[Study], seed: int | None, console: Console
) -> bool:
    """Repeat a random run, and return whether it gave the same result, bit for bit.

    A clipped run took the engine that was faster at the time. Engines differ in the last bits, so
    each is tried.
    """
    import torch

    names = {study.name for study in studies}
    jobs = sorted((job for job in records if job.task in names), key=str)
    if not jobs:
        console.print("There are no records to repeat yet.")
        return False
    job = random.Random(seed).choice(jobs)
    torch.set_num_threads(1)
    kept = records[job]
    engines: tuple[Engine, ...] = ("fused", "stream") if job.arm.startswith(CLIPPED) else ("auto",)
    for engine in engines:
        found = run_job(job, None, engine)
        is_same = found.same_as(kept)
        said = "the same, bit for bit" if is_same else "different"
        with_it = f" with engine {engine}" if engine != "auto" else ""
        console.print(f"{job}: {said}{with_it} (weights {found.weights}, recorded {kept.weights})")
        if is_same:
            return True
    return False


def _describe(console: Console) -> None:
    for study in STUDIES:
        console.print(f"{study.name}: {study.task.title}. {study.task.description}")
        console.print(f"  arms: {', '.join(study.arms)}; seeds after each look: {study.looks}")
    console.print()
    for arm in ARMS.values():
        console.print(f"{arm.name}: {arm.title}")
