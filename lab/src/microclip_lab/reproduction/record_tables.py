"""The records of a task as tables: arms, tuning, curves, snapshots; and a cached view of all tasks.

Figures are in points, with 95 % intervals over seeds; diverged runs count as the worst possible.
Data only, for results.json and the page.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from microclip.report.statistics import Estimate, estimate
from microclip_lab.reproduction import gradient_snapshots as gradients
from microclip_lab.reproduction.effects import (
    ACCURACY,
    ERROR_RATE,
    PERCENT,
    Effect,
    Gain,
    Orientation,
    Quantity,
    effect,
    microbatch_size,
    points,
)
from microclip_lab.reproduction.records import Record, Records
from microclip_lab.reproduction.study import Study
from microclip_lab.reproduction.tasks import EVALUATION_SEED, PLAIN, TUNING_SEED, Arm, Task, tasks
from microclip_lab.reproduction.verdicts import ClaimVerdict, PartVerdict, controls, judge

BEST, LAST = "best_test_", "test_"  # of the best checkpoint; after the last step
COSINES = ("dragger_benign", "benign_benign", "dragger_dragger")
RATIOS: tuple[Orientation, ...] = ("dragger_over_benign", "benign_over_dragger")
OF_MOMENTS = (
    *COSINES,
    *(f"{name}_spread" for name in COSINES),
    "dragger_to_mean",
    "benign_to_mean",
    *RATIOS,
    "dragger_over_mean",
    "loss_benign",
    "loss_draggers",
)


@dataclass(frozen=True)
class ArmRow:
    """The results of an arm."""

    arm: Arm
    size: int  # b; B for plain training
    batch: int
    value: float | None  # of its tuned hyperparameter
    rate: float | None  # its learning rate
    is_lost: bool  # it diverged with every value
    figures: Mapping[str, Estimate]  # by name, as best_test_accuracy
    gain: Effect | None  # against plain, at the best checkpoint
    last_gain: Effect | None  # and after the last step
    diverged: tuple[str, ...]  # ids
    records: tuple[str, ...]  # ids


@dataclass(frozen=True)
class Trial:
    """One value of an arm's tuned hyperparameter."""

    arm: str
    tuned: str
    value: float
    score: float | None  # mean best validation figure, in points; None: diverged
    is_chosen: bool
    at_edge: bool  # the smallest or largest one tried
    records: tuple[str, ...]


@dataclass(frozen=True)
class Ratio:
    """A ratio of norms of an arm, at the last step and at a loss that all arms reach."""

    arm: str
    size: int
    at_step: Mapping[str, Estimate]  # by orientation
    at_loss: Mapping[str, Estimate]
    unmatched: int  # seeds in which some arm starts below the common loss
    records: tuple[str, ...]


def arm_rows(study: Study, records: Records, task: Task) -> list[ArmRow]:
    """Return a row for each arm, in the plan's order."""
    return [_arm_row(study, records, task, arm) for arm in task.arms]


def trials(study: Study, records: Records, task: Task) -> list[Trial]:
    """Return every value that was tried on all tuning seeds, by arm."""
    found = []
    for arm in task.arms:
        if arm.tuned is None:
            continue
        settled = study.is_settled(task, arm, records)
        chosen = study.chosen(task, arm, records) if settled else None
        scores = study.scores(task, arm, records)
        for value, score in sorted(scores.items()):
            better = -score if task.recipe.lower_is_better else score
            ids = sorted(
                job.id
                for job in records
                if (job.task, job.arm, job.stage, job.value)
                == (task.name, arm.name, "tuning", value)
                and TUNING_SEED <= job.seed < TUNING_SEED + task.tuning_seeds
            )
            known = PERCENT * better if math.isfinite(score) else None
            edge = value in (min(scores), max(scores))
            found.append(
                Trial(arm.name, str(arm.tuned), value, known, value == chosen, edge, tuple(ids))
            )
    return found


def curves(study: Study, records: Records, task: Task) -> dict[str, dict[int, Estimate]]:
    """Return the mean validation figure of each arm by step."""
    found = {}
    for arm in task.arms:
        runs = list(study.evaluated(task, arm, records).values())
        steps = sorted({step for record in runs for step in record.curve})
        by_step = {
            step: _known([_on_curve(task, record, step) for record in runs]) for step in steps
        }
        if by_step:
            found[arm.name] = {step: estimate(values) for step, values in by_step.items() if values}
    return found


