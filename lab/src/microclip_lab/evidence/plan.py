"""What to run next: tuning, the gate, then blocks of seeds until an interval decides. Pure.

Rates are 0.001 x 2^k, searched on noisy validation data at the last step with four tuning seeds
until both neighbors of the best have been tried. A task with draggers must pass the gate: the
oracle's error at least 8 % below plain training's, with an interval above 0. If it does not, no
other arm is run on it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from microclip_lab.dirty_data.catalog import TASKS
from microclip_lab.dirty_data.plan import (
    EVALUATION_SEEDS,
    HIGHEST,
    LOWEST,
    Tuned,
    best_of,
    next_rates,
    rate_of,
)
from microclip_lab.dirty_data.records import Job
from microclip_lab.evidence.arms import ARMS, ORACLE, PLAIN
from microclip_lab.evidence.catalog import BY_NAME, STUDIES, Study
from microclip_lab.evidence.records import LAST, Record, Records
from microclip_lab.evidence.sequential import Interval, Outcome, outcome, relative
from microclip_lab.jobs.progress import Status

TUNING_SEEDS = (100, 101, 102, 103)
HEADROOM = 8.0  # percent of plain training's error
AT_CLEAN_RATE = (PLAIN, "minnorm-4", "unit-4")  # the paper's protocol: untuned on the noisy task

Gate = Literal["passed", "no headroom", "open", "none needed"]
Runs = dict[int, Record]  # by seed
Figure = Callable[[Record], float]


def last_error(record: Record) -> float:
    """Return the error at the last step, on which everything is decided."""
    return record.test[LAST]


class Plan:
    """All runs of some studies.

    Args:
        studies: The studies, in order.
        arms: The names of the arms to run, besides plain training and the oracle; None: all.
        most: The largest number of looks; None: the study's.
        also: More runs, of tasks that are not studied here; they come last.
    """

    def __init__(
        self,
        studies: Sequence[Study],
        arms: Iterable[str] | None = None,
        most: int | None = None,
        also: Sequence[Job] = (),
    ) -> None:
        self.studies, self.most, self.also = studies, most, also
        self._over: set[str] = set()  # records only grow, so what is over stays so
        self.arms = None if arms is None else {PLAIN, ORACLE, *arms}

    def missing(self, records: Records) -> Iterator[Job]:
        """Yield the runs that can start now, those of earlier studies first."""
        for study in self.studies:
            if study.name not in self._over:
                jobs = self.missing_of(study, records)
                if not jobs and not _waits_for_twin(records, study):
                    self._over.add(study.name)
                yield from jobs
        yield from (job for job in self.also if job not in records)

    def missing_of(self, study: Study, records: Records) -> list[Job]:
        """Return the runs of a study that can start now."""
        arms = [arm for arm in study.arms if self.arms is None or arm in self.arms]
        if searching := next_jobs(records, study, PLAIN):
            return searching
        looks = study.looks[: self.most]
        jobs: list[Job] = []
        seeds = {PLAIN: looks[0]}
        if ORACLE in arms:
            if searching := next_jobs(records, study, ORACLE):
                return searching
            seeds[ORACLE] = _reached(records, study, ORACLE, looks, _gate_is_open)
            if gate(records, study, looks) in ("open", "no headroom"):
                seeds[PLAIN] = seeds[ORACLE]
                return _evaluations(records, study, seeds)
        for arm in arms:
            if arm in seeds:
                continue
            if searching := next_jobs(records, study, arm):
                jobs += searching
            else:
                seeds[arm] = _reached(records, study, arm, looks, _is_undecided)
        seeds[PLAIN] = max(seeds.values())
        jobs += _evaluations(records, study, seeds)
        return jobs + _at_clean_rate(records, study, looks[0])

    def plain_rate(self, records: Records, name: str) -> float | None:
        """Return the tuned rate of plain training on a task, if there is one."""
        study = BY_NAME.get(name)
        if study is None:
            return None
        return tuned(records, study, PLAIN).rate if is_tuned(records, study, PLAIN) else None

    def progress(self, records: Records) -> Status:
        """Return how many studies are over; how many runs a study takes is not known before."""
        total = max(1, len(self.studies))
        return Status(len(records), max(1, len(records)), len(self._over), total)


def _evaluations(records: Records, study: Study, seeds: dict[str, int]) -> list[Job]:
    jobs = []
    for arm, count in seeds.items():
        rate = tuned(records, study, arm).rate
        jobs += [Job(study.name, arm, "evaluate", rate, s) for s in EVALUATION_SEEDS[:count]]
    return [job for job in jobs if job not in records]


def clean_rate(records: Records, study: Study) -> float | None:
    """Return plain training's rate on the task without draggers, once it is known."""
    twin = BY_NAME.get(study.clean_twin)
    if twin is None or not is_tuned(records, twin, PLAIN):
        return None
    return tuned(records, twin, PLAIN).rate


def _waits_for_twin(records: Records, study: Study) -> bool:
    return bool(study.clean_twin) and clean_rate(records, study) is None


def _at_clean_rate(records: Records, study: Study, count: int) -> list[Job]:
    rate = clean_rate(records, study)
    if rate is None:
        return []
    jobs = [
        Job(study.name, arm, "evaluate", rate, seed)
        for arm in AT_CLEAN_RATE
        if arm in study.arms
        for seed in EVALUATION_SEEDS[:count]
    ]
    return [job for job in jobs if job not in records]


