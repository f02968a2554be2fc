"""What follows from the records: each quantity, seed by seed, with its interval. Pure functions.

Every quantity is one number per seed. The runs of a seed share data, initial weights and the order
of examples, so differences are paired, and intervals are over seeds. No run is dropped silently: a
diverged one counts as the worst possible, accuracy 0 or error rate 100. Where no value is worst,
its seed is left out, which the effect reports, and then nothing is decided.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from microclip.report.statistics import Estimate, estimate
from microclip_lab.reproduction import gradient_snapshots as gradients
from microclip_lab.reproduction.records import Record, Records
from microclip_lab.reproduction.study import Study
from microclip_lab.reproduction.tasks import PLAIN, Arm, Task

Cosine = Literal["dragger_benign", "benign_benign", "dragger_dragger"]
Orientation = Literal["dragger_over_benign", "benign_over_dragger"]


@dataclass(frozen=True)
class Gain:
    """How much better an arm is than another: points of accuracy, or of error rate saved.

    Of several arms, the one with the best mean validation figure over the evaluation seeds counts,
    so that test data does not select it.
    """

    task: str
    arms: tuple[str, ...]
    against: str = PLAIN
    figures: tuple[str, ...] = ()  # the mean of these; default: the task's figure


@dataclass(frozen=True)
class Rise:
    """How much higher a figure is in an arm than in another, in points."""

    task: str
    arm: str
    figure: str
    against: str = PLAIN


@dataclass(frozen=True)
class CosineGap:
    """A mean cosine minus another, over all snapshots of an arm's runs but the first."""

    task: str
    one: Cosine
    other: Cosine
    arm: str = PLAIN


@dataclass(frozen=True)
class CosineLevel:
    """A mean cosine, over all snapshots of an arm's runs but the first."""

    task: str
    which: Cosine
    arm: str = PLAIN


@dataclass(frozen=True)
class Speed:
    """Binary logarithm of the ratio of steps that another arm and this one need.

    Counted until each first reaches the worse of both runs' best validation figures, so that both
    do. 1: half the steps; 0: as many; -1: twice as many.
    """

    task: str
    arm: str
    against: str = PLAIN


@dataclass(frozen=True)
class Slope:
    """How a ratio of norms changes with b: slope of its logarithm over that of b.

    At the last snapshot ("step"), or at the loss of benign examples that the slowest arm ends with
    ("loss"), interpolated between snapshots.
    """

    task: str
    arms: tuple[str, ...]  # by ascending b; plain training counts as b = B
    orientation: Orientation
    matched: Literal["step", "loss"]


Quantity = Gain | Rise | CosineGap | CosineLevel | Speed | Slope


PERCENT = 100.0
ERROR_RATE = re.compile(r"(?:^|_)[wc]er(?:_|$)")
ACCURACY = re.compile(r"(?:^|_)accuracy(?:_|$)")

Runs = Mapping[int, Record]  # by seed


@dataclass(frozen=True)
class Effect:
    """The value of a quantity in the records."""

    values: Mapping[int, float]  # by seed
    estimate: Estimate | None  # over seeds; None with fewer than two values
    records: tuple[str, ...]  # ids of its runs
    unit: str  # "points", "cosine", "halvings", "slope"
    seeds: int  # the planned number
    arm: str | None = None  # the selected one of several
    diverged: tuple[str, ...] = ()  # ids of runs that count as the worst possible
    left_out: Mapping[int, str] = field(default_factory=dict)  # why, by seed

    @property
    def is_complete(self) -> bool:
        """Whether all planned seeds are there, with or without a value."""
        return len(self.values) + len(self.left_out) >= self.seeds


def effect(study: Study, records: Records, quantity: Quantity) -> Effect | None:
    """Return the value of a quantity; None if fewer than two seeds are complete."""
    task = next((task for task in study.tasks if task.name == quantity.task), None)
    if task is None:
        return None
    found = _Found(study, records, task)
    match quantity:
        case Gain():
            return _gain(found, quantity)
        case Rise():
            return _rise(found, quantity)
        case CosineGap():
            return _cosines(found, quantity.arm, quantity.one, quantity.other)
        case CosineLevel():
            return _cosines(found, quantity.arm, quantity.which, None)
        case Speed():
            return _speed(found, quantity)
        case Slope():
            return _slope(found, quantity)


