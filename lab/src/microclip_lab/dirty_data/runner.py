"""Runs the plan in worker processes, one thread each, and keeps every finished run.

The lab's job queue asks a database before each run, which takes longer than many of these runs do;
here, one process hands them out.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from microclip_lab.dirty_data.plan import Plan
from microclip_lab.dirty_data.records import Job, Record, append
from microclip_lab.jobs.progress import Status

logger = logging.getLogger(__name__)

RUNS_OF_SEARCH = 8  # a guess for progress: four rates, two seeds


class FailedRunsError(RuntimeError):
    """Some runs ended in an error; all others are kept."""


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


def prepare_worker() -> None:
    """Use one thread, leave Ctrl-C to the process that hands out the runs, and end with it."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit if the parent is killed: a pool's worker would wait for its next run forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def work(
    plan: Any,
    records: dict[Job, Any],
    folder: Path,
    workers: int,
    report: Callable[[Status], None],
    do: Callable[[Job, float | None], Any] = run_job,
    keep: Callable[[Path, Any], None] = append,
    progress_of: Callable[[Any, dict[Job, Any]], Status] | None = None,
) -> None:
    """Do all missing runs; `records` grows.

    Args:
        plan: What to run: says what is `missing` and the `plain_rate` of a task.
        records: Those there are already.
        folder: Where to add the records.
        workers: How many worker processes; even one is separate from this process.
        report: Called with the progress.
        do: Carries out a run.
        keep: Adds a record to the folder.
        progress_of: Returns the progress; by default that of this benchmark's plan.
    """
    failed: dict[Job, str] = {}
    running: dict[Future[Any], Job] = {}
    context = multiprocessing.get_context("spawn")
    strangers = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=prepare_worker)
    try:
        while True:
            busy = set(running.values())
            for job in plan.missing(records):
                if len(running) == workers:
                    break
                if job not in busy and job not in failed:
                    plain_rate = plan.plain_rate(records, job.task)
                    running[pool.submit(do, job, plain_rate)] = job
            report((progress_of or status)(plan, records))
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                error = future.exception()
                if error is None:
                    records[job] = future.result()
                    keep(folder, records[job])
                else:
                    logger.error("%s failed: %s", job, error)
                    failed[job] = f"{type(error).__name__}: {error}"
    except BaseException:  # do not wait for runs that nobody will keep
        for process in set(multiprocessing.active_children()) - strangers:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    if failed:
        listed = "; ".join(f"{job}: {error}" for job, error in failed.items())
        raise FailedRunsError(f"{len(failed)} runs failed; all others are kept. {listed}")


def status(plan: Plan, records: dict[Job, Record]) -> Status:
    """Return the progress; how many runs a search takes is a guess until it is over."""
    done = total = 0
    untuned = set(plan.untuned(records))
    counts = Counter((job.task, job.arm, job.stage) for job in records)
    for task, arm in plan.pairs():
        searched = counts[task.name, arm.name, "tune"] if plan.tuning else 0
        judged = counts[task.name, arm.name, "evaluate"] if plan.evaluating else 0
        is_open = plan.tuning and f"{task.name}/{arm.name}" in untuned
        done += searched + judged
        total += max(searched + 2, RUNS_OF_SEARCH) if is_open else searched
        total += max(judged, len(plan.seeds)) if plan.evaluating else 0
    return Status(done, total, done, max(total, 1))
