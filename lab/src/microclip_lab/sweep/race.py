"""The plan of a race: which runs come next, given the finished ones. Pure functions.

n candidates train to the first rung, the better half of them to the second, and so on; the last one
trains to the end. Every rung costs about the same, and all of them no more than the budget. All
candidates start from the same weights, with the same data in the same order. The validation figure
at a rung decides; ties go to plain training, then to the larger b, which is closer to it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from microclip_lab.jobs.plan import PLAIN, Cell, Job, Result, cells
from microclip_lab.sweep.config import SweepConfig
from microclip_lab.sweep.grid import Finished, rounded
from microclip_lab.training.components import weights_examples
from microclip_lab.training.config import SettingError

KEEPS_PLAIN = 3.0  # from this budget on, plain training always stays in
PAST_WARM_UP = 1.5  # times the warm-up: no candidate should be dropped before
MOST_FOR_FIRST = 0.75  # share of the losers' budget that the first rung may use


@dataclass(frozen=True)
class Rung:
    """A stage of a race."""

    step: int  # where it ends
    field: int  # how many candidates run it


def rungs(candidates: int, steps: int, budget: float = 2.0, warm_up: int = 0) -> tuple[Rung, ...]:
    """Return the rungs of a race; the last one is at the end, for the winner alone.

    With s_k the rungs and n_k the candidates that run to s_k, a race costs
    T + sum_k s_k (n_k - n_{k+1}) steps. Rungs of equal cost R end at s_k = sum_{i<=k} R / n_i, and
    R = (budget - 1) T / (K - sum_i 1 / n_i) uses up the budget; rounding down keeps below it.

    While the learning rate warms up, candidates hardly differ. So the first rung is delayed until
    after it as far as the budget allows, and the others share the rest in the same way.

    >>> [rung.step for rung in rungs(8, 1000)], cost(rungs(8, 1000))
    ([58, 176, 411, 1000], 1995)
    >>> [rung.step for rung in rungs(8, 1000, warm_up=60)], cost(rungs(8, 1000, warm_up=60))
    ([90, 164, 312, 1000], 2000)
    """
    if candidates < 1 or steps < 1:
        raise SettingError(
            f"A race needs at least one candidate and one step, but got {candidates} candidates "
            f"and {steps} steps."
        )
    fields = halvings(candidates)[:-1]
    spare = (budget - 1) * steps  # for the candidates that will lose
    ends = _equal_rungs(fields, spare)
    if ends and ends[0] < 1:
        raise SettingError(
            f"{steps} steps are too few to race {candidates} candidates: the first rung would end "
            "before the first step. Race fewer candidates, or train longer."
        )
    if ends:
        affordable = MOST_FOR_FIRST * spare / (candidates - 1)
        first = max(ends[0], min(PAST_WARM_UP * warm_up, affordable))
        if first > ends[0]:
            left = spare - first * (candidates - 1)
            later = _equal_rungs(fields[1:], left)
            if not later or later[0] >= 1:  # else two rungs would be at the same step
                ends = [first, *(first + end for end in later)]
    # the slack keeps rounding errors from missing a whole number
    found = [
        Rung(min(steps, math.floor(end * (1 + 1e-12))), field)
        for end, field in zip(ends, fields, strict=True)
    ]
    return (*found, Rung(steps, 1))


def _equal_rungs(fields: list[int], spare: float) -> list[float]:
    """Return the ends of rungs of equal cost that use up the losers' budget."""
    if not fields:
        return []
    each = spare / (len(fields) - sum(1 / field for field in fields))
    return list(itertools.accumulate(each / field for field in fields))


