"""What page and document are made from: the records, judged and tabulated once."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from microclip.report.statistics import Estimate
from microclip_lab.reproduction import record_tables as tables
from microclip_lab.reproduction.effects import Effect, effect
from microclip_lab.reproduction.quantities import Quantity
from microclip_lab.reproduction.record_tables import ArmRow, Ratio, Trial
from microclip_lab.reproduction.records import Records
from microclip_lab.reproduction.study import Study
from microclip_lab.reproduction.tasks import Task, tasks
from microclip_lab.reproduction.verdicts import ClaimVerdict, PartVerdict, controls, judge


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
        return {t.name: tables.arm_rows(self.study, self.records, t) for t in self.study.tasks}

    @functools.cached_property
    def trials(self) -> Mapping[str, list[Trial]]:
        """What was tuned, by task."""
        return {t.name: tables.trials(self.study, self.records, t) for t in self.study.tasks}

    @functools.cached_property
    def curves(self) -> Mapping[str, dict[str, dict[int, Estimate]]]:
        """Validation figures by task, arm and step."""
        return {t.name: tables.curves(self.study, self.records, t) for t in self.study.tasks}

    @functools.cached_property
    def moments(self) -> Mapping[str, dict[str, dict[int, dict[str, Estimate]]]]:
        """Figures of gradients by task, arm, step and name."""
        return {t.name: tables.moments(self.study, self.records, t) for t in self.study.tasks}

    @functools.cached_property
    def ratios(self) -> Mapping[str, list[Ratio]]:
        """The two c-hats by task."""
        return {t.name: tables.ratios(self.study, self.records, t) for t in self.study.tasks}

    @functools.cached_property
    def domain_weights(self) -> Mapping[str, dict[str, dict[str, Estimate]]]:
        """What examples of a domain weighed, by task, arm and domain."""
        return {
            t.name: tables.domain_weights(self.study, self.records, t) for t in self.study.tasks
        }

    def task(self, name: str) -> Task:
        """Return a task."""
        return self.study.task(name)

    def claim(self, name: str) -> ClaimVerdict:
        """Return the verdict on a claim."""
        return next(found for found in self.claims if found.claim.id == name)

    def effect(self, quantity: Quantity) -> Effect | None:
        """Return an effect that no claim speaks of."""
        return effect(self.study, self.records, quantity)

    def runs(self, task: str, arm: str) -> tuple[str, ...]:
        """Return the ids of the runs that an arm is judged by."""
        return next((row.records for row in self.rows.get(task, ()) if row.arm.name == arm), ())

    def done(self, task: str) -> list[ArmRow]:
        """Return the arms of a task that have been run, or cannot be."""
        return [row for row in self.rows.get(task, ()) if row.figures or row.is_lost]


def is_the_plan(study: Study) -> bool:
    """Say whether tasks are those of the default plan; verdicts on shorter ones mean nothing."""
    whole = {task.name: task for task in tasks()}
    return all(whole.get(task.name) == task for task in study.tasks)
