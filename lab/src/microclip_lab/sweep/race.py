"""Which trainings a race consists of, given those that are finished. Pure functions.

All candidates start from the same weights, with the same data in the same order. Who goes on is
decided by the validation figure at the rung; a tie goes to plain training, then to the larger b,
which is nearer to it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from microclip_lab.jobs.job import PLAIN, Cell, Job, Result, cells
from microclip_lab.sweep.config import SweepConfig
from microclip_lab.sweep.grid import Finished, rounded
from microclip_lab.sweep.rungs import KEEPS_PLAIN, Rung, cost, rungs


@dataclass(frozen=True)
class Lap:
    """A rung that has been run: who ran it, the best first, with their mean validation figures."""

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
    steps: int  # of one training
    warm_up: int = 0  # of them, while the learning rate rises

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The candidates, plain training first."""
        return cells(self.config.rules, self.config.sizes)

    @property
    def seeds(self) -> range:
        """The seeds it is run on."""
        return range(self.first_seed, self.first_seed + self.config.race_seeds)

    @property
    def keeps_plain(self) -> bool:
        """Whether plain training stays in until the end, however slow it is."""
        return self.config.budget >= KEEPS_PLAIN

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """Where the field is halved; plain training is not counted if it stays in anyway."""
        if self.keeps_plain:
            return rungs(len(self.cells) - 1, self.steps, self.config.budget - 1, self.warm_up)
        return rungs(len(self.cells), self.steps, self.config.budget, self.warm_up)

    @property
    def cost(self) -> int:
        """The steps of everybody together."""
        return len(self.seeds) * (cost(self.rungs) + self.keeps_plain * self.steps)

    def missing(self, finished: Finished) -> list[Job]:
        """Return the jobs that can and must be done next; none: the race is over."""
        field: Sequence[Cell] = self.cells
        for rung in self.rungs:
            jobs = self._jobs(field, rung)
            missing = [job for job in jobs if job not in finished]
            if missing:
                return missing
            field = self._lap(field, rung, finished).staying
        return []

    def expected(self, finished: Finished) -> list[Job]:
        """Return all jobs; of the rungs to come, as many as there will be."""
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
        """Return how many steps a job takes: those since the rung before."""
        goal = self.steps if job.until is None else job.until
        return goal - max((rung.step for rung in self.rungs if rung.step < goal), default=0)

    def work_done(self, job: Job, step: int) -> int:
        """Return how many of them are done at a step: those before the rung were another job's."""
        goal, work = job.until or self.steps, self.work(job)
        return min(max(step - (goal - work), 0), work)

    def laps(self, finished: Finished) -> list[Lap]:
        """Return the rungs that have been run."""
        found: list[Lap] = []
        field: Sequence[Cell] = self.cells
        for rung in self.rungs:
            if any(job not in finished for job in self._jobs(field, rung)):
                break
            found.append(self._lap(field, rung, finished))
            field = found[-1].staying
        return found

    def rate(self, cell: Cell) -> float:
        """Return a candidate's learning rate: one for all, scaled if the user says so."""
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
        """Return how many go on after a rung."""
        return max(1, -(-rung.field // 2)) + self.keeps_plain
