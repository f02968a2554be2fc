"""Records of the benchmark: validation after every epoch, tests of some, and notes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from microclip_lab.tuned_arms.records import Identity, Job, number, or_worst, read_records


@dataclass(frozen=True)
class Record(Identity):
    """The result of a run.

    Args:
        validation: The metric on noisy validation data after each epoch.
        test: The metric on clean test data by epoch, from 1: at least the best epoch by validation
            and the last.
        notes: Other figures: how many wrong labels were learned, what the arm left out.
        seconds: CPU time of training and evaluation, in one thread.
    """

    validation: Sequence[float]
    test: Mapping[int, float]
    notes: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def last_validation(self) -> float:
        """The validation metric at the last step; -inf if it is not a number."""
        return or_worst(self.validation[-1])

    @property
    def last(self) -> float:
        """The test metric at the last step."""
        return or_worst(self.test[len(self.validation)])

    @property
    def best_epoch(self) -> int:
        """The first epoch with the best validation metric, from 1."""
        values = [or_worst(value) for value in self.validation]
        return 1 + values.index(max(values))

    @property
    def early_stopped(self) -> float:
        """The test metric at the checkpoint that is best on noisy validation data."""
        return or_worst(self.test.get(self.best_epoch, math.nan))

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
                "validation": [number(value) for value in entry["validation"]],
                "test": {int(epoch): number(value) for epoch, value in entry["test"].items()},
            }
        )


def _rounded(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


Records = Mapping[Job, Record]


def read_all(folder: Path, editions: Mapping[tuple[str, str], str]) -> dict[Job, Record]:
    """Read the records in a folder, except those of older editions."""
    return read_records(folder, editions, Record.from_json)
