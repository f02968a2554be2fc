"""Which tuning runs are hopeless: those that diverged, and those far behind others of their cell.

Only learning rates of one cell compete, on tuning seeds. Cells are never stopped for being worse
than other cells: that would bias their comparison.
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

from microclip_lab.jobs.job_queue import JOB, Claim, JobQueue
from microclip_lab.jobs.plan import Job

WARM_UP = 0.5  # of the steps: a high rate looks bad before it decays
RIVALS = 2  # finished runs needed for a decision
FAR_BEHIND = 0.5  # of the progress of others since the first evaluation


@dataclass(frozen=True)
class Pruner:
    """Stops hopeless runs."""

    queue: JobQueue[Job]
    steps: int

    def verdict(self, claim: Claim[Job]) -> str | None:
        """Return why a run is hopeless after its last evaluation, or None."""
        job = claim.job
        if job.stage != "tuning":
            return None
        trial = self.queue.storage.get_trial(claim.trial_id)
        step = trial.last_step
        if step is None:
            return None
        if not math.isfinite(trial.intermediate_values[step]):
            return f"it had diverged by step {step}"
        warm_up = round(WARM_UP * self.steps)
        median = MedianPruner(n_startup_trials=RIVALS, n_warmup_steps=warm_up)
        rivals = _Rivals(self.queue.study, job)
        # all that the pruner uses of a study
        if not median.prune(cast(optuna.Study, rivals), trial):
            return None
        # one of two good rates is always behind, which is no reason to stop it
        way = _way(trial, rivals.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)), step)
        if way is None or way >= FAR_BEHIND:
            return None
        return f"by step {step} it had come {way:.0%} as far as other learning rates"


def _way(trial: FrozenTrial, rivals: list[FrozenTrial], step: int) -> float | None:
    """Return the progress since the first evaluation, relative to the median of the rivals."""
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
    return max(0.0, *ways)  # by the best evaluation so far, as the median rule does


@dataclass(frozen=True)
class _Rivals:
    """The tuning trials of a cell at other learning rates."""

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