def is_error_rate(figure: str) -> bool:
    """Return whether a lower figure is better.

    >>> is_error_rate("best_test_canary_wer_x4"), is_error_rate("best_test_accuracy_tweets")
    (True, False)
    """
    if ERROR_RATE.search(figure):
        return True
    if ACCURACY.search(figure):
        return False
    raise ValueError(
        f"Gains are in points of accuracy, WER or CER, but {figure!r} is none of them."
    )


def points(record: Record, figure: str) -> float | None:
    """Return a figure in points, the worst possible if the run diverged; None if missing."""
    if not record.diverged and figure not in record.metrics:
        return None
    value = record.figure(figure)
    if record.diverged or not math.isfinite(value):
        return PERCENT if is_error_rate(figure) else 0.0
    return PERCENT * value


def went_wrong(record: Record, figures: Sequence[str]) -> bool:
    """Return whether a run diverged or has a non-finite figure."""
    return bool(record.diverged) or not all(
        math.isfinite(record.figure(name)) for name in figures if name in record.metrics
    )


@dataclass(frozen=True)
class _Found:
    """The evaluation runs of a task."""

    study: Study
    records: Records
    task: Task

    def runs(self, arm: str) -> Runs:
        return self.study.evaluated(self.task, self.task.arm(arm), self.records)

    def is_lost(self, arm: Arm) -> bool:
        """Return whether an arm diverged with every value, so that there is nothing to compare."""
        settled = self.study.is_settled(self.task, arm, self.records)
        return (
            settled
            and arm.tuned is not None
            and self.study.chosen(self.task, arm, self.records) is None
        )

    def together(self, *runs: Runs) -> list[int]:
        """Return the seeds that all have; empty if fewer than two."""
        common = sorted(set.intersection(*(set(each) for each in runs)))
        return common if len(common) > 1 else []

    def effect(
        self,
        values: Mapping[int, float],
        made_of: Sequence[Record],
        unit: str,
        *,
        arm: str | None = None,
        diverged: Sequence[str] = (),
        left_out: Mapping[int, str] | None = None,
    ) -> Effect:
        return Effect(
            dict(values),
            estimate(list(values.values())) if len(values) > 1 else None,
            tuple(record.id for record in made_of),
            unit,
            self.task.seeds,
            arm,
            tuple(diverged),
            dict(left_out or {}),
        )


def _gain(found: _Found, quantity: Gain) -> Effect | None:
    task = found.task
    names = [name for name in quantity.arms if not found.is_lost(task.arm(name))]
    if not names:
        return None
    candidates = {name: found.runs(name) for name in names}
    against = found.runs(quantity.against)
    seeds = found.together(against, *candidates.values())
    if not seeds:
        return None
    validated = f"best_validation_{task.recipe.headline}"

    def validation(name: str) -> float:
        figures = (points(candidates[name][seed], validated) for seed in seeds)
        mean = statistics.fmean(math.nan if each is None else each for each in figures)
        return -mean if task.recipe.lower_is_better else mean

    chosen = max(names, key=validation) if len(names) > 1 else names[0]
    ours = candidates[chosen]
    figures = quantity.figures or (task.figure,)
    values: dict[int, float] = {}
    diverged: list[str] = []
    for seed in seeds:
        ends = [(points(ours[seed], name), points(against[seed], name)) for name in figures]
        known = [(mine, theirs) for mine, theirs in ends if mine is not None and theirs is not None]
        if len(known) < len(figures):
            return None  # these runs lack a planned figure
        values[seed] = statistics.fmean(
            theirs - mine if is_error_rate(name) else mine - theirs
            for name, (mine, theirs) in zip(figures, known, strict=True)
        )
        diverged += [r.id for r in (ours[seed], against[seed]) if went_wrong(r, figures)]
    made_of = [runs[seed] for runs in (ours, against) for seed in seeds]
    arm = chosen if len(quantity.arms) > 1 else None
    return found.effect(values, made_of, "points", arm=arm, diverged=diverged)


