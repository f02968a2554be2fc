"""How a recipe is trained: everything that is not the data or the model. Imports nothing heavy.

Errors that are a user's to mend are here too, so that the command knows them without the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from microclip.cli import CommandError

Optimizer = Literal["adamw", "sgd", "adafactor"]
Schedule = Literal["linear", "cosine", "constant", "inverse_sqrt"]
Precision = Literal["no", "bf16", "fp16"]


class SettingError(CommandError, ValueError):
    """What was asked for cannot be done; the message says why, and what can."""


class DivergedError(CommandError, ArithmeticError):
    """The loss is not finite any more; the last checkpoint is from before."""


@dataclass(frozen=True)
class Training:
    """How a recipe is trained."""

    out: Path | None = None
    """Folder of the run: metrics, checkpoints, ledger, page. Named after the run unless given."""
    resume: bool = False
    """Go on with the run in the folder, from its last checkpoint."""

    microbatch_size: int | None = None
    """b, the examples clipped together; none is plain training through the same code."""
    rule: str = "MinNorm"
    """How norms become weights, a rule of microclip.rules: MinNorm, Median, "Quantile(0.2)", ..."""
    engine: Literal["auto", "stream", "two_pass", "fused"] = "auto"
    """How gradients are obtained. A resumed run keeps what "auto" found."""
    by_domain: bool = False
    """Clip within each domain of the data, if it has any; else domains are only counted."""

    batch_size: int = 32
    """B, the examples of an optimizer step, over all processes."""
    chunk_size: int | None = None
    """Examples that a process loads and folds at once; its share of the batch unless given."""
    steps: int = 1000
    """Optimizer steps."""
    epochs: float | None = None
    """Passes over the data, instead of steps."""
    seed: int = 0
    """Of splits, first weights, order of the data and augmentation."""

    optimizer: Optimizer = "adamw"
    """What takes the steps."""
    learning_rate: float = 1e-3
    """At its highest."""
    weight_decay: float = 0.01
    """Of matrices; biases and norms have none."""
    momentum: float = 0.9
    """Of sgd."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of adamw."""
    schedule: Schedule = "linear"
    """How the learning rate falls after the warm-up."""
    warmup: float = 0.0
    """Share of the steps in which the learning rate rises."""
    max_grad_norm: float | None = None
    """Clip the norm of the whole gradient as well, after the micro-batches' own."""
    precision: Precision = "no"
    """Mixed precision."""
    start_from: Path | None = None
    """Weights to begin with: a folder with model.safetensors, as checkpoints are."""

    evaluate_every: int | None = None
    """Steps between two looks at the validation data; a twentieth of all unless given."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; as evaluate_every unless given."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    workers: int = 0
    """Processes that load data."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl: names that Accelerate knows (tensorboard, wandb)."""
    ledger: bool = True
    """Record what clipping did to every micro-batch."""
    page: bool = True
    """Make the page of the run at its end."""
    cpu: bool = False
    """Use no accelerator, even if there is one."""
    threads: int | None = None
    """Threads that compute on a CPU; as many as torch likes unless given. Small models are as fast
    with one, and do not suffer from what else a machine does."""

    def __post_init__(self) -> None:
        _at_least_one("batch_size", self.batch_size)
        _at_least_one("steps", self.steps)
        _at_least_one("log_every", self.log_every)
        for name in (
            "microbatch_size",
            "chunk_size",
            "evaluate_every",
            "checkpoint_every",
            "threads",
        ):
            _at_least_one(name, getattr(self, name), or_none=True)
        if self.epochs is not None and not self.epochs > 0:
            raise ValueError(f"epochs must be greater than 0, but got {self.epochs}.")
        if self.microbatch_size is not None and self.microbatch_size > self.batch_size:
            raise ValueError(
                f"microbatch_size {self.microbatch_size} is larger than batch_size "
                f"{self.batch_size}. For plain training say --microbatch-size none."
            )
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be greater than 0, but got {self.learning_rate}.")
        if not 0 <= self.warmup < 1:
            raise ValueError(
                f"warmup is a share of the steps, from 0 to below 1, but got {self.warmup}."
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be greater than 0, but got {self.max_grad_norm}.")
        if self.workers < 0:
            raise ValueError(f"workers must be 0 or more, but got {self.workers}.")
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more, but got {self.seed}.")

    def all_steps(self, examples: int) -> int:
        """Return how many steps there are, given the number of training examples."""
        if self.epochs is None:
            return self.steps
        return max(1, round(self.epochs * examples / self.batch_size))


def _at_least_one(name: str, value: int | None, or_none: bool = False) -> None:
    if value is None and or_none:
        return
    if value is None or value < 1:
        raise ValueError(f"{name} must be 1 or more, but got {value}.")
