"""The options of a sweep or a race. Imports nothing heavy, so that `--help` is quick."""

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
    """Train a recipe at several micro-batch sizes and report which works best, with intervals.

    Plain training and every combination of a rule and a micro-batch size get their own learning
    rate, chosen on validation data with separate seeds; then all are trained on the same seeds and
    compared. If it is interrupted or killed, run the same command again to continue.

    For a quick answer at the cost of about two runs: --race.
    """

    out: Path = Path("sweep-output")
    """Folder for the runs, the table and the page."""
    microbatch_sizes: tuple[int | None, ...] = (1, 2, 4, 8, 16)
    """The sizes b to try; plain training (none) is always included."""
    rules: tuple[str, ...] = ("MinNorm",)
    """The rules to try at each size: MinNorm, Median, "Quantile(0.2)", ... Those that weight
    examples, such as LossHistory, are tried once: they do not depend on the size."""

    learning_rates: tuple[float, ...] = ()
    """First rates to try. Default: the recipe's and its neighbors. A single one is not tuned."""
    rate_scales: Mapping[str, float] = field(default_factory=dict)
    """Factors for the rates of a rule, such as: Unit 0.01."""
    growth: int = 4
    """Extra rates that a setting may try while its best rate is at the edge of the grid."""
    tuning_seeds: int = 2
    """Number of seeds for choosing rates; they are used for nothing else."""
    seeds: int = 5
    """Number of seeds for comparing settings, the same for all."""
    judge_by: Literal["last", "best"] = "last"
    """Compare the last weights, or those of the best checkpoint; both are reported."""
    prune: bool = True
    """Stop tuning runs with hopeless learning rates; compared runs are never stopped."""

    race: bool = False
    """Race instead: train all settings a little, continue with the better half, and so on."""
    race_seeds: int = 1
    """Number of seeds of a race."""
    budget: float = 2.0
    """Cost limit of a race, in full runs; from 3 on, plain training stays in to the end."""

    storage: str | None = None
    """Optuna storage URL of the trials. Default: an SQLite file in the folder."""
    study: str | None = None
    """Name of the sweep in the storage. Default: the folder's name."""
    workers: int = 1
    """Parallel runs on this machine; you can start the same command on other machines too."""

    def __post_init__(self) -> None:
        for b in self.microbatch_sizes:
            if b is not None and b < 1:
                raise SettingError(
                    f"microbatch_sizes must be positive, or none for plain training, but got {b}."
                )
        if not any(b is not None for b in self.microbatch_sizes):
            raise SettingError(
                f"microbatch_sizes must have at least one size besides plain training, but got "
                f"{self.microbatch_sizes}: there would be nothing to compare."
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
                f"A race uses one learning rate for all settings, but got {self.learning_rates}. "
                "Give one, or none to use the recipe's, or sweep without --race."
            )
        if self.budget < 2:
            raise SettingError(
                f"budget must be 2 or more, but got {self.budget}: the winner's run costs 1, and "
                "finding it costs about as much."
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes without duplicates, ascending."""
        return tuple(sorted({b for b in self.microbatch_sizes if b is not None}))

    @property
    def storage_url(self) -> str:
        """The Optuna storage URL."""
        return self.storage or f"sqlite:///{(self.out / 'trials.db').resolve()}"

    @property
    def study_name(self) -> str:
        """The study's name in the storage; races and sweeps have different ones."""
        return self.study or f"{self.out.resolve().name}{'-race' if self.race else ''}"
