"""Which trainings a sweep consists of, given those that are finished. Pure functions.

First every cell is trained with a few learning rates on seeds that are used for nothing else. The
rate with the best mean validation figure is taken, but not one on the edge of what was tried: then
the grid grows in that direction, a few times at most. Test data plays no part in it. With its own
rate each cell is trained on the evaluation seeds, the same ones for all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from microclip_lab.jobs.job import Cell, Job, Result, cells
from microclip_lab.sweep.config import SweepConfig

Finished = Mapping[Job, Result]
USUAL_RATIO = 3.0  # between neighbouring rates, where the user's do not say


@dataclass(frozen=True)
class Grid:
    """The plan of a sweep."""

    config: SweepConfig
    headline: str  # what `Recipe.summary` calls the figure to choose by
    lower_is_better: bool
    learning_rate: float  # the recipe's
    first_seed: int
    steps: int  # of one training

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Plain training, then the rest."""
        return cells(self.config.rules, self.config.sizes)

    @property
    def tuning_seeds(self) -> range:
        """The seeds that rates are chosen on."""
        return range(self.first_seed, self.first_seed + self.config.tuning_seeds)

    @property
    def evaluation_seeds(self) -> range:
        """The seeds of the comparison; none of the others is among them."""
        first = self.tuning_seeds.stop
        return range(first, first + self.config.seeds)

    def missing(self, finished: Finished) -> list[Job]:
        """Return the jobs that can and must be done next; none: all is done."""
        return [
            job for cell in self.cells for job in self._next(cell, finished) if job not in finished
        ]

    def expected(self, finished: Finished) -> list[Job]:
        """Return all jobs as far as they are known by now; grids may still grow."""
        jobs: list[Job] = []
        for cell in self.cells:
            first = self.first_rates(cell)
            if self._is_tuned(cell):
                scores = self.scores(cell, finished)
                rates = {*first, *scores, *self._rates_to_try(cell, scores)}
                jobs += [
                    job
                    for job in self._tuning(cell, sorted(rates))
                    if job in finished or scores.get(job.learning_rate) != -math.inf
                ]
            chosen = self.chosen_rate(cell, finished)
            if chosen is not None:
                jobs += self.evaluation(cell, chosen)
            elif not self.is_lost(cell, finished):
                jobs += self.evaluation(cell, first[0])  # as many as there will be
        return jobs

    def work(self, job: Job) -> int:
        """Return how many steps a job takes."""
        return self.steps

    def work_done(self, job: Job, step: int) -> int:
        """Return how many of them are done after so many."""
        return min(step, self.steps)

    def first_rates(self, cell: Cell) -> tuple[float, ...]:
        """Return the rates that a cell begins with, from the smallest."""
        scale = 1.0 if cell.is_plain else self.config.rate_scales.get(cell.rule, 1.0)
        middle = self.learning_rate
        given = self.config.learning_rates or (
            middle / USUAL_RATIO,
            middle,
            middle * USUAL_RATIO,
        )
        return tuple(sorted({rounded(rate * scale) for rate in given}))

    def scores(self, cell: Cell, finished: Finished) -> dict[float, float]:
        """Return how good each rate is that was tried on all seeds; minus infinity: hopeless."""
        found: dict[float, list[float]] = {}
        for job, result in finished.items():
            if job.stage == "tuning" and job.cell == cell and job.seed in self.tuning_seeds:
                found.setdefault(job.learning_rate, []).append(self.score(result))
        return {
            rate: statistics.fmean(values)
            for rate, values in sorted(found.items())
            if len(values) == len(self.tuning_seeds) or -math.inf in values
        }

    def score(self, result: Result) -> float:
        """Return how good a training is on validation data; more is better."""
        prefix = "best_" if self.config.judge_by == "best" else ""
        value = result.metrics.get(f"{prefix}validation_{self.headline}", math.nan)
        if result.hopeless is not None or not math.isfinite(value):
            return -math.inf
        return -value if self.lower_is_better else value

    def chosen_rate(self, cell: Cell, finished: Finished) -> float | None:
        """Return a cell's learning rate; None: not known yet, or all that were tried diverged."""
        first = self.first_rates(cell)
        if not self._is_tuned(cell):
            return first[0]
        scores = self.scores(cell, finished)
        if self._rates_to_try(cell, scores):
            return None
        best = best_rate(scores)
        return None if scores[best] == -math.inf else best

    def is_lost(self, cell: Cell, finished: Finished) -> bool:
        """Say whether a cell diverged at every rate that may be tried."""
        if not self._is_tuned(cell):
            return False
        scores = self.scores(cell, finished)
        return not self._rates_to_try(cell, scores) and set(scores.values()) == {-math.inf}

    def is_at_edge(self, cell: Cell, finished: Finished) -> bool:
        """Say whether a better rate may lie beyond those that were tried."""
        chosen = self.chosen_rate(cell, finished)
        scores = self.scores(cell, finished)
        return len(scores) > 1 and chosen in (min(scores), max(scores))

    def evaluation(self, cell: Cell, rate: float) -> list[Job]:
        """Return the jobs that a cell is compared by."""
        return [Job("evaluation", cell, rate, seed) for seed in self.evaluation_seeds]

    def _next(self, cell: Cell, finished: Finished) -> list[Job]:
        chosen = self.chosen_rate(cell, finished)
        if chosen is not None:
            return self.evaluation(cell, chosen)
        if self.is_lost(cell, finished):
            return []
        return self._tuning(cell, self._rates_to_try(cell, self.scores(cell, finished)))

    def _is_tuned(self, cell: Cell) -> bool:
        return len(self.first_rates(cell)) > 1  # of one rate there is nothing to choose

    def _rates_to_try(self, cell: Cell, scores: Mapping[float, float]) -> list[float]:
        return rates_to_try(self.first_rates(cell), scores, self.config.growth)

    def _tuning(self, cell: Cell, rates: Iterable[float]) -> list[Job]:
        return [Job("tuning", cell, rate, seed) for rate in rates for seed in self.tuning_seeds]


def rates_to_try(
    first: tuple[float, ...], scores: Mapping[float, float], growth: int
) -> list[float]:
    """Return the rates still to be tried: the first ones, then one beyond the best at an edge.

    >>> rates_to_try((0.1, 0.3, 0.9), {0.1: 5.0, 0.3: 7.0, 0.9: 9.0}, growth=4)
    [2.7]
    >>> rates_to_try((0.1, 0.3, 0.9), {0.1: 5.0, 0.3: 9.0, 0.9: 7.0}, growth=4)
    []
    """
    untried = [rate for rate in first if rate not in scores]
    if untried or len(first) < 2:
        return untried
    if len(scores.keys() - set(first)) >= growth:
        return []
    best = best_rate(scores)
    if best == min(scores):
        return [rounded(best * first[0] / first[1])]
    if best == max(scores):
        return [rounded(best * first[-1] / first[-2])]
    return []


def best_rate(scores: Mapping[float, float]) -> float:
    """Return the rate with the best score; of equals the smallest."""
    return max(sorted(scores), key=lambda rate: scores[rate])


def rounded(rate: float) -> float:
    """Return a rate without the dust of its computation, since it names folders.

    >>> rounded(0.1 * 3)
    0.3
    """
    return float(f"{rate:.4g}")
