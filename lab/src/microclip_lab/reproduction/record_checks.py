"""Checking records: against the plan, and by repeating a run and comparing bit for bit."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from microclip_lab.reproduction.config import RANDOM
from microclip_lab.reproduction.records import Job, Record, Records, machine_class, versions
from microclip_lab.reproduction.run_job import RunSpec, run_job, settings_of, spec_of
from microclip_lab.reproduction.study import Study
from microclip_lab.sweep.setup import differences
from microclip_lab.training.config import SettingError


class OtherPlanError(SettingError):
    """A record has other settings than the plan."""


def check(study: Study, records: Records) -> None:
    """Raise an error if a record has other settings than the plan."""
    for job, record in records.items():
        spec = _spec(study, job, records)
        if spec is None:
            continue
        changed = differences(_as_read(record.settings), _as_read(settings_of(spec)))
        if changed:
            raise OtherPlanError(
                f"The record {job.id} was made with other settings: {'; '.join(changed)}. "
                "Choose another folder (--out), or delete the record to repeat the run."
            )


def _spec(study: Study, job: Job, records: Records) -> RunSpec | None:
    """Return the spec of a job; None if it is not in the plan, or its sources are missing."""
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
    return spec_of(study, job, records)


def _as_read(settings: Any) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return read


SHOWN = 16  # characters of a fingerprint to show
PLACES = ("best_step", "weights", "diverged", "settings", "facts", "domain_weights")
SERIES = ("curve", "moments", "course")


class NotTheSameError(SettingError):
    """A repeated run differs from its record."""


@dataclass(frozen=True)
class FieldComparison:
    """A field of a record, before and now."""

    name: str
    before: str
    now: str
    same: bool


def rerun(study: Study, records: Records, id: str, console: Console, log: Console) -> None:
    """Repeat a run, print the comparison, and raise an error if the two differ."""
    before = find(study, records, id)
    log.print(f"Repeating {before.id}.", soft_wrap=True, highlight=False)
    others = made_otherwise(before)
    if others:
        log.print(
            f"The record is from another environment ({'; '.join(others)}), so the last bits may "
            "differ.",
            soft_wrap=True,
            highlight=False,
        )
    with tempfile.TemporaryDirectory() as folder:
        now = run_job(spec_of(study, before.job, records), Path(folder) / "run")
    rows = compare(before, now)
    _show(before, rows, console)
    different = [row.name for row in rows if not row.same]
    if different:
        raise NotTheSameError(
            f"The repeated run {before.id} differs from its record in "
            f"{', '.join(different)}."
            + (" The record is from another environment, which may be why." if others else "")
        )
    console.print("Identical, bit for bit.", highlight=False)


def find(study: Study, records: Records, id: str) -> Record:
    """Return the record with this id, or a random one."""
    known = {task.name for task in study.tasks}
    found = {record.id: record for record in records.values() if record.job.task in known}
    if not found:
        raise SettingError("There are no records to compare with. Give their folder with --out.")
    if id == RANDOM:
        return found[random.SystemRandom().choice(sorted(found))]
    if id not in found:
        raise SettingError(
            f"again must be the id of a record, such as {min(found)}, or {RANDOM}, but got {id!r}."
        )
    return found[id]


def made_otherwise(record: Record) -> list[str]:
    """Return how this machine and its versions differ from those of a record."""
    before = {name: value for name, value in record.made.items() if name != "seconds"}
    return differences(before, {**versions(), **machine_class()})


def compare(before: Record, now: Record) -> list[FieldComparison]:
    """Return all recorded fields side by side, except for the duration."""
    one, other = before.to_json(), now.to_json()
    names = {**one["metrics"], **other["metrics"]}
    rows = [_place(name, one["metrics"].get(name), other["metrics"].get(name)) for name in names]
    rows += [_series(name, one[name], other[name]) for name in SERIES]
    return rows + [_place(name, one[name], other[name]) for name in PLACES]


def _place(name: str, before: Any, now: Any) -> FieldComparison:
    return FieldComparison(name, _said(before), _said(now), before == now)


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{len(value)} entries"
    if isinstance(value, float):
        return repr(value)
    return "none" if value in (None, "") else str(value)[:SHOWN]


def _series(name: str, before: Any, now: Any) -> FieldComparison:
    one, other = _numbers(before), _numbers(now)
    equal = sum(a == b for a, b in zip(one, other, strict=False))
    said = f"{len(other)} values" + (f", {equal} equal" if one != other else "")
    return FieldComparison(name, f"{len(one)} values", said, before == now)


def _numbers(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [each for inner in value.values() for each in _numbers(inner)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [each for inner in value for each in _numbers(inner)]
    return [value]


def _show(before: Record, rows: Sequence[FieldComparison], console: Console) -> None:
    table = Table(title=before.id, title_justify="left")
    for heading in ("", "recorded", "now", "same"):
        table.add_column(heading)
    for row in rows:
        table.add_row(row.name, row.before, row.now, "yes" if row.same else "NO")
    console.print(table)
