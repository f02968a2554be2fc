"""A worker of a sweep or a race: how a job of theirs is done, and when it is not gone on with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from microclip.report.runs import RunError, read_run
from microclip_lab.jobs.job import Job, Result
from microclip_lab.jobs.job_queue import Claim, Register, Standing
from microclip_lab.jobs.plan import Sweep, status
from microclip_lab.jobs.progress import Status
from microclip_lab.jobs.worker_loop import alone, work
from microclip_lab.sweep.pruning import Pruner
from microclip_lab.training.config import DivergedError, Training
from microclip_lab.training.recipe import Recipe
from microclip_lab.training.train import train


class HopelessError(Exception):
    """A training need not be gone on with; the message says why."""


@dataclass(frozen=True)
class Worker:
    """Does the jobs of a plan."""

    recipe: Recipe[Any, Any]
    training: Training
    plan: Sweep
    register: Register[Job]
    out: Path  # run folders go below it
    pruner: Pruner | None
    report: Callable[[Status], None]

    def work(self) -> None:
        """Do what is to be done, together with others, until all of it is done."""
        work(self.plan, self.register, self.register.standing, self._do, self.report)

    def _do(self, claim: Claim[Job], standing: Standing[Job, Result]) -> tuple[Result, float]:
        result = self._train(claim, standing)
        return result, result.metrics.get(f"validation_{self.plan.headline}", math.nan)

    def _train(self, claim: Claim[Job], standing: Standing[Job, Result]) -> Result:
        job = claim.job
        folder = self.out / job.folder
        hopeless = None
        metrics: dict[str, float] = {}

        def watch(step: int, figures: dict[str, float]) -> None:
            self.register.note(claim, step, figures[f"validation_{self.plan.headline}"])
            # what others have done meanwhile is asked when this job is done
            under_way = {**standing.under_way, job: step}
            self.report(status(self.plan, replace(standing, under_way=under_way)))
            verdict = None if self.pruner is None else self.pruner.verdict(claim)
            if verdict is not None:
                raise HopelessError(verdict)

        for step, value in self._curve(folder).items():  # of one that was begun before
            self.register.note(claim, step, value)
        try:
            training = self._training(job, folder)
            finished = alone(lambda: train(self.recipe, training, until=job.until, watch=watch))
            metrics = finished.metrics
        except HopelessError as error:
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
            # a page for all comes at the end, and nobody asks whom a trial rate held back
            page=False,
            ledger=self.training.ledger and not tuning,
        )

    def _result(self, job: Job, metrics: dict[str, float], hopeless: str | None) -> Result:
        headline = f"validation_{self.plan.headline}"
        curve = self._curve(self.out / job.folder)
        if headline not in metrics and curve:  # it had come to its rung before, and was killed
            step = max(curve) if job.until is None else job.until
            metrics = {**metrics, headline: curve.get(step, math.nan)}
        return Result(job.folder, metrics, curve, hopeless)

    def _curve(self, folder: Path) -> dict[int, float]:
        """Return the validation figures that a run's folder holds."""
        try:
            return read_run(folder).metrics.get(f"validation_{self.plan.headline}", {})
        except RunError:
            return {}