def _rise(found: _Found, quantity: Rise) -> Effect | None:
    ours, against = found.runs(quantity.arm), found.runs(quantity.against)
    values: dict[int, float] = {}
    left_out: dict[int, str] = {}
    seeds = found.together(ours, against)
    for seed in seeds:
        pair = ours[seed], against[seed]
        mine, theirs = (points(record, quantity.figure) for record in pair)
        wrong = [record.id for record in pair if went_wrong(record, [quantity.figure])]
        if wrong:  # a higher figure may be the goal, and a diverged run must not achieve it
            left_out[seed] = f"{' and '.join(wrong)} diverged"
        elif mine is None or theirs is None:
            return None
        else:
            values[seed] = mine - theirs
    if not seeds:
        return None
    made_of = [runs[seed] for runs in (ours, against) for seed in values]
    return found.effect(values, made_of, "points", left_out=left_out)


def _cosines(found: _Found, arm: str, one: str, other: str | None) -> Effect | None:
    runs = found.runs(arm)
    seeds = found.together(runs)
    if not seeds or not any(runs[seed].moments for seed in seeds):
        return None
    values, left_out = {}, {}
    for seed in seeds:
        record = runs[seed]
        level = gradients.level(record, one)
        beside = 0.0 if other is None else gradients.level(record, other)
        if record.diverged:
            left_out[seed] = f"{record.id} diverged"
        elif level is None or beside is None:
            left_out[seed] = f"{record.id} was not looked into often enough"
        else:
            values[seed] = level - beside
    made_of = [runs[seed] for seed in values]
    return found.effect(values, made_of, "cosine", left_out=left_out)


def _speed(found: _Found, quantity: Speed) -> Effect | None:
    ours, against = found.runs(quantity.arm), found.runs(quantity.against)
    sign = -1.0 if found.task.recipe.lower_is_better else 1.0
    values: dict[int, float] = {}
    left_out: dict[int, str] = {}
    seeds = found.together(ours, against)
    for seed in seeds:
        pair = ours[seed], against[seed]
        wrong = [record.id for record in pair if record.diverged]
        if wrong:
            left_out[seed] = f"{' and '.join(wrong)} diverged"
            continue
        curves = [
            {step: sign * value for step, value in record.curve.items() if math.isfinite(value)}
            for record in pair
        ]
        if not all(curves):
            left_out[seed] = f"{' or '.join(record.id for record in pair)} has no curve"
            continue
        level = min(max(curve.values()) for curve in curves)
        mine, theirs = (
            min(step for step, value in curve.items() if value >= level) for curve in curves
        )
        values[seed] = math.log2(theirs / mine)
    if not seeds:
        return None
    made_of = [runs[seed] for runs in (ours, against) for seed in values]
    return found.effect(values, made_of, "halvings", left_out=left_out)


def _slope(found: _Found, quantity: Slope) -> Effect | None:
    task = found.task
    arms = {name: found.runs(name) for name in quantity.arms}
    seeds = found.together(*arms.values())
    if not seeds or not any(runs[seed].moments for runs in arms.values() for seed in seeds):
        return None
    sizes = [microbatch_size(task, task.arm(name)) for name in quantity.arms]
    values: dict[int, float] = {}
    left_out: dict[int, str] = {}
    for seed in seeds:
        runs = [arms[name][seed] for name in quantity.arms]
        wrong = [record.id for record in runs if record.diverged]
        if wrong:
            left_out[seed] = f"{' and '.join(wrong)} diverged"
            continue
        ratios = gradients.ratios(runs, quantity.orientation, quantity.matched)
        if isinstance(ratios, str):
            left_out[seed] = ratios
            continue
        values[seed] = gradients.slope(
            [math.log(size) for size in sizes], [math.log(ratio) for ratio in ratios]
        )
    made_of = [arms[name][seed] for name in quantity.arms for seed in values]
    return found.effect(values, made_of, "slope", left_out=left_out)


def microbatch_size(task: Task, arm: Arm) -> int:
    """Return b of an arm; plain training is b = B."""
    size = arm.training.get("batch_size", task.training.batch_size)
    return int(arm.training.get("microbatch_size") or size)
