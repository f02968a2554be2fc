"""The search for learning rates, then the evaluation at the rate that was found. Pure functions.

Rates are 0.001 x 2^k. The search looks at the metric on *noisy* validation data at the last step,
averaged over tuning seeds that are used for nothing else, and ends once both neighbors of the best
rate have been tried. Plain training is tuned first; every other arm starts from its rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from microclip_lab.tuned_arms.records import AnyRecord, Job, R

PLAIN = "plain"  # the arm that all others are compared with
EVALUATION_SEEDS = range(100)  # evaluation uses the first few
LOWEST, HIGHEST = -10, 7  # from 1e-6 to 0.128


class Searched(Protocol):
    """What has arms to tune: a task, or a study of one."""

    @property
    def name(self) -> str:
        """The name of the task."""

    @property
    def start(self) -> int:
        """Where the search of plain training's rate starts: 0.001 x 2^start."""

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        """The seeds that every rate is tried with."""


def rate_of(k: int) -> float:
    """Return a learning rate.

    >>> rate_of(0), rate_of(2), rate_of(-1)
    (0.001, 0.004, 0.0005)
    """
    return 0.001 * 2.0**k


def best_of(scores: Mapping[int, float], start: int) -> int:
    """Return the k with the best score; of equal ones, the one nearest to the start.

    Scores are compared in two digits: records may keep three, and their rounding must not decide.
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


def scores_of(records: Mapping[Job, AnyRecord], task: Searched, arm: str) -> dict[int, float]:
    """Return the mean validation metric of every k that was run with all tuning seeds."""
    found = {}
    for k in range(LOWEST, HIGHEST + 1):
        jobs = [Job(task.name, arm, "tune", rate_of(k), seed) for seed in task.tuning_seeds]
        if all(job in records for job in jobs):
            values = [records[job].last_validation for job in jobs]
            found[k] = statistics.fmean(values) if min(values) > -math.inf else -math.inf
    return found


def start_of(records: Mapping[Job, AnyRecord], task: Searched, arm: str) -> int | None:
    """Return the k at which an arm's search starts; None until plain training is tuned."""
    if arm == PLAIN:
        return task.start
    found = _searched(records, task, PLAIN)
    return None if found is None else found.k


def _searched(records: Mapping[Job, AnyRecord], task: Searched, arm: str) -> Tuned | None:
    """Return the rate that was found; None while the search goes on."""
    start = start_of(records, task, arm)
    if start is None:
        return None
    scores = scores_of(records, task, arm)
    return None if next_rates(scores, start) else Tuned(best_of(scores, start), scores)


def next_jobs(records: Mapping[Job, AnyRecord], task: Searched, arm: str) -> list[Job]:
    """Return the tuning runs to do next; none once the arm is tuned."""
    start = start_of(records, task, arm)
    assert start is not None, "plain training is tuned first"
    jobs = [
        Job(task.name, arm, "tune", rate_of(k), seed)
        for k in next_rates(scores_of(records, task, arm), start)
        for seed in task.tuning_seeds
    ]
    return [job for job in jobs if job not in records]


def is_tuned(records: Mapping[Job, AnyRecord], task: Searched, arm: str) -> bool:
    """Return whether an arm's search is over."""
    return _searched(records, task, arm) is not None


def tuned(records: Mapping[Job, AnyRecord], task: Searched, arm: str) -> Tuned:
    """Return the learning rate of an arm whose search is over."""
    found = _searched(records, task, arm)
    assert found is not None, f"{task.name}, {arm}: its search is not over"
    return found


def plain_rate(records: Mapping[Job, AnyRecord], task: Searched) -> float | None:
    """Return the tuned rate of plain training, if there is one yet."""
    found = _searched(records, task, PLAIN)
    return None if found is None else found.rate


def evaluated(
    records: Mapping[Job, R],
    task: Searched,
    arm: str,
    seeds: int = len(EVALUATION_SEEDS),
    rate: float | None = None,
) -> dict[int, R]:
    """Return the evaluation runs of an arm at its tuned rate, or another one, by seed."""
    if rate is None:
        found = _searched(records, task, arm)
        if found is None:
            return {}
        rate = found.rate
    jobs = {s: Job(task.name, arm, "evaluate", rate, s) for s in EVALUATION_SEEDS[:seeds]}
    return {seed: records[job] for seed, job in jobs.items() if job in records}
