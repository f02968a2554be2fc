"""Which trainings are hopeless: those that diverged, and those far behind others of their cell.

Only learning rates compete here, within a cell and on tuning seeds. Cells are never ended for
being worse than other cells: that would bias their comparison.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Container
from dataclasses import dataclass
from typing import cast

import optuna
from optuna.pruners import MedianPruner
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from microclip_lab.jobs.job import Job
from microclip_lab.jobs.job_queue import JOB, Claim, Register

WARM_UP = 0.5  # of the steps: a high rate looks bad until it has come down
RIVALS = 2  # finished trainings that a judgement needs at least
FAR_BEHIND = 0.5  # of the way that others have come since the first look


@dataclass(frozen=True)
class Pruner:
    """Ends hopeless trainings."""

    register: Register[Job]
    steps: int

    def verdict(self, claim: Claim[Job]) -> str | None:
        """Say why a training is hopeless after its last look, or nothing."""
        job = claim.job
        if job.stage != "tuning":
            return None
        trial = self.register.storage.get_trial(claim.trial_id)
        step = trial.last_step
        if step is None:
            return None
        if not math.isfinite(trial.intermediate_values[step]):
            return f"it had diverged by step {step}"
        warm_up = round(WARM_UP * self.steps)
        median = MedianPruner(n_startup_trials=RIVALS, n_warmup_steps=warm_up)
        rivals = _Rivals(self.register.study, job)
        # a pruner asks nothing of a study but what rivals answer
        if not median.prune(cast(optuna.Study, rivals), trial):
            return None
        # of two good rates one is always behind, which is no reason to end it
        way = _way(trial, rivals.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)), step)
        if way is None or way >= FAR_BEHIND:
            return None
        return f"by step {step} it had come {way:.0%} as far as other learning rates"


def _way(trial: FrozenTrial, rivals: list[FrozenTrial], step: int) -> float | None:
    """Return how far a training has come since the first look; 1: as far as half of its rivals."""
    first = min(trial.intermediate_values)
    curves = [
        rival.intermediate_values
        for rival in rivals
        if {first, step} <= rival.intermediate_values.keys()
    ]
    if not curves:
        return None
    start = statistics.median(curve[first] for curve in curves)
    come = statistics.median(curve[step] for curve in curves) - start
    if not math.isfinite(come) or come == 0:
        return None
    ways = [(v - start) / come for v in trial.intermediate_values.values() if math.isfinite(v)]
    return max(0.0, *ways)  # as the median rule does: by the best look so far


@dataclass(frozen=True)
class _Rivals:
    """The trials of a study that choose the learning rate of one cell, but for one rate."""

    study: optuna.Study
    job: Job

    @property
    def direction(self) -> StudyDirection:
        return self.study.direction

    def get_trials(
        self, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        return [
            trial
            for trial in self.study.get_trials(deepcopy=deepcopy, states=states)
            if (other := Job.from_json(trial.user_attrs[JOB])).stage == "tuning"
            and other.cell == self.job.cell
            and other.learning_rate != self.job.learning_rate
        ]
