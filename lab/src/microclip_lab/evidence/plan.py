"""What to run next: tuning, the gate, then blocks of seeds until an interval decides. Pure.

Rates are 0.001 x 2^k, searched on noisy validation data at the last step with four tuning seeds
until both neighbors of the best have been tried. A task with draggers must pass the gate: the
oracle's error at least 8 % below plain training's, with an interval above 0. If it does not, no
other arm is run on it.

Amended after 15 tasks: seeds are added to an arm not only while its own error is undecided,
but also while a claim about it is, up to the same last look. Amended again after the first 23: four
more tasks, and `LossHistory` on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from microclip_lab.dirty_data.catalog import TASKS
from microclip_lab.evidence.arms import ARMS, ORACLE
from microclip_lab.evidence.catalog import BY_NAME, STUDIES, Study
from microclip_lab.evidence.records import LAST, Record, Records
from microclip_lab.evidence.sequential import Interval, Outcome, outcome, relative
from microclip_lab.jobs.progress import Status
from microclip_lab.tuned_arms.records import Job
from microclip_lab.tuned_arms.search import (
    EVALUATION_SEEDS,
    PLAIN,
    evaluated,
    next_jobs,
    plain_rate,
    tuned,
)

HEADROOM = 8.0  # percent of plain training's error
AT_CLEAN_RATE = (PLAIN, "minnorm-4", "unit-4")  # the paper's protocol: untuned on the noisy task

Gate = Literal["passed", "no headroom", "undecided", "open", "none needed"]
Runs = dict[int, Record]  # by seed
Figure = Callable[[Record], float]
OpenArms = Callable[[Records, Study], frozenset[str]]


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
        open_arms: Returns the arms of a study that a claim is still undecided about.
    """

    def __init__(
        self,
        studies: Sequence[Study],
        arms: Iterable[str] | None = None,
        most: int | None = None,
        also: Sequence[Job] = (),
        open_arms: OpenArms = lambda records, study: frozenset(),
    ) -> None:
        self.studies, self.most, self.also = studies, most, also
        self.open_arms = open_arms
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
            if gate(records, study, looks) != "passed":
                seeds[PLAIN] = seeds[ORACLE]
                return _evaluations(records, study, seeds)
        asked = self.open_arms(records, study)
        for arm in arms:
            if arm in seeds:
                continue
            if searching := next_jobs(records, study, arm):
                jobs += searching
            else:
                is_open = _always if arm in asked else _is_undecided
                seeds[arm] = _reached(records, study, arm, looks, is_open)
        seeds[PLAIN] = max(seeds.values())
        jobs += _evaluations(records, study, seeds)
        return jobs + _at_clean_rate(records, study, looks[0])

    def plain_rate_of(self, records: Records, name: str) -> float | None:
        """Return the tuned rate of plain training on a task, if there is one."""
        return plain_rate(records, BY_NAME[name]) if name in BY_NAME else None

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
    return None if twin is None else plain_rate(records, twin)


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


# ---- looks


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
        return "open" if look < len(looks) else "undecided"
    return "passed" if found.low > 0 and found.mean >= HEADROOM else "no headroom"


def _gate_is_open(found: Interval | None, margin: float) -> bool:
    if found is None:
        return True
    passed = found.low > 0 and found.mean >= HEADROOM
    return not passed and found.high >= HEADROOM


def _is_undecided(found: Interval | None, margin: float) -> bool:
    return outcome(found, margin) == "undecided"


def _always(found: Interval | None, margin: float) -> bool:
    return True


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
