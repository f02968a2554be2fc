"""The loop of each worker, and of the process that supervises workers.

The plan says what comes next whenever a job ends, so resuming after an interruption, or joining
other workers, is the same as starting. What a job is and how it is run is defined elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from microclip_lab.jobs.job_queue import Claim, JobQueue, LostClaimError
from microclip_lab.jobs.plan import Plan, QueueItem, QueueState, Result, status
from microclip_lab.jobs.progress import Status
from microclip_lab.jobs.storage import GRACE
from microclip_lab.jobs.subprocesses import start_workers

logger = logging.getLogger(__name__)

POLL = 1.0  # seconds between two checks of the queue

J = TypeVar("J", bound=QueueItem)
R = TypeVar("R")
T = TypeVar("T")
Look = Callable[[], QueueState[J, R]]
Do = Callable[[Claim[J], QueueState[J, R]], tuple[Result, float]]
Report = Callable[[Status], None]


class StoppedError(KeyboardInterrupt):
    """The work was interrupted, with checkpoints of all running jobs."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(
            "Interrupted. Finished runs are kept, and unfinished ones have a checkpoint: run the "
            "same command again to continue."
        )
        self.exit_code = exit_code


class TrialError(OSError):
    """Some runs failed, so the plan cannot be completed."""


def work(
    plan: Plan[J, R], queue: JobQueue[J], look: Look[J, R], do: Do[J, R], report: Report
) -> None:
    """Run jobs, together with other workers, until the plan is complete.

    Args:
        plan: What to do.
        queue: The shared job queue.
        look: Returns the state of all jobs.
        do: Runs a job; returns its result, and the figure to record for its trial.
        report: Called with the progress.
    """
    while True:
        queue.release_abandoned()
        state = look()
        report(status(plan, state))
        missing = plan.missing(state.finished)
        possible = [job for job in missing if job not in state.broken]
        if not missing:
            return
        if not possible:
            raise TrialError(_what_broke(state.broken))
        claim = queue.claim(possible)
        if claim is None:
            time.sleep(POLL)
        else:
            _do(queue, claim, state, do)


def _do(queue: JobQueue[J], claim: Claim[J], state: QueueState[J, R], do: Do[J, R]) -> None:
    """Run a job, and tell the queue how it ended."""
    try:
        with queue.heartbeat(claim):
            result, value = do(claim, state)
        queue.complete(claim, result, value)
    except LostClaimError:
        pass  # the worker that has it now will finish it
    except KeyboardInterrupt as error:
        queue.release(claim, "it was interrupted")
        raise StoppedError(getattr(error, "exit_code", 130)) from error
    except Exception as error:
        logger.exception("%s failed.", claim.job)
        queue.fail(claim, f"{type(error).__name__}: {error}")


def wait_for_lock(train: Callable[[], T]) -> T:
    """Train; if a worker that seemed dead still locks the folder, wait for a while."""
    end = time.monotonic() + GRACE
    while True:
        try:
            return train()
        except FileExistsError:
            if time.monotonic() > end:
                raise
            time.sleep(POLL)


def supervise(
    plan: Plan[J, R],
    look: Look[J, R],
    report: Report,
    command: Sequence[str],
    workers: int,
    logs: Path,
    *,
    threads: int | None = None,
    report_every: float = POLL,
) -> None:
    """Start workers and report their progress until they end.

    Args:
        plan: What to do.
        look: Returns the state of all jobs.
        report: Called with the progress.
        command: The command that starts a worker.
        workers: How many workers.
        logs: A folder for their output.
        threads: Threads for each; default: its share of the cores.
        report_every: Seconds between two reports.
    """
    with start_workers(command, workers, logs, threads) as processes:
        due = 0.0
        while any(worker.is_running for worker in processes):
            if time.monotonic() >= due:
                report(status(plan, look()))
                due = time.monotonic() + report_every
            time.sleep(POLL)
        failures = [worker.failure for worker in processes if worker.failure is not None]
    if plan.missing(look().finished):
        raise TrialError(
            f"The {workers} workers ended before all runs were done. Finished runs are kept; run "
            "the same command again to continue.\n" + "\n".join(failures)
        )
    for failure in failures:
        logger.warning("A worker failed; others did its work. %s", failure)


def _what_broke(broken: Mapping[J, str]) -> str:
    shown = "\n".join(f"  {job}: {error}" for job, error in list(broken.items())[:5])
    return (
        f"{len(broken)} run{'s' if len(broken) > 1 else ''} failed. Finished runs are kept; run "
        f"the same command again to retry.\n{shown}"
    )
