"""What to run next: the search for learning rates, then the evaluation. Pure functions of records.

Rates are 0.001 x 2^k. The search looks at the metric on *noisy* validation data at the last step,
averaged over tuning seeds that are used for nothing else, and ends once both neighbors of the best
rate have been tried. Plain training is tuned first; every other arm starts from its rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from microclip_lab.dirty_data.arms import ARMS, PLAIN, Arm, arms_of
from microclip_lab.dirty_data.records import Job, Record, Records
from microclip_lab.dirty_data.task import Task

TUNING_SEEDS = (100, 101)
EVALUATION_SEEDS = range(100)  # evaluation uses the first few
DEVELOPMENT_SEEDS = range(1000, 2000)  # to choose the constants of rules; never evaluated
LOWEST, HIGHEST = -10, 7  # from 1e-6 to 0.128


def rate_of(k: int) -> float:
    """Return a learning rate.

    >>> rate_of(0), rate_of(2), rate_of(-1)
    (0.001, 0.004, 0.0005)
    """
    return 0.001 * 2.0**k


def best_of(scores: Mapping[int, float], start: int) -> int:
    """Return the k with the best score; of equal ones, the one nearest to the start.

    Scores are compared in two digits: records keep three, and their rounding must not decide.
    """
    return max(scores, key=lambda k: (round(scores[k], 2), -abs(k - start), -k))


def next_rates(scores: Mapping[int, float], start: int) -> list[int]:
    """Return each k to try next: none once both neighbors of the best one have been tried.

    >>> next_rates({}, 0), next_rates({-1: 5.0, 0: 6.0, 1: 7.0}, 0)
    ([-1, 0, 1], [2])
    >>> next_rates({-1: 5.0, 0: 6.0, 1: 7.0, 2: 6.5}, 0)
    []
    """
    wanted = {start - 1, start, start + 1}
    if wanted <= set(scores):
        best = best_of(scores, start)
        wanted = {best - 1, best, best + 1}
    return sorted(k for k in wanted if k not in scores and LOWEST <= k <= HIGHEST)


@dataclass(frozen=True)
class Tuned:
    """The learning rate that was found."""

    k: int
    scores: Mapping[int, float]  # mean validation metric by k

    @property
    def rate(self) -> float:
        """The rate itself."""
        return rate_of(self.k)

    @property
    def is_at_edge(self) -> bool:
        """Whether a neighbor was not tried because it is out of range."""
        return not {self.k - 1, self.k + 1} <= set(self.scores)


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
            start = start_of(records, task, arm.name)
            if start is None:
                continue  # plain training comes first
            searching = next_jobs(records, task, arm.name, start)
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

    def plain_rate(self, records: Records, name: str) -> float | None:
        """Return the tuned rate of plain training on a task, if there is one."""
        task = next(task for task in self.tasks if task.name == name)
        return tuned(records, task, PLAIN).rate if is_tuned(records, task, PLAIN) else None


def scores_of(records: Records, task: Task, arm: str) -> dict[int, float]:
    """Return the mean validation metric of every k that was run with all tuning seeds."""
    found = {}
    for k in range(LOWEST, HIGHEST + 1):
        runs = [records.get(Job(task.name, arm, "tune", rate_of(k), s)) for s in TUNING_SEEDS]
        values = [run.last_validation for run in runs if run is not None]
        if len(values) == len(TUNING_SEEDS):
            found[k] = statistics.fmean(values) if min(values) > -math.inf else -math.inf
    return found


def start_of(records: Records, task: Task, arm: str) -> int | None:
    """Return the k at which an arm's search starts; None until plain training is tuned."""
    if arm == PLAIN:
        return task.start
    return tuned(records, task, PLAIN).k if is_tuned(records, task, PLAIN) else None


def next_jobs(records: Records, task: Task, arm: str, start: int) -> list[Job]:
    """Return the tuning runs to do next; none once the arm is tuned."""
    jobs = [
        Job(task.name, arm, "tune", rate_of(k), seed)
        for k in next_rates(scores_of(records, task, arm), start)
        for seed in TUNING_SEEDS
    ]
    return [job for job in jobs if job not in records]


def is_tuned(records: Records, task: Task, arm: str) -> bool:
    """Return whether an arm's search is over."""
    start = start_of(records, task, arm)
    return start is not None and not next_rates(scores_of(records, task, arm), start)


def tuned(records: Records, task: Task, arm: str) -> Tuned:
    """Return the learning rate of an arm whose search is over."""
    scores = scores_of(records, task, arm)
    start = start_of(records, task, arm)
    assert start is not None
    return Tuned(best_of(scores, start), scores)


def editions(tasks: Iterable[Task]) -> dict[tuple[str, str], str]:
    """Return the current edition of each task and arm."""
    return {
        (task.name, arm.name): f"{task.edition}.{arm.edition}"
        for task in tasks
        for arm in ARMS.values()
    }


def evaluated(records: Records, task: Task, arm: str, seeds: int) -> dict[int, Record]:
    """Return the evaluation runs of an arm at its tuned rate, by seed."""
    if not is_tuned(records, task, arm):
        return {}
    rate = tuned(records, task, arm).rate
    jobs = {seed: Job(task.name, arm, "evaluate", rate, seed) for seed in EVALUATION_SEEDS[:seeds]}
    return {seed: records[job] for seed, job in jobs.items() if job in records}
