"""What a run left behind for good: one small file each, from which every figure is made again.

A record says what was run, on what, and what came out, with a fingerprint of the last weights. Run
folders may be thrown away afterwards.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from microclip.files import write_whole
from microclip_lab.reproduction.jobs import Job
from microclip_lab.training.config import SettingError

FOLDER = "runs"


class RecordError(SettingError):
    """A file that should hold a record does not."""


@dataclass(frozen=True)
class Record:
    """What came of a job."""

    job: Job
    settings: Mapping[str, Any]  # everything the run was done with
    metrics: Mapping[str, float]  # validation_*, best_validation_*, test_*, best_test_*
    curve: Mapping[int, float]  # the validation headline by step
    best_step: int | None
    weights: str  # SHA-256 of the last weights; "" if training diverged
    diverged: str = ""  # what was said, if it did
    moments: tuple[Mapping[str, Any], ...] = ()  # see `moments.Moment`
    course: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # a value for every step
    domain_weights: Mapping[str, float] = field(default_factory=dict)  # mean weight by domain
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the data and the model
    made: Mapping[str, Any] = field(default_factory=dict)  # versions, machine class, seconds

    @property
    def id(self) -> str:
        """What it is known by."""
        return self.job.id

    def figure(self, name: str) -> float:
        """Return one of the metrics; NaN if it is not there, as when training diverged."""
        return self.metrics.get(name, math.nan)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads; what is not finite is null."""
        return {"id": self.id, **_finite(asdict(self))}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Record:
        """Return the record that `to_json` told of."""
        fields = {name: value for name, value in said.items() if name != "id"}
        fields["job"] = Job.from_json(fields["job"])
        fields["metrics"] = {n: math.nan if v is None else v for n, v in fields["metrics"].items()}
        fields["curve"] = {
            int(step): math.nan if value is None else value
            for step, value in fields["curve"].items()
        }
        fields["moments"] = tuple(fields["moments"])
        fields["course"] = {name: tuple(values) for name, values in fields["course"].items()}
        return cls(**fields)


Records = Mapping[Job, Record]


def path_of(folder: Path, job: Job) -> Path:
    """Return where the record of a job is, or would be."""
    return folder / FOLDER / f"{job.id}.json"


def write(folder: Path, record: Record) -> Path:
    """Write a record, whole or not at all."""
    path = path_of(folder, record.job)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record.to_json(), indent=1, allow_nan=False)
    write_whole(path, (_numbers_in_rows(text) + "\n").encode())
    return path


def read(path: Path) -> Record:
    """Read a record."""
    try:
        return Record.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(
            f"{path} should hold the record of a run, but cannot be read ({error!r}). Delete it, "
            "and the run is done again."
        ) from error


def read_all(folder: Path) -> dict[Job, Record]:
    """Read all records of a folder."""
    found = (read(path) for path in files(folder))
    return {record.job: record for record in found}


def files(folder: Path) -> Iterator[Path]:
    """Return the files of all records of a folder."""
    yield from sorted((folder / FOLDER).glob("*/*/*.json"))


def _numbers_in_rows(text: str) -> str:
    """Put long lists of numbers into one line each, else a record has thousands of lines."""
    return re.sub(r"\[[\s\d.eE+\-,nul]+\]", lambda found: re.sub(r"\s+", " ", found.group()), text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
