"""Records: one small file per run, from which every figure is made.

A record says what was run, on which kind of machine, and the results, with a fingerprint of the
last weights. The folder of the run can be deleted afterwards.
"""

from __future__ import annotations

import functools
import json
import math
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from microclip.files import write_whole
from microclip_lab.training.config import SettingError

FOLDER = "runs"


class RecordError(SettingError):
    """A record file cannot be read."""


Stage = Literal["tuning", "evaluation"]


@dataclass(frozen=True)
class Job:
    """A run of the plan; equal jobs are the same run."""

    task: str
    arm: str
    stage: Stage
    value: float | None  # of the arm's tuned hyperparameter; None if it has none
    seed: int

    @property
    def id(self) -> str:
        """Its id, on the page and on disk.

        >>> Job("digits", "b4", "tuning", 0.001, 100).id
        'digits/b4/tuning-0.001-seed100'
        >>> Job("digits", "b32", "evaluation", None, 203).id
        'digits/b32/seed203'
        """
        stage = "tuning-" if self.stage == "tuning" else ""
        value = "" if self.value is None else f"{self.value!r}-"
        return f"{self.task}/{self.arm}/{stage}{value}seed{self.seed}"

    @property
    def parameters(self) -> dict[str, int | float]:
        """Its numbers, for Optuna."""
        value = {} if self.value is None else {"value": self.value}
        return {**value, "seed": self.seed}

    @property
    def labels(self) -> dict[str, str]:
        """Its other attributes, for Optuna."""
        return {"task": self.task, "arm": self.arm, "stage": self.stage}

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Job:
        """Return the job that `to_json` wrote."""
        return cls(**said)

    def __str__(self) -> str:
        return self.id


@dataclass(frozen=True)
class Record:
    """The result of a job."""

    job: Job
    settings: Mapping[str, Any]  # all settings of the run
    metrics: Mapping[str, float]  # validation_*, best_validation_*, test_*, best_test_*
    curve: Mapping[int, float]  # the validation headline by step
    best_step: int | None
    weights: str  # SHA-256 of the last weights; "" if training diverged
    diverged: str = ""  # the error message, if it did
    moments: tuple[Mapping[str, Any], ...] = ()  # see `gradient_snapshots.Snapshot`
    course: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # one value per step
    domain_weights: Mapping[str, float] = field(default_factory=dict)  # mean weight by domain
    facts: Mapping[str, Any] = field(default_factory=dict)  # about the data and the model
    made: Mapping[str, Any] = field(default_factory=dict)  # versions, machine class, seconds

    @property
    def id(self) -> str:
        """The id of its job."""
        return self.job.id

    def figure(self, name: str) -> float:
        """Return a metric; NaN if it is missing, as after divergence."""
        return self.metrics.get(name, math.nan)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, with null for non-finite numbers."""
        return {"id": self.id, **_finite(asdict(self))}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Record:
        """Return the record that `to_json` wrote."""
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
    """Return the path of a job's record."""
    return folder / FOLDER / f"{job.id}.json"


def write(folder: Path, record: Record) -> Path:
    """Write a record atomically."""
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
            f"{path} should be the record of a run, but cannot be read ({error!r}). Delete it to "
            "repeat the run."
        ) from error


def read_all(folder: Path) -> dict[Job, Record]:
    """Read all records of a folder."""
    found = (read(path) for path in files(folder))
    return {record.job: record for record in found}


def files(folder: Path) -> Iterator[Path]:
    """Yield the paths of all records in a folder."""
    yield from sorted((folder / FOLDER).glob("*/*/*.json"))


def _numbers_in_rows(text: str) -> str:
    """Put each list of numbers on one line; a record would have thousands otherwise."""
    return re.sub(r"\[[\s\d.eE+\-,nul]+\]", lambda found: re.sub(r"\s+", " ", found.group()), text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


class RecordStore:
    """The records in a folder, each read once; new ones appear while others work."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, Record] = {}

    def records(self) -> dict[Job, Record]:
        """Return the current records."""
        self._read = {path: self._read.get(path) or read(path) for path in files(self.folder)}
        return {record.job: record for record in self._read.values()}

    def has(self, job: Job) -> bool:
        """Return whether a job has a record."""
        return path_of(self.folder, job).exists()


PACKAGES = ("microclip", "torch", "transformers", "accelerate", "numpy")


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # pragma: no cover (all of them are dependencies)
            found[name] = "not installed"
    return found


@functools.cache
def machine_class() -> dict[str, str]:
    """Return what the last bits of results may depend on: processor and instruction set."""
    import torch

    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _processor() -> str:
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        for line in cpus.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