def moments(
    study: Study, records: Records, task: Task
) -> dict[str, dict[int, dict[str, Estimate]]]:
    """Return figures of gradients by arm, step and name: means over seeds."""
    found: dict[str, dict[int, dict[str, Estimate]]] = {}
    for arm in task.arms:
        if not arm.takes_snapshots:
            continue
        runs = study.evaluated(task, arm, records).values()
        everything = [moment for record in runs for moment in record.moments]
        by_step: dict[int, dict[str, Estimate]] = {}
        for step in sorted({int(moment["step"]) for moment in everything}):
            here = [moment for moment in everything if moment["step"] == step]
            known = {
                name: _known([gradients.value(moment, name) for moment in here])
                for name in OF_MOMENTS
            }
            by_step[step] = {name: estimate(values) for name, values in known.items() if values}
        if by_step:
            found[arm.name] = by_step
    return found


def ratios(study: Study, records: Records, task: Task) -> list[Ratio]:
    """Return c-hat of each size and of plain training, by ascending b, as in Table 3."""
    arms = sorted(
        (arm for arm in task.arms if arm.takes_snapshots),
        key=lambda arm: (microbatch_size(task, arm), arm.name),
    )
    runs = {arm.name: study.evaluated(task, arm, records) for arm in arms}
    runs = {name: each for name, each in runs.items() if any(r.moments for r in each.values())}
    if not runs:
        return []
    seeds = sorted(set.intersection(*(set(each) for each in runs.values())))
    found = []
    matched = {
        (orientation, how, seed): gradients.ratios(
            [each[seed] for each in runs.values()], orientation, how
        )
        for orientation in RATIOS
        for how in gradients.MATCHED
        for seed in seeds
    }
    for place, name in enumerate(runs):

        def known(how: str, place: int = place) -> dict[str, Estimate]:
            values = {
                orientation: [
                    each[place]
                    for (o, h, _), each in matched.items()
                    if (o, h) == (orientation, how) and not isinstance(each, str)
                ]
                for orientation in RATIOS
            }
            return {o: estimate(each) for o, each in values.items() if each}

        unmatched = sum(isinstance(matched[RATIOS[0], "loss", seed], str) for seed in seeds)
        ids = tuple(runs[name][seed].id for seed in seeds)
        size = microbatch_size(task, task.arm(name))
        found.append(Ratio(name, size, known("step"), known("loss"), unmatched, ids))
    return found


def domain_weights(study: Study, records: Records, task: Task) -> dict[str, dict[str, Estimate]]:
    """Return the mean weight of an example of each domain, by arm; the average is 1."""
    found = {}
    for arm in task.arms:
        weighed = [
            record.domain_weights
            for record in study.evaluated(task, arm, records).values()
            if record.domain_weights
        ]
        if weighed:
            found[arm.name] = {
                domain: estimate([each[domain] for each in weighed]) for domain in weighed[0]
            }
    return found


def looked_at(study: Study, records: Records, task: Task) -> tuple[int, int]:
    """Return the smallest numbers of draggers and benign examples in any snapshot."""
    found = [
        moment
        for arm in task.arms
        for record in study.evaluated(task, arm, records).values()
        for moment in record.moments
    ]
    if not found:
        return 0, 0
    return (
        int(min(moment["draggers"] for moment in found)),
        int(min(moment["benign"] for moment in found)),
    )


