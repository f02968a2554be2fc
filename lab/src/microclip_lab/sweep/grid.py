"""The plan of a sweep: which runs come next, given the finished ones. Pure functions.

First every cell is trained with a few learning rates, on seeds that are used for nothing else. The
rate with the best mean validation figure wins; if it is at the edge of the grid, the grid grows in
that direction, a few times at most. Test data plays no part. Then each cell is trained at its rate
on the evaluation seeds, the same for all cells.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from microclip_lab.jobs.plan import Cell, Job, Result, cells
from microclip_lab.sweep.config import SweepConfig
from microclip_lab.training.components import weights_examples

Finished = Mapping[Job, Result]
USUAL_RATIO = 3.0  # between neighboring rates, unless the user gives rates


@dataclass(frozen=True)
class Grid:
    """The plan of a sweep."""

    config: SweepConfig
    headline: str  # the figure of `Recipe.summary` to select by
    lower_is_better: bool
    learning_rate: float  # the recipe's
    first_seed: int
    steps: int  # of one run

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Plain training first, then the others."""
        return cells(self.config.rules, self.config.sizes, weights_examples)

    @property
    def tuning_seeds(self) -> range:
        """The seeds for choosing rates."""
        return range(self.first_seed, self.first_seed + self.config.tuning_seeds)

    @property
    def evaluation_seeds(self) -> range:
        """The seeds for comparing cells, disjoint from the tuning seeds."""
        first = self.tuning_seeds.stop
        return range(first, first + self.config.seeds)

    def missing(self, finished: Finished) -> list[Job]:
        """Return the jobs to run next; empty when all are done."""
        return [
            job for cell in self.cells for job in self._next(cell, finished) if job not in finished
        ]

    def expected(self, finished: Finished) -> list[Job]:
        """Return all jobs that are known so far; grids may still grow."""
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
                jobs += self.evaluation(cell, first[0])  # the rate is not known yet
        return jobs

    def work(self, job: Job) -> int:
        """Return the number of steps of a job."""
        return self.steps

    def work_done(self, job: Job, step: int) -> int:
        """Return how many of them are done at this step."""
        return min(step, self.steps)

    def first_rates(self, cell: Cell) -> tuple[float, ...]:
        """Return the first rates of a cell, ascending."""
        scale = 1.0 if cell.is_plain else self.config.rate_scales.get(cell.rule, 1.0)
        middle = self.learning_rate
        given = self.config.learning_rates or (
            middle / USUAL_RATIO,
            middle,
            middle * USUAL_RATIO,
        )
        return tuple(sorted({rounded(rate * scale) for rate in given}))

    def scores(self, cell: Cell, finished: Finished) -> dict[float, float]:
        """Return the score of each rate that was tried on all seeds; minus infinity if hopeless."""
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
        """Return the validation score of a run; higher is better."""
        prefix = "best_" if self.config.judge_by == "best" else ""
        value = result.metrics.get(f"{prefix}validation_{self.headline}", math.nan)
        if result.hopeless is not None or not math.isfinite(value):
            return -math.inf
        return -value if self.lower_is_better else value

    def chosen_rate(self, cell: Cell, finished: Finished) -> float | None:
        """Return a cell's learning rate; None if it is not known yet, or all rates diverged."""
        first = self.first_rates(cell)
        if not self._is_tuned(cell):
            return first[0]
        scores = self.scores(cell, finished)
        if self._rates_to_try(cell, scores):
            return None
        best = best_rate(scores)
        return None if scores[best] == -math.inf else best

    def is_lost(self, cell: Cell, finished: Finished) -> bool:
        """Return whether a cell diverged at every rate that may be tried."""
        if not self._is_tuned(cell):
            return False
        scores = self.scores(cell, finished)
        return not self._rates_to_try(cell, scores) and set(scores.values()) == {-math.inf}

    def is_at_edge(self, cell: Cell, finished: Finished) -> bool:
        """Return whether the chosen rate is at the edge, so that a better one may lie beyond."""
        chosen = self.chosen_rate(cell, finished)
        scores = self.scores(cell, finished)
        return len(scores) > 1 and chosen in (min(scores), max(scores))

    def evaluation(self, cell: Cell, rate: float) -> list[Job]:
        """Return the evaluation jobs of a cell."""
        return [Job("evaluation", cell, rate, seed) for seed in self.evaluation_seeds]

    def _next(self, cell: Cell, finished: Finished) -> list[Job]:
        chosen = self.chosen_rate(cell, finished)
        if chosen is not None:
            return self.evaluation(cell, chosen)
        if self.is_lost(cell, finished):
            return []
        return self._tuning(cell, self._rates_to_try(cell, self.scores(cell, finished)))

    def _is_tuned(self, cell: Cell) -> bool:
        return len(self.first_rates(cell)) > 1  # a single rate needs no tuning

    def _rates_to_try(self, cell: Cell, scores: Mapping[float, float]) -> list[float]:
        return rates_to_try(self.first_rates(cell), scores, self.config.growth)

    def _tuning(self, cell: Cell, rates: Iterable[float]) -> list[Job]:
        return [Job("tuning", cell, rate, seed) for rate in rates for seed in self.tuning_seeds]


def rates_to_try(
    first: tuple[float, ...], scores: Mapping[float, float], growth: int
) -> list[float]:
    """Return the rates to try next: the first ones, then one beyond a best rate at the edge.

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
    """Return the rate with the best score; the smallest of ties."""
    return max(sorted(scores), key=lambda rate: scores[rate])


def rounded(rate: float) -> float:
    """Return a rate without rounding noise, since it is part of folder names.

    >>> rounded(0.1 * 3)
    0.3
    """
    return float(f"{rate:.4g}")
