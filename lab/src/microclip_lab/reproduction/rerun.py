"""Doing a recorded run again, to see whether it comes to the same, bit for bit."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from microclip_lab.reproduction.config import RANDOM
from microclip_lab.reproduction.machine import machine_class, versions
from microclip_lab.reproduction.records import Record, Records
from microclip_lab.reproduction.run_job import carry_out, order_of
from microclip_lab.reproduction.study import Study
from microclip_lab.sweep.setup import differences
from microclip_lab.training.config import SettingError

SHOWN = 16  # characters of a fingerprint
PLACES = ("best_step", "weights", "diverged", "settings", "facts", "domain_weights")
SERIES = ("curve", "moments", "course")


class NotTheSameError(SettingError):
    """A run that was done again came to something else."""


@dataclass(frozen=True)
class Row:
    """Something of a record, as it was and as it is now."""

    name: str
    before: str
    now: str
    same: bool


def do_again(study: Study, records: Records, id: str, console: Console, log: Console) -> None:
    """Do a run again, show both, and raise an error if they differ."""
    before = find(study, records, id)
    log.print(f"Doing {before.id} again.", soft_wrap=True, highlight=False)
    others = made_otherwise(before)
    if others:
        log.print(
            f"The record was made elsewhere ({'; '.join(others)}), so the last bits may differ.",
            soft_wrap=True,
            highlight=False,
        )
    with tempfile.TemporaryDirectory() as folder:
        now = carry_out(order_of(study, before.job, records), Path(folder) / "run")
    rows = compare(before, now)
    _show(before, rows, console)
    different = [row.name for row in rows if not row.same]
    if different:
        raise NotTheSameError(
            f"The run {before.id} came to something else than its record: "
            f"{', '.join(different)}."
            + (" It was made elsewhere, which may be why." if others else "")
        )
    console.print("The same, bit for bit.", highlight=False)


def find(study: Study, records: Records, id: str) -> Record:
    """Return the record of this id, or any one."""
    known = {task.name for task in study.tasks}
    found = {record.id: record for record in records.values() if record.job.task in known}
    if not found:
        raise SettingError(
            "There are no records to compare with. Give the folder that holds them: --out."
        )
    if id == RANDOM:
        return found[random.SystemRandom().choice(sorted(found))]
    if id not in found:
        raise SettingError(
            f"again must be the id of a record, such as {min(found)}, or {RANDOM}, but got {id!r}."
        )
    return found[id]


def made_otherwise(record: Record) -> list[str]:
    """Say in what this machine and its versions differ from those of a record."""
    before = {name: value for name, value in record.made.items() if name != "seconds"}
    return differences(before, {**versions(), **machine_class()})


def compare(before: Record, now: Record) -> list[Row]:
    """Return everything that is recorded, side by side; how long it took is no part of it."""
    one, other = before.to_json(), now.to_json()
    names = {**one["metrics"], **other["metrics"]}
    rows = [_place(name, one["metrics"].get(name), other["metrics"].get(name)) for name in names]
    rows += [_series(name, one[name], other[name]) for name in SERIES]
    return rows + [_place(name, one[name], other[name]) for name in PLACES]


def _place(name: str, before: Any, now: Any) -> Row:
    return Row(name, _said(before), _said(now), before == now)


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{len(value)} entries"
    if isinstance(value, float):
        return repr(value)
    return "none" if value in (None, "") else str(value)[:SHOWN]


def _series(name: str, before: Any, now: Any) -> Row:
    one, other = _numbers(before), _numbers(now)
    equal = sum(a == b for a, b in zip(one, other, strict=False))
    said = f"{len(other)} values" + (f", {equal} equal" if one != other else "")
    return Row(name, f"{len(one)} values", said, before == now)


def _numbers(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [each for inner in value.values() for each in _numbers(inner)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [each for inner in value for each in _numbers(inner)]
    return [value]


def _show(before: Record, rows: Sequence[Row], console: Console) -> None:
    table = Table(title=before.id, title_justify="left")
    for heading in ("", "recorded", "now", "same"):
        table.add_column(heading)
    for row in rows:
        table.add_row(row.name, row.before, row.now, "yes" if row.same else "NO")
    console.print(table)