def halvings(candidates: int) -> list[int]:
    """Return how many candidates are left, rung by rung.

    >>> halvings(11)
    [11, 6, 3, 2, 1]
    """
    fields = [candidates]
    while fields[-1] > 1:
        fields.append(-(-fields[-1] // 2))
    return fields


def cost(race: tuple[Rung, ...]) -> int:
    """Return the total steps of all candidates."""
    before, total = 0, 0
    for rung in race:
        total += rung.field * (rung.step - before)
        before = rung.step
    return total


@dataclass(frozen=True)
class Lap:
    """A finished rung: its candidates, best first, with their mean validation figures."""

    rung: Rung
    ranking: tuple[Cell, ...]
    figures: tuple[float, ...]  # in that order; NaN: diverged
    staying: tuple[Cell, ...]


@dataclass(frozen=True)
class Race:
    """The plan of a race."""

    config: SweepConfig
    headline: str
    lower_is_better: bool
    learning_rate: float  # the recipe's
    first_seed: int
    steps: int  # of one run
    warm_up: int = 0  # steps over which the learning rate rises

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The candidates, plain training first."""
        return cells(self.config.rules, self.config.sizes, weights_examples)

    @property
    def seeds(self) -> range:
        """The seeds of the race."""
        return range(self.first_seed, self.first_seed + self.config.race_seeds)

    @property
    def keeps_plain(self) -> bool:
        """Whether plain training stays in until the end, however bad it is."""
        return self.config.budget >= KEEPS_PLAIN

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """Where the field is halved; plain training is not counted if it stays in anyway."""
        if self.keeps_plain:
            return rungs(len(self.cells) - 1, self.steps, self.config.budget - 1, self.warm_up)
        return rungs(len(self.cells), self.steps, self.config.budget, self.warm_up)

    @property
    def cost(self) -> int:
        """The total steps of all candidates."""
        return len(self.seeds) * (cost(self.rungs) + self.keeps_plain * self.steps)

    def missing(self, finished: Finished) -> list[Job]:
        """Return the jobs to run next; empty when the race is over."""
        field: Sequence[Cell] = self.cells
        for rung in self.rungs:
            jobs = self._jobs(field, rung)
            missing = [job for job in jobs if job not in finished]
            if missing:
                return missing
            field = self._lap(field, rung, finished).staying
        return []

    def expected(self, finished: Finished) -> list[Job]:
        """Return all jobs; for future rungs, the right number of them."""
        jobs: dict[Job, None] = {}
        field: Sequence[Cell] = self.cells
        for rung in self.rungs:
            here = self._jobs(field, rung)
            jobs |= dict.fromkeys(here)
            if all(job in finished for job in here):
                field = self._lap(field, rung, finished).staying
            else:
                field = field[: self._places(rung)]
        return list(jobs)

    def work(self, job: Job) -> int:
        """Return the number of steps of a job, counted from the previous rung."""
        goal = self.steps if job.until is None else job.until
        return goal - max((rung.step for rung in self.rungs if rung.step < goal), default=0)

    def work_done(self, job: Job, step: int) -> int:
        """Return how many of them are done at a step; earlier rungs belong to other jobs."""
        goal, work = job.until or self.steps, self.work(job)
        return min(max(step - (goal - work), 0), work)

    def laps(self, finished: Finished) -> list[Lap]:
        """Return the finished rungs."""
        found: list[Lap] = []
        field: Sequence[Cell] = self.cells
        for rung in self.rungs:
            if any(job not in finished for job in self._jobs(field, rung)):
                break
            found.append(self._lap(field, rung, finished))
            field = found[-1].staying
        return found

    def rate(self, cell: Cell) -> float:
        """Return a candidate's learning rate: the same for all, up to rate_scales."""
        (rate,) = self.config.learning_rates or (self.learning_rate,)
        scale = 1.0 if cell.is_plain else self.config.rate_scales.get(cell.rule, 1.0)
        return rounded(rate * scale)

    def job(self, cell: Cell, seed: int, step: int) -> Job:
        """Return the job that takes a candidate to a step."""
        until = None if step == self.steps else step
        return Job("race", cell, self.rate(cell), seed, until)

    def figure(self, result: Result) -> float:
        """Return the validation figure of a job."""
        return result.metrics.get(f"validation_{self.headline}", math.nan)

    def _jobs(self, field: Sequence[Cell], rung: Rung) -> list[Job]:
        return [self.job(cell, seed, rung.step) for cell in field for seed in self.seeds]

    def _lap(self, field: Sequence[Cell], rung: Rung, finished: Finished) -> Lap:
        figures = {
            cell: statistics.fmean(
                self.figure(finished[self.job(cell, seed, rung.step)]) for seed in self.seeds
            )
            for cell in field
        }

        def place(cell: Cell) -> tuple[float, bool, int]:
            figure = figures[cell]
            slowness = figure if self.lower_is_better else -figure
            worst = math.inf if math.isnan(slowness) else slowness
            return worst, not cell.is_plain, -(cell.microbatch_size or 0)

        ranking = tuple(sorted(field, key=place))
        if self.keeps_plain:
            rivals = [cell for cell in ranking if not cell.is_plain]
            kept = {PLAIN, *rivals[: self._places(rung) - 1]}
            staying = tuple(cell for cell in ranking if cell in kept)
        else:
            staying = ranking[: self._places(rung)]
        return Lap(rung, ranking, tuple(figures[cell] for cell in ranking), staying)

    def _places(self, rung: Rung) -> int:
        """Return how many candidates continue after a rung."""
        return max(1, -(-rung.field // 2)) + self.keeps_plain