# ---- tuning


def scores_of(records: Records, study: Study, arm: str) -> dict[int, float]:
    """Return the mean metric on noisy validation data of every k run with all tuning seeds."""
    found = {}
    for k in range(LOWEST, HIGHEST + 1):
        runs = [records.get(Job(study.name, arm, "tune", rate_of(k), s)) for s in TUNING_SEEDS]
        values = [run.last_validation for run in runs if run is not None]
        if len(values) == len(TUNING_SEEDS):
            found[k] = statistics.fmean(values) if min(values) > -math.inf else -math.inf
    return found


def start_of(records: Records, study: Study, arm: str) -> int | None:
    """Return the k at which an arm's search starts; None until plain training is tuned."""
    if arm == PLAIN:
        return study.task.start
    return tuned(records, study, PLAIN).k if is_tuned(records, study, PLAIN) else None


def next_jobs(records: Records, study: Study, arm: str) -> list[Job]:
    """Return the tuning runs to do next; none once the arm is tuned."""
    start = start_of(records, study, arm)
    assert start is not None, "plain training is tuned first"
    jobs = [
        Job(study.name, arm, "tune", rate_of(k), seed)
        for k in next_rates(scores_of(records, study, arm), start)
        for seed in TUNING_SEEDS
    ]
    return [job for job in jobs if job not in records]


def is_tuned(records: Records, study: Study, arm: str) -> bool:
    """Return whether an arm's search is over."""
    start = start_of(records, study, arm)
    return start is not None and not next_rates(scores_of(records, study, arm), start)


def tuned(records: Records, study: Study, arm: str) -> Tuned:
    """Return the learning rate of an arm whose search is over."""
    scores, start = scores_of(records, study, arm), start_of(records, study, arm)
    assert start is not None
    return Tuned(best_of(scores, start), scores)


# ---- looks


def evaluated(records: Records, study: Study, arm: str, rate: float | None = None) -> Runs:
    """Return the evaluation runs of an arm at its tuned rate, or another one, by seed."""
    if rate is None:
        if not is_tuned(records, study, arm):
            return {}
        rate = tuned(records, study, arm).rate
    jobs = {s: Job(study.name, arm, "evaluate", rate, s) for s in EVALUATION_SEEDS}
    return {seed: records[job] for seed, job in jobs.items() if job in records}


def compared(
    base: Runs, other: Runs, looks: Sequence[int], figure: Figure = last_error
) -> tuple[Interval | None, int]:
    """Return by how much the error is below the base's at the last finished look, and the look.

    Seeds beyond that look do not count: looking is only allowed where it was planned.
    """
    for place in reversed(range(len(looks))):
        seeds = range(looks[place])
        if all(seed in base and seed in other for seed in seeds):
            pairs = [(figure(base[seed]), figure(other[seed])) for seed in seeds]
            values = [one for one, _ in pairs], [two for _, two in pairs]
            return relative(*values, len(looks)), place + 1
    return None, 0


def effect(
    records: Records, study: Study, arm: str, base: str = PLAIN, figure: Figure = last_error
) -> Interval | None:
    """Return an arm's relative effect at the last finished look."""
    runs = evaluated(records, study, base), evaluated(records, study, arm)
    return compared(*runs, study.looks, figure)[0]


def outcome_of(records: Records, study: Study, arm: str) -> Outcome:
    """Return what an arm's interval says."""
    return outcome(effect(records, study, arm), study.margin)


def gate(records: Records, study: Study, looks: Sequence[int] | None = None) -> Gate:
    """Return whether a task has room for a gain."""
    if ORACLE not in study.arms:
        return "none needed"
    looks = looks or study.looks
    runs = evaluated(records, study, PLAIN), evaluated(records, study, ORACLE)
    found, look = compared(*runs, study.looks)
    if found is None or _gate_is_open(found, study.margin):
        return "open" if look < len(looks) else "no headroom"
    return "passed" if found.low > 0 and found.mean >= HEADROOM else "no headroom"


def _gate_is_open(found: Interval | None, margin: float) -> bool:
    if found is None:
        return True
    passed = found.low > 0 and found.mean >= HEADROOM
    return not passed and found.high >= HEADROOM


def _is_undecided(found: Interval | None, margin: float) -> bool:
    return outcome(found, margin) == "undecided"


def _reached(
    records: Records,
    study: Study,
    arm: str,
    looks: Sequence[int],
    is_open: Callable[[Interval | None, float], bool],
) -> int:
    """Return how many seeds an arm needs by now: one look more while it is open."""
    runs = evaluated(records, study, PLAIN), evaluated(records, study, arm)
    found, look = compared(*runs, study.looks)
    if look and not is_open(found, study.margin):
        return study.looks[look - 1]
    return looks[min(look, len(looks) - 1)]


def editions() -> dict[tuple[str, str], str]:
    """Return the current edition of each task and arm."""
    tasks = [*(study.task for study in STUDIES), *TASKS.values()]
    return {
        (task.name, arm.name): f"{task.edition}.{arm.edition}"
        for task in tasks
        for arm in ARMS.values()
    }
