"""A worker: takes jobs from the register and does them, until there is nothing left to do.

What to do next is asked of the plan whenever a job ends, so going on after an interruption, or
joining others, is the same as beginning.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from microclip.demo.progress import Status
from microclip.recipes.config import DivergedError, Training
from microclip.recipes.recipe import Recipe
from microclip.recipes.sweep.job import Job, Result
from microclip.recipes.sweep.plan import Plan, status
from microclip.recipes.sweep.pruning import Pruner
from microclip.recipes.sweep.register import Claim, GoneError, Register, Standing
from microclip.recipes.sweep.storage import GRACE
from microclip.recipes.train import Watch, train
from microclip.report.runs import RunError, read_run

logger = logging.getLogger(__name__)

POLL = 1.0  # seconds between two looks at what others do


class HopelessError(Exception):
    """A training need not be gone on with; the message says why."""


class StoppedError(KeyboardInterrupt):
    """A sweep was asked to stop, and did so with its trainings safe."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(
            "Interrupted. What was finished is kept, and what was begun has a checkpoint: the same "
            "command goes on from there."
        )
        self.exit_code = exit_code


class TrialError(OSError):
    """Trainings of the sweep ended in errors, so it cannot be finished."""


@dataclass(frozen=True)
class Worker:
    """Does the jobs of a plan."""

    recipe: Recipe[Any, Any]
    training: Training
    plan: Plan
    register: Register
    out: Path  # run folders go below it
    pruner: Pruner | None
    report: Callable[[Status], None]

    def work(self) -> None:
        """Do what is to be done, together with others, until all of it is done."""
        while True:
            self.register.release_abandoned()
            standing = self.register.standing()
            self.report(status(self.plan, standing))
            missing = self.plan.missing(standing.finished)
            possible = [job for job in missing if job not in standing.broken]
            if not missing:
                return
            if not possible:
                raise TrialError(_what_broke(standing.broken))
            claim = self.register.claim(possible)
            if claim is None:
                time.sleep(POLL)
            else:
                self._do(claim, standing)

    def _do(self, claim: Claim, standing: Standing) -> None:
        """Do a job; whatever happens, the register hears of it."""
        try:
            with self.register.beating(claim):
                result = self._train(claim, standing)
            headline = f"validation_{self.plan.headline}"
            self.register.complete(claim, result, result.metrics.get(headline, math.nan))
        except GoneError:
            pass  # whoever has it now will finish it
        except KeyboardInterrupt as error:
            self.register.give_back(claim, "it was interrupted")
            raise StoppedError(getattr(error, "exit_code", 130)) from error
        except Exception as error:
            logger.exception("The %s ended in an error.", claim.job)
            self.register.give_up(claim, f"{type(error).__name__}: {error}")

    def _train(self, claim: Claim, standing: Standing) -> Result:
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
            metrics = self._alone(self._training(job, folder), job.until, watch)
        except HopelessError as error:
            hopeless = str(error)
        except DivergedError as error:
            if job.stage == "tuning":
                hopeless = str(error)
            metrics = {f"validation_{self.plan.headline}": math.nan}
        return self._result(job, metrics, hopeless)

    def _alone(self, training: Training, until: int | None, watch: Watch) -> dict[str, float]:
        """Train; if somebody holds the folder who was given up too early, wait for a while."""
        end = time.monotonic() + GRACE
        while True:
            try:
                return train(self.recipe, training, until=until, watch=watch).metrics
            except FileExistsError:
                if time.monotonic() > end:
                    raise
                time.sleep(POLL)

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


def _what_broke(broken: Mapping[Job, str]) -> str:
    shown = "\n".join(f"  {job}: {error}" for job, error in list(broken.items())[:5])
    return (
        f"{len(broken)} training{'s' if len(broken) > 1 else ''} of the sweep ended in an error. "
        f"What was finished is kept; the same command tries these again.\n{shown}"
    )
