"""A worker of the reproduction: does missing runs and puts their records on the shelf.

The shelf is the truth; the register only says who is at work on what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from microclip_lab.jobs.job import Result
from microclip_lab.jobs.job_queue import Claim, Register, Standing
from microclip_lab.jobs.plan import status
from microclip_lab.jobs.progress import Status
from microclip_lab.jobs.worker_loop import alone, work
from microclip_lab.reproduction.jobs import Job
from microclip_lab.reproduction.record_store import Shelf
from microclip_lab.reproduction.records import Record, write
from microclip_lab.reproduction.run_job import carry_out, order_of, tidy_up
from microclip_lab.reproduction.study import Study, score


@dataclass(frozen=True)
class Worker:
    """Does the runs of a study."""

    study: Study
    register: Register[Job]
    shelf: Shelf
    runs: Path  # run folders go below it, as long as they are needed
    report: Callable[[Status], None]

    def work(self) -> None:
        """Do what is to be done, together with others, until all of it is done."""
        work(self.study, self.register, self.look, self._do, self.report)

    def look(self) -> Standing[Job, Record]:
        """Return how things are."""
        standing = self.register.standing()
        return Standing(self.shelf.records(), standing.under_way, standing.broken)

    def _do(self, claim: Claim[Job], standing: Standing[Job, Record]) -> tuple[Result, float]:
        job = claim.job
        if self.shelf.has(job):  # somebody put it there in the meantime
            record = self.shelf.records()[job]
        else:
            record = self._carry_out(claim, standing)
            write(self.shelf.folder, record)
            tidy_up(self.runs / job.id)
        value = score(self.study.task(job.task), record)
        return Result(job.id, record.metrics, record.curve), value

    def _carry_out(self, claim: Claim[Job], standing: Standing[Job, Record]) -> Record:
        job = claim.job
        order = order_of(self.study, job, standing.finished)
        headline = f"validation_{order.recipe.headline}"

        def watch(step: int, figures: dict[str, float]) -> None:
            self.register.note(claim, step, figures[headline])
            # what others have done meanwhile is asked when this run is done
            under_way = {**standing.under_way, job: step}
            self.report(status(self.study, replace(standing, under_way=under_way)))

        return alone(lambda: carry_out(order, self.runs / job.id, watch))
