"""Records: the results of runs, one line of JSON each, in one file per task.

A line that was cut off is skipped, so a crash costs at most the runs in progress.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

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
class Record:
    """The result of a run.

    Args:
        task: Its task.
        arm: Its arm.
        stage: "tune", without test figures, or "evaluate".
        rate: The learning rate.
        seed: The seed.
        edition: Of the task and the arm: "1.1".
        validation: The metric on noisy validation data after each epoch.
        test: The metric on clean test data by epoch, from 1: at least the best epoch by validation
            and the last.
        notes: Other figures: how many wrong labels were learned, what the arm left out.
        seconds: CPU time of training and evaluation, in one thread.
    """

    task: str
    arm: str
    stage: Stage
    rate: float
    seed: int
    edition: str
    validation: Sequence[float]
    test: Mapping[int, float]
    notes: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def job(self) -> Job:
        """What was run."""
        return Job(self.task, self.arm, self.stage, self.rate, self.seed)

    @property
    def last_validation(self) -> float:
        """The validation metric at the last step; -inf if it is not a number."""
        return _or_worst(self.validation[-1])

    @property
    def last(self) -> float:
        """The test metric at the last step."""
        return _or_worst(self.test[len(self.validation)])

    @property
    def best_epoch(self) -> int:
        """The first epoch with the best validation metric, from 1."""
        values = [_or_worst(value) for value in self.validation]
        return 1 + values.index(max(values))

    @property
    def early_stopped(self) -> float:
        """The test metric at the checkpoint that is best on noisy validation data."""
        return _or_worst(self.test.get(self.best_epoch, math.nan))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, with null for numbers that are not finite."""
        entry = asdict(self)
        entry["validation"] = [_rounded(value) for value in self.validation]
        entry["test"] = {str(epoch): _rounded(value) for epoch, value in self.test.items()}
        return entry

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Record:
        """Return the record that `to_json` wrote."""
        return cls(
            **{
                **entry,
                "validation": [_number(value) for value in entry["validation"]],
                "test": {int(epoch): _number(value) for epoch, value in entry["test"].items()},
            }
        )


def _or_worst(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def _rounded(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value


Records = Mapping[Job, Record]


def append(folder: Path, record: Record) -> None:
    """Add a record to the file of its task."""
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record.to_json(), allow_nan=False)
    append_line(folder / f"{record.task}.jsonl", line)


def read_all(folder: Path, editions: Mapping[tuple[str, str], str]) -> dict[Job, Record]:
    """Read the records in a folder, except those of older editions.

    Args:
        folder: Where the files are; it may not exist yet.
        editions: The current edition by task and arm.
    """
    found: dict[Job, Record] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for record in _records(path.read_text(encoding="utf-8").splitlines()):
            if editions.get((record.task, record.arm)) == record.edition:
                found.setdefault(record.job, record)
    return found


def _records(lines: Iterable[str]) -> Iterable[Record]:
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut off by a crash
        yield Record.from_json(entry)
