"""The plan: which runs come next, given the finished ones. Pure functions.

First every arm is trained with a few values of its tuned hyperparameter, on seeds that are used for
nothing else; the value with the best mean validation figure wins, and the grid grows if that is at
its edge. Test data plays no part. Then each arm is trained with its value on the evaluation seeds,
the same for all arms of a task.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from microclip_lab.reproduction.records import Job, Record, Records
from microclip_lab.reproduction.tasks import EVALUATION_SEED, TUNING_SEED, Arm, Task
from microclip_lab.sweep.grid import best_rate, rates_to_try


@dataclass(frozen=True)
class Study:
    """All tasks with all their arms."""

    tasks: tuple[Task, ...]

    def task(self, name: str) -> Task:
        """Return the task of this name."""
        return next(task for task in self.tasks if task.name == name)

    def missing(self, records: Records) -> list[Job]:
        """Return the runs to do next; empty when all are done."""
        return [
            job
            for task, arm in self._arms()
            for job in self._next(task, arm, records)
            if job not in records
        ]

    def expected(self, records: Records) -> list[Job]:
        """Return all runs that are known so far; grids may still grow."""
        jobs: list[Job] = []
        for task, arm in self._arms():
            if arm.tuned is not None and len(first_values(task, arm)) > 1:
                scores = self.scores(task, arm, records)
                values = {*first_values(task, arm), *scores, *_to_try(task, arm, scores)}
                jobs += _tuning(task, arm, sorted(values))
            if self._rate_is_known_to_be_lost(task, arm, records):
                continue
            known = self.is_settled(task, arm, records)
            chosen = self.chosen(task, arm, records) if known else None
            if known and chosen is None and arm.tuned is not None:
                continue  # it diverged with every value
            guess = first_values(task, arm)[0] if arm.tuned is not None else None
            jobs += [
                job
                for job in self.evaluation(task, arm, chosen if known else guess)
                if not self._source_diverged(task, arm, job.seed, records)
            ]
        return jobs

    def work(self, job: Job) -> float:
        """Return the approximate duration of a run on one core, in seconds."""
        return self.task(job.task).seconds

    def work_done(self, job: Job, step: int) -> float:
        """Return about how many of them have passed at this step."""
        task = self.task(job.task)
        steps: int = task.arm(job.arm).training.get("steps", task.training.steps)
        return task.seconds * min(1.0, step / steps)

    def scores(self, task: Task, arm: Arm, records: Records) -> dict[float, float]:
        """Return the score of each value that was tried on all tuning seeds; higher is better."""
        found: dict[float, float] = {}
        tried = {
            job.value
            for job in records
            if (job.task, job.arm, job.stage) == (task.name, arm.name, "tuning")
            and job.value is not None
        }
        for value in sorted(tried):
            done = [records.get(job) for job in _tuning(task, arm, [value])]
            if all(record is not None for record in done):
                found[value] = statistics.fmean(
                    score(task, record) for record in done if record is not None
                )
        return found

    def is_settled(self, task: Task, arm: Arm, records: Records) -> bool:
        """Return whether the value of an arm is known."""
        if not all(self.is_settled(task, task.arm(name), records) for name in arm.needs):
            return False
        return arm.tuned is None or not _to_try(task, arm, self.scores(task, arm, records))

    def chosen(self, task: Task, arm: Arm, records: Records) -> float | None:
        """Return the value of a settled arm; None if it has none, or diverged with all of them."""
        if arm.tuned is None:
            return None
        values = first_values(task, arm)
        if len(values) == 1:
            return values[0]
        scores = self.scores(task, arm, records)
        best = best_rate(scores)
        return None if scores[best] == -math.inf else best

    def rate(self, task: Task, arm: Arm, value: float | None, records: Records) -> float | None:
        """Return the learning rate of an arm with this value; None if all diverged."""
        if arm.rate_of is None:
            return value
        other = task.arm(arm.rate_of)
        return self.rate(task, other, self.chosen(task, other, records), records)

    def evaluation(self, task: Task, arm: Arm, value: float | None) -> list[Job]:
        """Return the evaluation runs of an arm."""
        seeds = range(EVALUATION_SEED, EVALUATION_SEED + task.seeds)
        return [Job(task.name, arm.name, "evaluation", value, seed) for seed in seeds]

    def evaluated(self, task: Task, arm: Arm, records: Records) -> dict[int, Record]:
        """Return the existing evaluation records of an arm, by seed."""
        if not self.is_settled(task, arm, records):
            return {}
        jobs = self.evaluation(task, arm, self.chosen(task, arm, records))
        return {job.seed: records[job] for job in jobs if job in records}

    def source(self, task: Task, arm: Arm, seed: int, records: Records) -> Record | None:
        """Return the record that a run builds on, with the same seed."""
        name = arm.source or arm.shares_of
        return None if name is None else self.evaluated(task, task.arm(name), records).get(seed)

    def _arms(self) -> Iterator[tuple[Task, Arm]]:
        for task in self.tasks:
            for arm in task.arms:
                yield task, arm

    def _next(self, task: Task, arm: Arm, records: Records) -> list[Job]:
        if not all(self.is_settled(task, task.arm(name), records) for name in arm.needs):
            return []
        if self.rate_is_lost(task, arm, records):
            return []
        if arm.tuned is not None:
            values = _to_try(task, arm, self.scores(task, arm, records))
            if values:
                return _tuning(task, arm, values)
            if self.chosen(task, arm, records) is None:
                return []
        jobs = self.evaluation(task, arm, self.chosen(task, arm, records))
        return [job for job in jobs if not self.lacks_source(task, arm, job.seed, records)]

    def lacks_source(self, task: Task, arm: Arm, seed: int, records: Records) -> bool:
        """Return whether the record that a run builds on is missing or diverged."""
        if arm.source is None and arm.shares_of is None:
            return False
        source = self.source(task, arm, seed, records)
        return source is None or bool(source.diverged)

    def _source_diverged(self, task: Task, arm: Arm, seed: int, records: Records) -> bool:
        source = self.source(task, arm, seed, records)
        return source is not None and bool(source.diverged)

    def _rate_is_known_to_be_lost(self, task: Task, arm: Arm, records: Records) -> bool:
        settled = all(self.is_settled(task, task.arm(name), records) for name in arm.needs)
        return settled and self.rate_is_lost(task, arm, records)

    def rate_is_lost(self, task: Task, arm: Arm, records: Records) -> bool:
        """Return whether the arm that provides the learning rate diverged with every value."""
        if arm.rate_of is None:
            return False
        other = task.arm(arm.rate_of)
        return self.rate(task, other, self.chosen(task, other, records), records) is None


def first_values(task: Task, arm: Arm) -> tuple[float, ...]:
    """Return the first values of an arm."""
    return arm.values or task.rates


def score(task: Task, record: Record) -> float:
    """Return the validation score of a run; higher is better."""
    value = record.figure(f"best_validation_{task.recipe.headline}")
    if record.diverged or not math.isfinite(value):
        return -math.inf
    return -value if task.recipe.lower_is_better else value


def _to_try(task: Task, arm: Arm, scores: dict[float, float]) -> list[float]:
    values = first_values(task, arm)
    if len(values) == 1:
        return []
    return rates_to_try(values, scores, task.growth)


def _tuning(task: Task, arm: Arm, values: Iterable[float]) -> list[Job]:
    seeds = range(TUNING_SEED, TUNING_SEED + task.tuning_seeds)
    return [Job(task.name, arm.name, "tuning", value, seed) for value in values for seed in seeds]
