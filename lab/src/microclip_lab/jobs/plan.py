"""What a plan is: it says which jobs are next, given those that are finished."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from microclip_lab.jobs.job import Job, Result
from microclip_lab.jobs.job_queue import Listed, Standing
from microclip_lab.jobs.progress import Status

J = TypeVar("J", bound=Listed)
R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)


class Plan(Protocol[J, R_contra]):
    """A plan, of whatever jobs."""

    def missing(self, finished: Mapping[J, R_contra]) -> list[J]:
        """Return the jobs that can and must be done next; none: all is done."""

    def expected(self, finished: Mapping[J, R_contra]) -> list[J]:
        """Return all jobs as far as they are known by now."""

    def work(self, job: J) -> float:
        """Return how much work a job is."""

    def work_done(self, job: J, step: int) -> float:
        """Return how much of it is done after so many steps."""


class Sweep(Plan[Job, Result], Protocol):
    """The plan of a sweep (`Grid`) or of a race (`Race`)."""

    @property
    def headline(self) -> str:
        """What the recipe calls the figure to choose by."""

    @property
    def steps(self) -> int:
        """Of one training."""


def status(plan: Plan[J, R], standing: Standing[J, R]) -> Status:
    """Return how far a plan is; jobs that are under way count by the steps they have taken."""
    finished, under_way = standing.finished, standing.under_way
    jobs = plan.expected(finished)
    done = [job for job in jobs if job in finished]
    work_done = sum(plan.work(job) for job in done)
    for job in jobs:
        if job in under_way and job not in finished:
            work_done += plan.work_done(job, under_way[job])
    return Status(len(done), len(jobs), work_done, sum(plan.work(job) for job in jobs))
