"""From finished runs to the report of a sweep: figures, intervals and a verdict.

Differences are paired: a cell minus plain training with the same seed, so that effects of the seed
cancel. Validation data selects the best cell, test data measures it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from microclip.report.comparison import signed
from microclip.report.statistics import CONFIDENCE, Estimate, estimate
from microclip_lab.jobs.plan import PLAIN, Cell, Result
from microclip_lab.sweep.grid import Finished, Grid

DRAWS = 10_000
ALL_OF_THEM = 50_000  # up to this many resamples, all are used
ENOUGH = 10  # seeds from which on the interval has about the right width


@dataclass(frozen=True)
class Interval:
    """The central 95 % of the resampled means."""

    low: float
    high: float


def bootstrap(values: Sequence[float]) -> Interval | None:
    """Return the percentile interval of the mean; None for a single value.

    Unlike a t-interval it assumes no distribution, but it needs more seeds. For up to six values
    all n^n resamples are used, so the result is exact.

    >>> bootstrap([0.0, 2.0])  # means 0, 1, 1, 2
    Interval(low=0.0, high=2.0)
    """
    count = len(values)
    if count < 2:
        return None
    if count**count <= ALL_OF_THEM:
        places = np.array(list(itertools.product(range(count), repeat=count)))
    else:
        places = np.random.default_rng(0).integers(0, count, (DRAWS, count))
    means = np.asarray(values, dtype=np.float64)[places].mean(axis=1)
    ends = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
    low, high = np.quantile(means, ends, method="inverted_cdf")
    return Interval(float(low), float(high))


FORMAT, VERSION = "microclip-sweep", 1
PREFIXES = {"last": "", "best": "best_"}  # metrics of the last weights and of the best checkpoint


@dataclass(frozen=True)
class Figure:
    """A test figure of a cell over seeds, and its difference from plain training."""

    values: Mapping[int, float]  # by seed
    mean: Estimate | None  # None: some of its runs diverged
    difference: Estimate | None  # None: plain training itself, or one of the two diverged
    bootstrap: Interval | None  # of the difference


@dataclass(frozen=True)
class SweepRow:
    """The results of a cell."""

    cell: Cell
    learning_rate: float | None  # None: it diverged at every rate that was tried
    tried: Mapping[float, float]  # mean validation figure by rate; NaN: hopeless
    at_edge: bool
    runs: Mapping[int, Result]  # by seed
    validation: float  # mean over the evaluation seeds, of the compared weights
    last: Figure
    best: Figure

    def figure(self, which: str) -> Figure:
        """Return the figure of the "last" weights, or of the "best" checkpoint."""
        return self.best if which == "best" else self.last


@dataclass(frozen=True)
class Summary:
    """The results of a sweep."""

    recipe: str
    grid: Grid
    rows: tuple[SweepRow, ...]  # plain training first
    best: SweepRow | None  # the best clipped one on validation data; None: nothing to compare
    verdict: str
    notes: tuple[str, ...]

    def to_json(self, setup: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results as JSON, with null for non-finite numbers."""
        grid = self.grid
        said = {
            "format": FORMAT,
            "version": VERSION,
            "recipe": self.recipe,
            "headline": grid.headline,
            "lower_is_better": grid.lower_is_better,
            "judged_by": grid.config.judge_by,
            "tuning_seeds": list(grid.tuning_seeds),
            "evaluation_seeds": list(grid.evaluation_seeds),
            "setup": dict(setup),
            "cells": [_row_json(row) for row in self.rows],
            "best": None if self.best is None else self.best.cell.name,
            "verdict": self.verdict,
            "notes": list(self.notes),
        }
        found: dict[str, Any] = finite(said)
        return found


def summarise(recipe: str, grid: Grid, finished: Finished) -> Summary:
    """Return the results of a finished sweep."""
    plain = _runs(grid, PLAIN, finished)
    rows = tuple(_row(grid, cell, finished, plain) for cell in grid.cells)
    best = best_row(rows, grid)
    return Summary(recipe, grid, rows, best, verdict(best, grid), _notes(rows, grid))


def best_row(rows: Sequence[SweepRow], grid: Grid) -> SweepRow | None:
    """Return the clipped cell that is best on *validation* data.

    Selecting on test data would flatter it: one of several cells is always lucky.
    """
    sign = -1 if grid.lower_is_better else 1
    choices = [
        row
        for row in rows
        if row.figure(grid.config.judge_by).difference is not None and math.isfinite(row.validation)
    ]
    return max(choices, key=lambda row: sign * row.validation, default=None)


