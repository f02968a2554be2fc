"""What a plan is: it says which jobs are next, given those that are finished."""

from __future__ import annotations

from typing import Protocol

from microclip.demo.progress import Status
from microclip.recipes.sweep.grid import Finished
from microclip.recipes.sweep.job import Job
from microclip.recipes.sweep.register import Standing


class Plan(Protocol):
    """The plan of a sweep (`Grid`) or of a race (`Race`)."""

    @property
    def headline(self) -> str:
        """What the recipe calls the figure to choose by."""

    @property
    def steps(self) -> int:
        """Of one training."""

    def missing(self, finished: Finished) -> list[Job]:
        """Return the jobs that can and must be done next; none: all is done."""

    def expected(self, finished: Finished) -> list[Job]:
        """Return all jobs as far as they are known by now."""

    def work(self, job: Job) -> int:
        """Return how many steps a job takes."""


def status(plan: Plan, standing: Standing) -> Status:
    """Return how far a plan is; jobs that are under way count by the steps they have taken."""
    finished, under_way = standing.finished, standing.under_way
    jobs = plan.expected(finished)
    done = [job for job in jobs if job in finished]
    work_done = sum(plan.work(job) for job in done)
    for job in jobs:
        if job in under_way and job not in finished:
            goal, work = job.until or plan.steps, plan.work(job)
            work_done += min(max(under_way[job] - (goal - work), 0), work)
    return Status(len(done), len(jobs), work_done, sum(plan.work(job) for job in jobs))
