"""What to run next: the search for learning rates, then the evaluation. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from microclip_lab.dirty_data.arms import ARMS, Arm, arms_of
from microclip_lab.dirty_data.records import Records
from microclip_lab.dirty_data.task import Task
from microclip_lab.jobs.progress import Status
from microclip_lab.tuned_arms.records import Job
from microclip_lab.tuned_arms.search import (
    EVALUATION_SEEDS,
    PLAIN,
    is_tuned,
    next_jobs,
    plain_rate,
    start_of,
    tuned,
)

DEVELOPMENT_SEEDS = range(1000, 2000)  # to choose the constants of rules; never evaluated
RUNS_OF_SEARCH = 8  # a guess for progress: four rates, two seeds


class Plan:
    """All runs of some tasks and arms.

    Args:
        tasks: The tasks.
        arms: The names of the arms to run, besides plain training, from whose rate they start.
        seeds: How many seeds to evaluate.
        tuning: Whether to tune.
        evaluating: Whether to evaluate what is tuned.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        arms: Iterable[str],
        seeds: int,
        *,
        tuning: bool = True,
        evaluating: bool = True,
    ) -> None:
        self.tasks, self.wanted = tasks, {PLAIN, *arms}
        self.seeds = EVALUATION_SEEDS[:seeds]
        self.tuning, self.evaluating = tuning, evaluating

    def pairs(self) -> list[tuple[Task, Arm]]:
        """Return every task with each of its arms."""
        return [
            (task, arm) for task in self.tasks for arm in arms_of(task) if arm.name in self.wanted
        ]

    def missing(self, records: Records) -> list[Job]:
        """Return the runs that can start now."""
        jobs: list[Job] = []
        for task, arm in self.pairs():
            if start_of(records, task, arm.name) is None:
                continue  # plain training comes first
            searching = next_jobs(records, task, arm.name)
            if searching:
                jobs += searching if self.tuning else []
            elif self.evaluating:
                rate = tuned(records, task, arm.name).rate
                planned = [Job(task.name, arm.name, "evaluate", rate, s) for s in self.seeds]
                jobs += [job for job in planned if job not in records]
        return jobs

    def untuned(self, records: Records) -> list[str]:
        """Return the arms without a learning rate yet, as "task/arm"."""
        return [
            f"{task.name}/{arm.name}"
            for task, arm in self.pairs()
            if not is_tuned(records, task, arm.name)
        ]

    def plain_rate_of(self, records: Records, name: str) -> float | None:
        """Return the tuned rate of plain training on a task, if there is one."""
        return plain_rate(records, next(task for task in self.tasks if task.name == name))

    def progress(self, records: Records) -> Status:
        """Return the progress; how many runs a search takes is a guess until it is over."""
        done = total = 0
        untuned = set(self.untuned(records))
        counts = Counter((job.task, job.arm, job.stage) for job in records)
        for task, arm in self.pairs():
            searched = counts[task.name, arm.name, "tune"] if self.tuning else 0
            judged = counts[task.name, arm.name, "evaluate"] if self.evaluating else 0
            is_open = self.tuning and f"{task.name}/{arm.name}" in untuned
            done += searched + judged
            total += max(searched + 2, RUNS_OF_SEARCH) if is_open else searched
            total += max(judged, len(self.seeds)) if self.evaluating else 0
        return Status(done, total, done, max(total, 1))


def editions(tasks: Iterable[Task]) -> dict[tuple[str, str], str]:
    """Return the current edition of each task and arm."""
    return {
        (task.name, arm.name): f"{task.edition}.{arm.edition}"
        for task in tasks
        for arm in ARMS.values()
    }
