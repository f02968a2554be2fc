"""Runs a plan in worker processes, one thread each, and keeps every finished run.

The lab's job queue asks a database before each run, which takes longer than many of these runs do;
here, one process hands them out. What to run, and how, is up to the plan and the benchmark.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from microclip_lab.jobs.progress import Status, progress
from microclip_lab.tuned_arms.records import Job, append

logger = logging.getLogger(__name__)


class FailedRunsError(RuntimeError):
    """Some runs ended in an error; all others are kept."""


class Runnable(Protocol):
    """A plan: pure functions of the records there are."""

    def missing(self, records: dict[Job, Any]) -> Iterable[Job]:
        """Return the runs that can start now, the most urgent first."""

    def plain_rate_of(self, records: dict[Job, Any], task: str) -> float | None:
        """Return the tuned rate of plain training on a task, if there is one."""

    def progress(self, records: dict[Job, Any]) -> Status:
        """Return how much is done."""


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
    plan: Runnable,
    records: dict[Job, Any],
    folder: Path,
    workers: int,
    report: Callable[[Status], None],
    do: Callable[[Job, float | None], Any],
) -> None:
    """Do all missing runs; `records` grows.

    Args:
        plan: What to run.
        records: Those there are already.
        folder: Where to add the records.
        workers: How many worker processes; even one is separate from this process.
        report: Called with the progress.
        do: Carries out a run, given plain training's tuned rate.
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
                    plain_rate = plan.plain_rate_of(records, job.task)
                    running[pool.submit(do, job, plain_rate)] = job
            report(plan.progress(records))
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                error = future.exception()
                if error is None:
                    records[job] = future.result()
                    append(folder, records[job])
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


def work_or_exit(
    plan: Runnable,
    records: dict[Job, Any],
    folder: Path,
    workers: int,
    console: Console,
    do: Callable[[Job, float | None], Any],
) -> None:
    """Do all missing runs with a progress bar; end the command if stopped, or if runs failed."""
    try:
        with progress(console) as report:
            work(plan, records, folder, workers, report, do)
    except KeyboardInterrupt:
        console.print("Stopped. Finished runs are kept: run the same command again to continue.")
        sys.exit(130)
    except FailedRunsError as error:
        console.print(str(error))
        sys.exit(1)
