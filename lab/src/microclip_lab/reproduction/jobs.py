"""One run of the reproduction: what it is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Stage = Literal["tuning", "evaluation"]


@dataclass(frozen=True)
class Job:
    """A run that is to be done once; two that are equal are the same one."""

    task: str
    arm: str
    stage: Stage
    value: float | None  # of the arm's tuned number; None if it has none
    seed: int

    @property
    def id(self) -> str:
        """What it is known by, on the page and on disk.

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
        """Its numbers, for the register."""
        value = {} if self.value is None else {"value": self.value}
        return {**value, "seed": self.seed}

    @property
    def labels(self) -> dict[str, str]:
        """What it is besides."""
        return {"task": self.task, "arm": self.arm, "stage": self.stage}

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Job:
        """Return the job that `to_json` told of."""
        return cls(**said)

    def __str__(self) -> str:
        return self.id
