"""Working off a plan together: the loop of each worker, and of the process that waits for them.

What to do next is asked of the plan whenever a job ends, so going on after an interruption, or
joining others, is the same as beginning. What a job is, and how it is done, is others' business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from microclip_lab.jobs.job import Result
from microclip_lab.jobs.job_queue import Claim, GoneError, Listed, Register, Standing
from microclip_lab.jobs.plan import Plan, status
from microclip_lab.jobs.progress import Status
from microclip_lab.jobs.storage import GRACE
from microclip_lab.jobs.subprocesses import fleet

logger = logging.getLogger(__name__)

POLL = 1.0  # seconds between two looks at what others do

J = TypeVar("J", bound=Listed)
R = TypeVar("R")
T = TypeVar("T")
Look = Callable[[], Standing[J, R]]
Do = Callable[[Claim[J], Standing[J, R]], tuple[Result, float]]
Report = Callable[[Status], None]


class StoppedError(KeyboardInterrupt):
    """The work was asked to stop, and did so with its trainings safe."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(
            "Interrupted. What was finished is kept, and what was begun has a checkpoint: the same "
            "command goes on from there."
        )
        self.exit_code = exit_code


class TrialError(OSError):
    """Trainings ended in errors, so that not all can be done."""


def work(
    plan: Plan[J, R], register: Register[J], look: Look[J, R], do: Do[J, R], report: Report
) -> None:
    """Do what is to be done, together with others, until all of it is done.

    Args:
        plan: What is to be done.
        register: Who does it.
        look: Says how things are.
        do: Does a job; returns what came of it, and the figure that it is known by.
        report: Hears how far all is.
    """
    while True:
        register.release_abandoned()
        standing = look()
        report(status(plan, standing))
        missing = plan.missing(standing.finished)
        possible = [job for job in missing if job not in standing.broken]
        if not missing:
            return
        if not possible:
            raise TrialError(_what_broke(standing.broken))
        claim = register.claim(possible)
        if claim is None:
            time.sleep(POLL)
        else:
            _do(register, claim, standing, do)


def _do(register: Register[J], claim: Claim[J], standing: Standing[J, R], do: Do[J, R]) -> None:
    """Do a job; whatever happens, the register hears of it."""
    try:
        with register.beating(claim):
            result, value = do(claim, standing)
        register.complete(claim, result, value)
    except GoneError:
        pass  # whoever has it now will finish it
    except KeyboardInterrupt as error:
        register.give_back(claim, "it was interrupted")
        raise StoppedError(getattr(error, "exit_code", 130)) from error
    except Exception as error:
        logger.exception("The %s ended in an error.", claim.job)
        register.give_up(claim, f"{type(error).__name__}: {error}")


def alone(train: Callable[[], T]) -> T:
    """Train; if somebody holds the folder who was given up too early, wait for a while."""
    end = time.monotonic() + GRACE
    while True:
        try:
            return train()
        except FileExistsError:
            if time.monotonic() > end:
                raise
            time.sleep(POLL)


def oversee(
    plan: Plan[J, R],
    look: Look[J, R],
    report: Report,
    again: Sequence[str],
    workers: int,
    logs: Path,
    *,
    threads: int | None = None,
    report_every: float = POLL,
) -> None:
    """Let others work and say how far they are.

    Args:
        plan: What is to be done.
        look: Says how things are.
        report: Hears how far all is.
        again: The command that starts a worker.
        workers: How many of them.
        logs: A folder for what they say.
        threads: That each may use; its share of the cores unless given.
        report_every: Seconds between two reports.
    """
    with fleet(again, workers, logs, threads) as hands:
        due = 0.0
        while any(hand.works for hand in hands):
            if time.monotonic() >= due:
                report(status(plan, look()))
                due = time.monotonic() + report_every
            time.sleep(POLL)
        complaints = [hand.complaint for hand in hands if hand.complaint is not None]
    if plan.missing(look().finished):
        raise TrialError(
            f"The {workers} workers ended before all was done. What was finished is kept; "
            "the same command goes on.\n" + "\n".join(complaints)
        )
    for complaint in complaints:
        logger.warning("A worker ended early; others did its work. %s", complaint)


def _what_broke(broken: Mapping[J, str]) -> str:
    shown = "\n".join(f"  {job}: {error}" for job, error in list(broken.items())[:5])
    return (
        f"{len(broken)} training{'s' if len(broken) > 1 else ''} ended in an error. What was "
        f"finished is kept; the same command tries these again.\n{shown}"
    )
