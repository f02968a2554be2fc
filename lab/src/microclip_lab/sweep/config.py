"""What a user may choose about a sweep or a race. Imports nothing heavy, so `--help` is quick."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from microclip_lab.training.config import SettingError

MOST_SEEDS = 10_000


@dataclass(frozen=True)
class SweepConfig:
    """Train a recipe at several micro-batch sizes and say which is best, and how surely.

    Every combination of a rule and a micro-batch size, and plain training, gets its own learning
    rate, chosen on validation data and on seeds of their own; then all are trained on the same
    seeds and compared. Interrupted, or killed, it goes on when the same command is given again.

    The quick answer, for the cost of about two trainings: --race.
    """

    out: Path = Path("sweep-output")
    """Folder for the runs, the table and the page."""
    microbatch_sizes: tuple[int | None, ...] = (1, 2, 4, 8, 16)
    """The sizes b to try; plain training (none) is always tried as well."""
    rules: tuple[str, ...] = ("MinNorm",)
    """The rules to try at each size: MinNorm, Median, "Quantile(0.2)", ..."""

    learning_rates: tuple[float, ...] = ()
    """Rates to begin with; the recipe's and its neighbours unless given. One: nothing to choose."""
    rate_scales: Mapping[str, float] = field(default_factory=dict)
    """By how much a rule's rates are multiplied: Unit 0.01."""
    growth: int = 4
    """How many rates a setting may try beyond the first, while the best is at the edge."""
    tuning_seeds: int = 2
    """Seeds that rates are chosen on; they are used for nothing else."""
    seeds: int = 5
    """Seeds that settings are compared on, the same for all."""
    judge_by: Literal["last", "best"] = "last"
    """Compare last weights, or those of the best checkpoint; both are reported."""
    prune: bool = True
    """Whether to end trainings whose learning rate is hopeless; those compared never are."""

    race: bool = False
    """Race the settings instead: train all a little, go on with the better half, and so on."""
    race_seeds: int = 1
    """Seeds that a race is run on at once."""
    budget: float = 2.0
    """What a race may cost, in trainings; from 3 on, plain training stays in until the end."""

    storage: str | None = None
    """Where trials are kept: an Optuna storage URL; an SQLite file in the folder unless given."""
    study: str | None = None
    """Name of the sweep in the storage; the folder's unless given."""
    workers: int = 1
    """Trainings side by side on this machine; start the same command on others as well."""

    def __post_init__(self) -> None:
        for b in self.microbatch_sizes:
            if b is not None and b < 1:
                raise SettingError(
                    f"microbatch_sizes must be positive, or none for plain training, but got {b}."
                )
        if not any(b is not None for b in self.microbatch_sizes):
            raise SettingError(
                f"microbatch_sizes must name a size besides plain training, but got "
                f"{self.microbatch_sizes}: there would be nothing to compare plain training with."
            )
        if not self.rules:
            raise SettingError("rules must name at least one rule, such as MinNorm.")
        for rate in self.learning_rates:
            if not 0 < rate < math.inf:
                raise SettingError(f"learning_rates must be positive and finite, but got {rate}.")
        for rule, scale in self.rate_scales.items():
            if not 0 < scale < math.inf:
                raise SettingError(
                    f"rate_scales must be positive and finite, but {rule} has {scale}."
                )
            if rule not in self.rules:
                raise SettingError(
                    f"rate_scales names {rule}, which is not among the rules "
                    f"({', '.join(self.rules)})."
                )
        for name, least in (
            ("growth", 0),
            ("tuning_seeds", 1),
            ("seeds", 1),
            ("race_seeds", 1),
            ("workers", 1),
        ):
            value = getattr(self, name)
            if not least <= value <= MOST_SEEDS:
                raise SettingError(
                    f"{name} must be between {least} and {MOST_SEEDS:,}, but got {value}."
                )
        if self.race and len(self.learning_rates) > 1:
            raise SettingError(
                f"A race runs all settings at one learning rate, but got {self.learning_rates}. "
                "Give one, or none for the recipe's, or sweep without --race."
            )
        if self.budget < 2:
            raise SettingError(
                f"budget must be 2 or more, but got {self.budget}: the winner's own training costs "
                "1, and finding it about as much again."
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes, each once, from the smallest."""
        return tuple(sorted({b for b in self.microbatch_sizes if b is not None}))

    @property
    def storage_url(self) -> str:
        """Where trials are kept."""
        return self.storage or f"sqlite:///{(self.out / 'trials.db').resolve()}"

    @property
    def study_name(self) -> str:
        """What the trials go by in the storage; a race and a sweep do not mix."""
        return self.study or f"{self.out.resolve().name}{'-race' if self.race else ''}"