def verdict(best: SweepRow | None, grid: Grid) -> str:
    """Return a sentence that compares the best cell with plain training."""
    if best is None:
        return "There is nothing to compare: plain training or all others diverged."
    sign = -1 if grid.lower_is_better else 1
    which = grid.config.judge_by
    difference = best.figure(which).difference
    assert difference is not None
    weights = "last weights" if which == "last" else "best checkpoint"
    seeds = f"{difference.count} seed{'s' if difference.count > 1 else ''}"
    found = (
        f"Best on validation data: {best.cell.name}. Compared with plain training, it changes "
        f"test_{grid.headline} ({weights}) by {signed(difference)}, over {seeds}: "
    )
    if difference.low is None or difference.high is None:
        return found + "one seed says little. Use more: --seeds."
    low, high = sorted((sign * difference.low, sign * difference.high))
    if low > 0:
        return found + "clipping helps here."
    if high < 0:
        return found + "plain training is better here."
    return found + "no clear difference, since the interval includes 0. More seeds would narrow it."


def _row(grid: Grid, cell: Cell, finished: Finished, plain: Mapping[int, Result]) -> SweepRow:
    runs = _runs(grid, cell, finished)
    kept = PREFIXES[grid.config.judge_by] + f"validation_{grid.headline}"
    sign = -1 if grid.lower_is_better else 1
    return SweepRow(
        cell=cell,
        learning_rate=grid.chosen_rate(cell, finished),
        tried={
            rate: math.nan if score == -math.inf else sign * score
            for rate, score in grid.scores(cell, finished).items()
        },
        at_edge=grid.is_at_edge(cell, finished),
        runs=runs,
        validation=_mean([run.metrics.get(kept, math.nan) for run in runs.values()]),
        last=_figure(grid, "last", cell, runs, plain),
        best=_figure(grid, "best", cell, runs, plain),
    )


def _runs(grid: Grid, cell: Cell, finished: Finished) -> dict[int, Result]:
    rate = grid.chosen_rate(cell, finished)
    if rate is None:
        return {}
    return {job.seed: finished[job] for job in grid.evaluation(cell, rate)}


def _figure(
    grid: Grid, which: str, cell: Cell, runs: Mapping[int, Result], plain: Mapping[int, Result]
) -> Figure:
    metric = f"{PREFIXES[which]}test_{grid.headline}"
    values = {seed: run.metrics.get(metric, math.nan) for seed, run in runs.items()}
    theirs = {seed: run.metrics.get(metric, math.nan) for seed, run in plain.items()}
    differences = [value - theirs.get(seed, math.nan) for seed, value in values.items()]
    comparable = not cell.is_plain and _all_finite(differences)
    return Figure(
        values,
        estimate(list(values.values())) if _all_finite(list(values.values())) else None,
        estimate(differences) if comparable else None,
        bootstrap(differences) if comparable else None,
    )


def _all_finite(values: Sequence[float]) -> bool:
    return bool(values) and all(math.isfinite(value) for value in values)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _notes(rows: Sequence[SweepRow], grid: Grid) -> tuple[str, ...]:
    notes = []
    for row in rows:
        if row.learning_rate is None:
            notes.append(
                f"{row.cell.name} diverged at every learning rate tried "
                f"({', '.join(f'{rate:g}' for rate in row.tried)}). Try lower ones, or more "
                "with --growth."
            )
        elif row.at_edge:
            notes.append(
                f"The learning rate of {row.cell.name}, {row.learning_rate:g}, is at the edge of "
                f"the rates tried ({min(row.tried):g} to {max(row.tried):g}): a better one may lie "
                "beyond. Raise --growth to try more."
            )
        diverged = sum(not math.isfinite(value) for value in row.last.values.values())
        if diverged:
            notes.append(
                f"{diverged} of {len(row.last.values)} runs of {row.cell.name} diverged, so it has "
                "no mean."
            )
    seeds = grid.config.seeds
    if 1 < seeds < ENOUGH:
        notes.append(
            f"{seeds} seeds are too few to resample: the bootstrap interval is too narrow. Use the "
            "t-interval."
        )
    if len(rows) > 2 and seeds > 1:
        notes.append(
            f"Each of the {len(rows) - 1} intervals is a 95 % interval by itself: without any real "
            "effect, one in twenty still excludes 0."
        )
    return tuple(notes)


def _row_json(row: SweepRow) -> dict[str, Any]:
    return {
        "name": row.cell.name,
        "rule": None if row.cell.is_plain else row.cell.rule,
        "microbatch_size": row.cell.microbatch_size,
        "learning_rate": row.learning_rate,
        "tried": [
            {"learning_rate": rate, "validation": value} for rate, value in row.tried.items()
        ],
        "at_edge": row.at_edge,
        "validation": row.validation,
        "last": _figure_json(row.last),
        "best": _figure_json(row.best),
        "runs": [
            {"seed": seed, "folder": run.folder, "metrics": dict(run.metrics)}
            for seed, run in row.runs.items()
        ],
    }


def _figure_json(figure: Figure) -> dict[str, Any]:
    return {
        "test": None if figure.mean is None else asdict(figure.mean),
        "difference": None if figure.difference is None else asdict(figure.difference),
        "bootstrap": None if figure.bootstrap is None else asdict(figure.bootstrap),
    }


def finite(value: Any) -> Any:
    """Return the same value with None for non-finite numbers, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
