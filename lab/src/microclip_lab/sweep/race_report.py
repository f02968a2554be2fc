"""The report of a race: when candidates dropped out, which one won, and how certain that is."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from microclip.report.comparison import signed
from microclip.report.statistics import estimate
from microclip_lab.jobs.plan import Cell, Result
from microclip_lab.sweep.grid import Finished
from microclip_lab.sweep.race import Lap, Race
from microclip_lab.sweep.summary import finite

FORMAT, VERSION = "microclip-race", 1
CLEAR = 2.0  # a lead counts from this multiple of its variation on
FEWEST_LOOKS = 3  # needed to estimate a variation


@dataclass(frozen=True)
class Place:
    """The result of a candidate."""

    cell: Cell
    learning_rate: float
    figures: Mapping[int, float]  # mean validation figure by rung
    runs: Mapping[int, Result]  # by seed, as far as they went
    won: bool

    @property
    def last_step(self) -> int:
        """The step at which it dropped out, or the last one."""
        return max(self.figures)


@dataclass(frozen=True)
class RaceReport:
    """The results of a race."""

    recipe: str
    race: Race
    places: tuple[Place, ...]  # the winner first
    verdict: str

    @property
    def winner(self) -> Place:
        """The winning candidate."""
        return self.places[0]

    def to_json(self, setup: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results as JSON, with null for non-finite numbers."""
        race = self.race
        said = {
            "format": FORMAT,
            "version": VERSION,
            "recipe": self.recipe,
            "headline": race.headline,
            "lower_is_better": race.lower_is_better,
            "steps": race.steps,
            "cost": race.cost,
            "seeds": list(race.seeds),
            "rungs": [{"step": rung.step, "field": rung.field} for rung in race.rungs],
            "setup": dict(setup),
            "candidates": [_place_json(place) for place in self.places],
            "verdict": self.verdict,
        }
        found: dict[str, Any] = finite(said)
        return found


def report_race(recipe: str, race: Race, finished: Finished) -> RaceReport:
    """Return the report of a finished race."""
    laps = race.laps(finished)
    assert len(laps) == len(race.rungs), "the race is not over"
    places = tuple(
        _place(race, cell, laps, finished, won=cell == laps[-1].ranking[0]) for cell in _order(laps)
    )
    return RaceReport(recipe, race, places, verdict(race, laps, places))


def verdict(race: Race, laps: Sequence[Lap], places: Sequence[Place]) -> str:
    """Return a sentence: which candidate won, by how much, and whether that may be chance."""
    winner = places[0]
    lap = next((lap for lap in reversed(laps) if len(lap.ranking) > 1), None)
    if lap is None:
        return f"{winner.cell.name} was the only candidate."
    metric = f"validation_{race.headline}"
    step = lap.rung.step
    if not math.isfinite(winner.figures[step]):
        return f"No winner: at step {step} all remaining candidates had diverged. Lower the rate."
    second = next(place for place in places[1:] if place.cell in lap.ranking)
    said = f"{winner.cell.name} won. At step {step}, the last one both reached, it was ahead of "
    if not math.isfinite(second.figures[step]):
        return f"{said}{second.cell.name}, which had diverged."
    lead = winner.figures[step] - second.figures[step]
    said += f"{second.cell.name} by {abs(lead):.3g} of {metric}"
    return (
        said
        + (
            _over_seeds(race, winner, second, step)
            if len(race.seeds) > 1
            else _over_looks(winner, second, step, lead)
        )
        + _of_plain(race, winner, places)
    )


def variation(curve: Sequence[float]) -> float | None:
    """Return how much a curve varies from one evaluation to the next, apart from its slow trend.

    >>> variation([0.0, 2.0, 0.0, 2.0])  # independent neighbours are sqrt(2) deviations apart
    1.4142135623730951
    """
    if len(curve) < FEWEST_LOOKS:
        return None
    moves = [after - before for before, after in itertools.pairwise(curve)]
    return math.sqrt(statistics.fmean(move * move for move in moves) / 2)


def _of_plain(race: Race, winner: Place, places: Sequence[Place]) -> str:
    """Return a sentence on when plain training, the baseline, dropped out, if it did."""
    plain = next(place for place in places if place.cell.is_plain)
    step = plain.last_step
    if plain.won or step == race.steps:
        return ""
    behind = abs(winner.figures[step] - plain.figures[step])
    if not math.isfinite(behind):
        return f" Plain training had diverged by step {step}."
    return f" Plain training dropped out at step {step}, {behind:.3g} behind."


def _over_looks(winner: Place, second: Place, step: int, lead: float) -> str:
    (ours,), (theirs,) = winner.runs.values(), second.runs.values()
    common = sorted(s for s in ours.curve.keys() & theirs.curve.keys() if s <= step)
    leads = [ours.curve[s] - theirs.curve[s] for s in common[len(common) // 2 :]]
    spread = variation(leads)
    if spread is None:
        return (
            ". There were too few evaluations to tell whether that is more than chance; evaluate "
            "more often, or race on more seeds."
        )
    said = f"; this lead varies by {spread:.2g} between evaluations. "
    if abs(lead) < CLEAR * spread:
        return said + (
            "So this race does not separate the two. Race on more seeds (--race-seeds), or run a "
            "sweep."
        )
    return said + (
        "That is more than the noise of one run, but it is a single run: other seeds may differ. "
        "A sweep would tell."
    )


def _over_seeds(race: Race, winner: Place, second: Place, step: int) -> str:
    gaps = [
        winner.runs[seed].curve.get(step, math.nan) - second.runs[seed].curve.get(step, math.nan)
        for seed in race.seeds
    ]
    if not all(math.isfinite(gap) for gap in gaps):
        return "."
    found = estimate(gaps)
    assert found.low is not None
    assert found.high is not None
    said = f"; seed by seed {signed(found)}, over {found.count} seeds. "
    if found.low <= 0 <= found.high:
        return said + "The interval includes 0: this race does not separate the two."
    return said + (
        "The interval excludes 0, but the winner was selected for being ahead, which flatters it."
    )


def _order(laps: Sequence[Lap]) -> list[Cell]:
    """Return all candidates, the winner first: by how far they got, then by rank there."""
    order: dict[Cell, None] = {}
    for lap in reversed(laps):
        order |= dict.fromkeys(lap.ranking)
    return list(order)


def _place(race: Race, cell: Cell, laps: Sequence[Lap], finished: Finished, *, won: bool) -> Place:
    figures = {
        lap.rung.step: lap.figures[lap.ranking.index(cell)] for lap in laps if cell in lap.ranking
    }
    last = max(figures)
    runs = {seed: finished[race.job(cell, seed, last)] for seed in race.seeds}
    return Place(cell, race.rate(cell), figures, runs, won)


def _place_json(place: Place) -> dict[str, Any]:
    return {
        "name": place.cell.name,
        "rule": None if place.cell.is_plain else place.cell.rule,
        "microbatch_size": place.cell.microbatch_size,
        "learning_rate": place.learning_rate,
        "won": place.won,
        "last_step": place.last_step,
        "validation": [{"step": s, "mean": value} for s, value in place.figures.items()],
        "runs": [
            {"seed": seed, "folder": run.folder, "metrics": dict(run.metrics)}
            for seed, run in place.runs.items()
        ],
    }