def _arm_row(study: Study, records: Records, task: Task, arm: Arm) -> ArmRow:
    settled = study.is_settled(task, arm, records)
    value = study.chosen(task, arm, records) if settled else None
    is_lost = settled and (
        (arm.tuned is not None and value is None) or study.rate_is_lost(task, arm, records)
    )
    runs = study.evaluated(task, arm, records)
    wrong = [record.id for record in runs.values() if record.diverged]
    names = sorted({name for record in runs.values() for name in record.metrics if _is_shown(name)})
    is_plain = arm.name == PLAIN
    headline = task.recipe.headline
    return ArmRow(
        arm=arm,
        size=microbatch_size(task, arm),
        batch=int(arm.training.get("batch_size", task.training.batch_size)),
        value=value,
        rate=study.rate(task, arm, value, records) if settled and not is_lost else None,
        is_lost=is_lost,
        figures={
            name: estimate(_known([points(record, name) for record in runs.values()]))
            for name in names
        },
        gain=None if is_plain else effect(study, records, Gain(task.name, (arm.name,))),
        last_gain=None
        if is_plain
        else effect(study, records, Gain(task.name, (arm.name,), figures=(LAST + headline,))),
        diverged=tuple(wrong),
        records=tuple(record.id for record in runs.values()),
    )


def planned(task: Task) -> Sequence[int]:
    """Return the evaluation seeds of a task."""
    return range(EVALUATION_SEED, EVALUATION_SEED + task.seeds)


def _is_shown(name: str) -> bool:
    of_test = name.startswith((BEST, LAST))
    return of_test and bool(ACCURACY.search(name) or ERROR_RATE.search(name))


def _on_curve(task: Task, record: Record, step: int) -> float | None:
    value = record.curve.get(step, math.nan)
    if math.isfinite(value):
        return PERCENT * value
    worst = PERCENT if task.recipe.lower_is_better else 0.0
    return worst if record.diverged or step in record.curve else None


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


@dataclass(frozen=True, eq=False)
class View:
    """A study with its records."""

    study: Study
    records: Records

    @functools.cached_property
    def claims(self) -> tuple[ClaimVerdict, ...]:
        """The verdicts."""
        return judge(self.study, self.records)

    @functools.cached_property
    def controls(self) -> tuple[PartVerdict, ...]:
        """The controls."""
        return controls(self.study, self.records)

    @functools.cached_property
    def rows(self) -> Mapping[str, list[ArmRow]]:
        """The arms by task."""
        return {t.name: arm_rows(self.study, self.records, t) for t in self.study.tasks}

    @functools.cached_property
    def trials(self) -> Mapping[str, list[Trial]]:
        """What was tuned, by task."""
        return {t.name: trials(self.study, self.records, t) for t in self.study.tasks}

    @functools.cached_property
    def curves(self) -> Mapping[str, dict[str, dict[int, Estimate]]]:
        """Validation figures by task, arm and step."""
        return {t.name: curves(self.study, self.records, t) for t in self.study.tasks}

    @functools.cached_property
    def moments(self) -> Mapping[str, dict[str, dict[int, dict[str, Estimate]]]]:
        """Figures of gradients by task, arm, step and name."""
        return {t.name: moments(self.study, self.records, t) for t in self.study.tasks}

    @functools.cached_property
    def ratios(self) -> Mapping[str, list[Ratio]]:
        """The two c-hats by task."""
        return {t.name: ratios(self.study, self.records, t) for t in self.study.tasks}

    @functools.cached_property
    def domain_weights(self) -> Mapping[str, dict[str, dict[str, Estimate]]]:
        """Mean weights of examples by task, arm and domain."""
        return {t.name: domain_weights(self.study, self.records, t) for t in self.study.tasks}

    def task(self, name: str) -> Task:
        """Return a task."""
        return self.study.task(name)

    def claim(self, name: str) -> ClaimVerdict:
        """Return the verdict on a claim."""
        return next(found for found in self.claims if found.claim.id == name)

    def effect(self, quantity: Quantity) -> Effect | None:
        """Return an effect that is not part of a claim."""
        return effect(self.study, self.records, quantity)

    def runs(self, task: str, arm: str) -> tuple[str, ...]:
        """Return the ids of an arm's evaluation runs."""
        return next((row.records for row in self.rows.get(task, ()) if row.arm.name == arm), ())

    def done(self, task: str) -> list[ArmRow]:
        """Return the arms of a task that have results, or diverged with every value."""
        return [row for row in self.rows.get(task, ()) if row.figures or row.is_lost]


def is_default_plan(study: Study) -> bool:
    """Return whether tasks are those of the default plan; verdicts on others mean nothing."""
    whole = {task.name: task for task in tasks()}
    return all(whole.get(task.name) == task for task in study.tasks)
