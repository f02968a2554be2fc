"""One training of a sweep: what it is called, where it goes, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Stage = Literal["tuning", "evaluation", "race"]


@dataclass(frozen=True)
class Cell:
    """A setting that is compared with others: a rule at a micro-batch size."""

    rule: str
    microbatch_size: int | None  # None: plain training, which has no use for a rule

    @property
    def is_plain(self) -> bool:
        """Whether this is what the others are compared with."""
        return self.microbatch_size is None

    @property
    def name(self) -> str:
        """What tables call it; the paper's rule needs no mention.

        >>> PLAIN.name, Cell("MinNorm", 4).name, Cell("Unit", 4).name
        ('plain', 'b = 4', 'Unit, b = 4')
        """
        if self.is_plain:
            return "plain"
        rule = "" if self.rule == PLAIN.rule else f"{self.rule}, "
        return f"{rule}b = {self.microbatch_size}"

    @property
    def slug(self) -> str:
        """What its folders are called.

        >>> Cell("Quantile(0.2)", 4).slug, PLAIN.slug
        ('Quantile-0.2-b4', 'plain')
        """
        if self.is_plain:
            return "plain"
        return f"{re.sub(r'[^A-Za-z0-9.]+', '-', self.rule).strip('-')}-b{self.microbatch_size}"


PLAIN = Cell("MinNorm", None)


@dataclass(frozen=True)
class Job:
    """A training that is to be done once; two that are equal are the same one."""

    stage: Stage
    cell: Cell
    learning_rate: float
    seed: int
    until: int | None = None  # the step at which a race pauses; None: the last

    @property
    def folder(self) -> str:
        """Where it is done, below the sweep's folder; the laps of a race share one."""
        return f"{self.stage}/{self.cell.slug}-lr{self.learning_rate!r}-seed{self.seed}"

    @property
    def parameters(self) -> dict[str, int | float]:
        """Its numbers; 0 stands for plain training."""
        return {
            "microbatch_size": self.cell.microbatch_size or 0,
            "learning_rate": self.learning_rate,
            "seed": self.seed,
        }

    @property
    def labels(self) -> dict[str, str]:
        """What it is besides."""
        return {"rule": self.cell.rule}

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Job:
        """Return the job that `to_json` told of."""
        return cls(**{**said, "cell": Cell(**said["cell"])})

    def __str__(self) -> str:
        goal = "" if self.until is None else f", to step {self.until}"
        return (
            f"{self.stage} of {self.cell.name}, rate {self.learning_rate:g}, seed {self.seed}{goal}"
        )


@dataclass(frozen=True)
class Result:
    """What came of a job."""

    folder: str  # below the sweep's folder
    metrics: Mapping[str, float]  # validation_*, best_validation_*; at the end also (best_)test_*
    curve: Mapping[int, float]  # the validation headline by step
    hopeless: str | None = None  # why it was ended early


def cells(rules: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[Cell, ...]:
    """Return plain training, then every rule at every size."""
    return PLAIN, *(Cell(rule, b) for rule in dict.fromkeys(rules) for b in sizes)
