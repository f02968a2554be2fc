"""Records of runs: one line of JSON each, one file per task, with all digits and a checksum.

A run that is repeated must give the same figures and the same weights, bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from microclip.files import append_line
from microclip_lab.dirty_data.records import Job, Stage

LAST = "last"
FIGURES = (LAST, "best_noisy", "best_clean")


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
        noisy: The metric on noisy validation data after each epoch.
        clean: The same on clean validation data.
        test: Errors on clean test data: at the last step, at the checkpoint that is best on noisy
            validation data and at the one that is best on clean data; for domains also "last/...".
        notes: What was measured on the way: energies, cosines, what was memorized.
        weights: A checksum of the final weights.
        seconds: CPU time, in one thread.
    """

    task: str
    arm: str
    stage: Stage
    rate: float
    seed: int
    edition: str
    noisy: Sequence[float]
    clean: Sequence[float]
    test: Mapping[str, float]
    notes: Mapping[str, float] = field(default_factory=dict)
    weights: str = ""
    seconds: float = 0.0

    @property
    def job(self) -> Job:
        """What was run."""
        return Job(self.task, self.arm, self.stage, self.rate, self.seed)

    @property
    def last_validation(self) -> float:
        """The metric on noisy validation data at the last step; -inf if it is not a number."""
        return self.noisy[-1] if math.isfinite(self.noisy[-1]) else -math.inf

    def same_as(self, other: Record) -> bool:
        """Return whether another run gave the same result, bit for bit, at whatever speed."""
        one, two = self.to_json(), other.to_json()
        return {**one, "seconds": 0} == {**two, "seconds": 0}

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, with null for numbers that are not finite."""
        entry = asdict(self)
        for name in ("noisy", "clean"):
            entry[name] = [_finite(value) for value in entry[name]]
        for name in ("test", "notes"):
            entry[name] = {key: _finite(value) for key, value in entry[name].items()}
        return entry

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Record:
        """Return the record that `to_json` wrote."""
        return cls(
            **{
                **entry,
                **{name: [_number(value) for value in entry[name]] for name in ("noisy", "clean")},
                **{
                    name: {key: _number(value) for key, value in entry[name].items()}
                    for name in ("test", "notes")
                },
            }
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value


Records = Mapping[Job, Record]


def append(folder: Path, record: Record) -> None:
    """Add a record to the file of its task."""
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record.to_json(), allow_nan=False)
    append_line(folder / f"{record.task}.jsonl", line)


def read_all(folder: Path, editions: Mapping[tuple[str, str], str]) -> dict[Job, Record]:
    """Read the records in a folder, except those of older editions and lines that were cut off."""
    found: dict[Job, Record] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = Record.from_json(json.loads(line))
            except ValueError:
                continue  # cut off by a crash
            if editions.get((record.task, record.arm)) == record.edition:
                found.setdefault(record.job, record)
    return found
