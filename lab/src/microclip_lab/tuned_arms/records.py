"""Jobs and records: a run to do, and its result as one line of JSON in the file of its task.

A line that was cut off is skipped, so a crash costs at most the runs in progress. What else a
record holds is up to the benchmark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from microclip.files import append_line

Stage = Literal["tune", "evaluate"]


@dataclass(frozen=True)
class Job:
    """A run to do; equal jobs are the same run."""

    task: str
    arm: str
    stage: Stage
    rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.task}, {self.arm}, {self.stage}, rate {self.rate:g}, seed {self.seed}"


@dataclass(frozen=True)
class Identity:
    """What every record begins with.

    Args:
        task: Its task.
        arm: Its arm.
        stage: "tune", without test figures, or "evaluate".
        rate: The learning rate.
        seed: The seed.
        edition: Of the task and the arm: "1.1".
    """

    task: str
    arm: str
    stage: Stage
    rate: float
    seed: int
    edition: str

    @property
    def job(self) -> Job:
        """What was run."""
        return Job(self.task, self.arm, self.stage, self.rate, self.seed)


class AnyRecord(Protocol):
    """What the search and the files need of a record."""

    @property
    def task(self) -> str:
        """Its task."""

    @property
    def arm(self) -> str:
        """Its arm."""

    @property
    def edition(self) -> str:
        """Of the task and the arm."""

    @property
    def job(self) -> Job:
        """What was run."""

    @property
    def last_validation(self) -> float:
        """The metric on noisy validation data at the last step; -inf if it is not a number."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""


R = TypeVar("R", bound=AnyRecord)


def number(value: float | None) -> float:
    """Return a number from JSON, which has null for those that are not finite."""
    return math.nan if value is None else value


def or_worst(value: float) -> float:
    """Return -inf for what is not finite."""
    return value if math.isfinite(value) else -math.inf


def append(folder: Path, record: AnyRecord) -> None:
    """Add a record to the file of its task."""
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record.to_json(), allow_nan=False)
    append_line(folder / f"{record.task}.jsonl", line)


def read_records(
    folder: Path,
    editions: Mapping[tuple[str, str], str],
    from_json: Callable[[Mapping[str, Any]], R],
) -> dict[Job, R]:
    """Read the records in a folder, except those of older editions and lines that were cut off.

    Args:
        folder: Where the files are; it may not exist yet.
        editions: The current edition by task and arm.
        from_json: Makes a record of a line.
    """
    found: dict[Job, R] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # cut off by a crash
            record = from_json(entry)
            if editions.get((record.task, record.arm)) == record.edition:
                found.setdefault(record.job, record)
    return found
