"""Records of runs, with all digits and a checksum of the final weights.

A run that is repeated must give the same figures and the same weights, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from microclip_lab.tuned_arms.records import Identity, Job, number, or_worst, read_records

LAST = "last"
FIGURES = (LAST, "best_noisy", "best_clean")


@dataclass(frozen=True)
class Record(Identity):
    """The result of a run.

    Args:
        noisy: The metric on noisy validation data after each epoch.
        clean: The same on clean validation data.
        test: Errors on clean test data: at the last step, at the checkpoint that is best on noisy
            validation data and at the one that is best on clean data; for domains also "last/...".
        notes: What was measured on the way: energies, cosines, what was memorized.
        weights: A checksum of the final weights.
        seconds: CPU time, in one thread.
    """

    noisy: Sequence[float]
    clean: Sequence[float]
    test: Mapping[str, float]
    notes: Mapping[str, float] = field(default_factory=dict)
    weights: str = ""
    seconds: float = 0.0

    @property
    def last_validation(self) -> float:
        """The metric on noisy validation data at the last step; -inf if it is not a number."""
        return or_worst(self.noisy[-1])

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
                **{name: [number(value) for value in entry[name]] for name in ("noisy", "clean")},
                **{
                    name: {key: number(value) for key, value in entry[name].items()}
                    for name in ("test", "notes")
                },
            }
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


Records = Mapping[Job, Record]


def read_all(folder: Path, editions: Mapping[tuple[str, str], str]) -> dict[Job, Record]:
    """Read the records in a folder, except those of older editions and lines that were cut off."""
    return read_records(folder, editions, Record.from_json)
