"""A worker of a sweep or a race: runs jobs, and stops hopeless ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from microclip.report.runs import RunError, read_run
from microclip_lab.jobs.job_queue import Claim, JobQueue
from microclip_lab.jobs.plan import Job, QueueState, Result, Sweep, status
from microclip_lab.jobs.progress import Status
from microclip_lab.jobs.worker_loop import wait_for_lock, work
from microclip_lab.sweep.pruning import Pruner
from microclip_lab.training.config import DivergedError, Training
from microclip_lab.training.recipe import Recipe
from microclip_lab.training.train import train


class PrunedError(Exception):
    """A run is hopeless and was stopped; the message says why."""


@dataclass(frozen=True)
class Worker:
    """Runs the jobs of a plan."""

    recipe: Recipe[Any, Any]
    training: Training
    plan: Sweep
    queue: JobQueue[Job]
    out: Path  # run folders go below it
    pruner: Pruner | None
    report: Callable[[Status], None]

    def work(self) -> None:
        """Run jobs, together with other workers, until the plan is complete."""
        work(self.plan, self.queue, self.queue.state, self._do, self.report)

    def _do(self, claim: Claim[Job], state: QueueState[Job, Result]) -> tuple[Result, float]:
        result = self._train(claim, state)
        return result, result.metrics.get(f"validation_{self.plan.headline}", math.nan)

    def _train(self, claim: Claim[Job], state: QueueState[Job, Result]) -> Result:
        job = claim.job
        folder = self.out / job.folder
        hopeless = None
        metrics: dict[str, float] = {}

        def watch(step: int, figures: dict[str, float]) -> None:
            self.queue.note(claim, step, figures[f"validation_{self.plan.headline}"])
            # the jobs of others are updated when this one ends
            running = {**state.running, job: step}
            self.report(status(self.plan, replace(state, running=running)))
            verdict = None if self.pruner is None else self.pruner.verdict(claim)
            if verdict is not None:
                raise PrunedError(verdict)

        for step, value in self._curve(folder).items():  # if it was started before
            self.queue.note(claim, step, value)
        try:
            training = self._training(job, folder)
            finished = wait_for_lock(
                lambda: train(self.recipe, training, until=job.until, watch=watch)
            )
            metrics = finished.metrics
        except PrunedError as error:
            hopeless = str(error)
        except DivergedError as error:
            if job.stage == "tuning":
                hopeless = str(error)
            metrics = {f"validation_{self.plan.headline}": math.nan}
        return self._result(job, metrics, hopeless)

    def _training(self, job: Job, folder: Path) -> Training:
        tuning = job.stage == "tuning"
        return replace(
            self.training,
            out=folder,
            resume=True,
            microbatch_size=job.cell.microbatch_size,
            rule=job.cell.rule,
            learning_rate=job.learning_rate,
            seed=job.seed,
            # one page for all comes at the end, and tuning runs need no ledger
            page=False,
            ledger=self.training.ledger and not tuning,
        )

    def _result(self, job: Job, metrics: dict[str, float], hopeless: str | None) -> Result:
        headline = f"validation_{self.plan.headline}"
        curve = self._curve(self.out / job.folder)
        if headline not in metrics and curve:  # it had reached its rung before it was killed
            step = max(curve) if job.until is None else job.until
            metrics = {**metrics, headline: curve.get(step, math.nan)}
        return Result(job.folder, metrics, curve, hopeless)

    def _curve(self, folder: Path) -> dict[int, float]:
        """Return the validation figures in a run's folder."""
        try:
            return read_run(folder).metrics.get(f"validation_{self.plan.headline}", {})
        except RunError:
            return {}
