"""When to clip: a rule of thumb from plain training's first epochs, without knowing any dragger.

A case is a task and a clipping rule at b = 4, with what came of it: gain, harm or nothing. One
figure and two thresholds predict it: gain at or above the upper one, harm below the lower one. They
are fitted on half of the plan's tasks and judged on the others, and on the tasks of the dirty-data
benchmark, of which only plain training is run again here. `benchmarks/evidence.py --publish` hands
what is fitted to the library, with its record on the tasks it was not fitted on.

Amended after the plan's first two tasks were seen: at first one rule of thumb served both clipping
rules, which have the same figures on a task and came out differently. Now each has its own.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from microclip.probing import FIGURES, Expected, Forecast, Thumb
from microclip_lab.dirty_data import catalog as dirty_catalog
from microclip_lab.dirty_data import plan as dirty_plan
from microclip_lab.dirty_data import records as dirty_records
from microclip_lab.evidence.arms import PLAIN
from microclip_lab.evidence.by_kind import OUTSIDE_MARGIN, outside_effect
from microclip_lab.evidence.catalog import STUDIES
from microclip_lab.evidence.plan import gate, outcome_of
from microclip_lab.evidence.records import Record, Records
from microclip_lab.evidence.sequential import outcome
from microclip_lab.tuned_arms.records import Job
from microclip_lab.tuned_arms.search import evaluated, is_tuned, tuned

RULES = {"minnorm-4": "minnorm", "unit-4": "unit"}  # here, and in the dirty-data benchmark
TOP_TENTH, SMALLEST, RISE = FIGURES  # tried in this order; of equal ones, the first is taken
TITLES = {"minnorm-4": "MinNorm", "unit-4": "Unit"}
OUTSIDE_SEEDS = (0, 1)
FEWEST = 4  # tasks to fit a rule of thumb on
DIRTY_DATA = Path("results/dirty_data")

Half = Literal["fit", "judge", "outside"]


@dataclass(frozen=True)
class Case:
    """A task and a rule: figures of plain training, and what clipping did."""

    task: str
    rule: str
    half: Half
    figures: Mapping[str, float]
    came: Expected


def figures_of(runs: Sequence[Record]) -> dict[str, float] | None:
    """Return the figures of plain training, averaged over seeds; None if none was looked at."""
    notes = [run.notes for run in runs if "early/top_decile" in run.notes]
    if not notes:
        return None

    def mean(name: str) -> float:
        return statistics.fmean(each[name] for each in notes if name in each)

    return {
        TOP_TENTH: mean("early/top_decile"),
        SMALLEST: mean("early/min_over_mean_4"),
        RISE: mean("early/top_decile") - mean("first/top_decile"),
    }


def cases(records: Records, outside: dirty_records.Records) -> list[Case]:
    """Return all cases that have an outcome."""
    found = []
    for study in STUDIES:
        figures = figures_of(list(evaluated(records, study, PLAIN).values()))
        if figures is None or study.half == "none":
            continue
        if gate(records, study) in ("no headroom", "undecided"):
            continue
        for arm in RULES:
            if arm in study.arms:
                came = outcome_of(records, study, arm)
                if came != "undecided":
                    found.append(Case(study.name, arm, study.half, figures, came))
    for task in dirty_catalog.TASKS.values():
        runs = [record for job, record in records.items() if job.task == task.name]
        figures = figures_of(runs)
        if figures is not None:
            for arm, there in RULES.items():
                came = outcome(outside_effect(outside, task.name, there), OUTSIDE_MARGIN)
                if came != "undecided":
                    found.append(Case(task.name, arm, "outside", figures, came))
    return found


def outside_records(folder: Path = DIRTY_DATA) -> dict[Job, dirty_records.Record]:
    """Return the records of the dirty-data benchmark."""
    return dirty_records.read_all(folder, dirty_plan.editions(dirty_catalog.TASKS.values()))


def outside_jobs(outside: dirty_records.Records) -> list[Job]:
    """Return the runs of plain training to look at, at the rates that were found there."""
    return [
        Job(task.name, PLAIN, "evaluate", tuned(outside, task, PLAIN).rate, seed)
        for task in dirty_catalog.TASKS.values()
        if is_tuned(outside, task, PLAIN)
        for seed in OUTSIDE_SEEDS
    ]


def fitted(known: Sequence[Case]) -> Thumb | None:
    """Return the figure and thresholds with the most hits; None with too few cases.

    Of equal ones, the widest gap around the thresholds wins, so that they lie between cases.
    """
    best: tuple[float, float, Thumb] | None = None
    if len(known) < FEWEST:
        return None
    for figure in FIGURES:
        cuts = _cuts([case.figures[figure] for case in known])
        for (low, low_gap), (high, high_gap) in itertools.combinations_with_replacement(cuts, 2):
            thumb = Thumb(figure, low, high)
            key = hit_rate(thumb, known), min(low_gap, high_gap)
            if best is None or key > best[:2]:
                best = (*key, thumb)
    return None if best is None else best[2]


def _cuts(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return thresholds between values, and beyond them, each with the gap it lies in."""
    ordered = sorted(set(values))
    between = [((a + b) / 2, b - a) for a, b in itertools.pairwise(ordered)]
    return [(-math.inf, math.inf), *between, (math.inf, math.inf)] if ordered else []


def hit_rate(thumb: Thumb, known: Sequence[Case]) -> float:
    """Return the share of cases that are predicted right."""
    if not known:
        return math.nan
    return statistics.fmean(thumb.predicts(case.figures) == case.came for case in known)


def commonest(known: Sequence[Case]) -> Expected:
    """Return the most common outcome, to compare a rule of thumb with."""
    return statistics.mode(case.came for case in known)


def forecast(rule: str, known: Sequence[Case]) -> Forecast:
    """Return the rule of thumb of a clipping rule, and its record on cases it was not fitted on.

    Thresholds are rounded to three digits, as they are published, before they are judged.
    """
    own = [case for case in known if case.rule == rule]
    fit = [case for case in own if case.half == "fit"]
    rest = [case for case in own if case.half != "fit"]
    best = fitted(fit) if rest else None
    if best is None:
        return Forecast(TITLES[rule], None, len(fit), len(rest))
    thumb = Thumb(best.figure, round(best.harm_below, 3), round(best.gain_from, 3))
    guess = commonest(rest)
    hits = [thumb.predicts(case.figures) == case.came for case in rest]
    guessed = [guess == case.came for case in rest]
    return Forecast(
        TITLES[rule],
        thumb,
        len(fit),
        len(rest),
        sum(hits),
        guess,
        sum(guessed),
        round(sign_test(hits, guessed), 3),
    )


def sign_test(one: Sequence[bool], other: Sequence[bool]) -> float:
    """Return the chance that a coin favors one at least as often, where only one of two is right.

    >>> sign_test([True, True, True, False], [False, False, False, False])  # three of three
    0.125
    >>> sign_test([True, False], [True, False])  # no case tells them apart
    1.0
    """
    better = sum(a and not b for a, b in zip(one, other, strict=True))
    worse = sum(b and not a for a, b in zip(one, other, strict=True))
    total = better + worse
    return sum(math.comb(total, count) for count in range(better, total + 1)) / float(2**total)
