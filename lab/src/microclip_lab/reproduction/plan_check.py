"""Whether records were made by this plan, so that runs of different kinds are never mixed."""

from __future__ import annotations

import json
from typing import Any

from microclip_lab.reproduction.jobs import Job
from microclip_lab.reproduction.records import Records
from microclip_lab.reproduction.run_job import Order, order_of, settings_of
from microclip_lab.reproduction.study import Study
from microclip_lab.sweep.setup import differences
from microclip_lab.training.config import SettingError


class OtherPlanError(SettingError):
    """A record is of a run that this plan would do in another way."""


def check(study: Study, records: Records) -> None:
    """Find out whether every record is of a run as the plan would do it."""
    for job, record in records.items():
        order = _order(study, job, records)
        if order is None:
            continue
        changed = differences(_as_read(record.settings), _as_read(settings_of(order)))
        if changed:
            raise OtherPlanError(
                f"The record {job.id} is of a run that was done in another way: "
                f"{'; '.join(changed)}. Choose another folder (--out), or delete the record, and "
                "the run is done again."
            )


def _order(study: Study, job: Job, records: Records) -> Order | None:
    """Return what a job comes to; None if it is of another plan, or of what is not there."""
    task = next((task for task in study.tasks if task.name == job.task), None)
    if task is None or job.arm not in {arm.name for arm in task.arms}:
        return None
    arm = task.arm(job.arm)
    if not all(study.is_settled(task, task.arm(name), records) for name in arm.needs):
        return None
    if study.rate(task, arm, job.value, records) is None:
        return None
    if study.lacks_source(task, arm, job.seed, records):
        return None
    return order_of(study, job, records)


def _as_read(settings: Any) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return read
