"""How a recipe is trained: everything that is not the data or the model. Imports nothing heavy.

The errors that users can fix are here too, so that the command line can catch them cheaply.
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
    """The settings do not work; the message says why, and what does."""


class LayoutError(OSError):
    """A data folder has an unexpected layout; the message says what was expected and found."""


class DivergedError(CommandError, ArithmeticError):
    """The loss is no longer finite; the last checkpoint is from before that."""


@dataclass(frozen=True)
class Training:
    """How a recipe is trained."""

    out: Path | None = None
    """Folder of the run: metrics, checkpoints, ledger, page. Default: named after the run."""
    resume: bool = False
    """Continue the run in the folder from its last checkpoint."""

    microbatch_size: int | None = None
    """b, the examples clipped together; none trains without clipping, through the same code."""
    rule: str = "MinNorm"
    """The rule, from microclip.rules: MinNorm, Median, "Quantile(0.2)", ... Or loss-history, which
    remembers every example and holds back those that are probably wrong, whatever b is."""
    engine: Literal["auto", "stream", "two_pass", "fused"] = "auto"
    """How gradients are computed. A resumed run keeps what "auto" chose."""
    by_domain: bool = False
    """Clip each domain of the data separately; otherwise domains are only counted."""

    batch_size: int = 32
    """B, the examples per optimizer step, over all processes."""
    chunk_size: int | None = None
    """Examples that a process loads and folds at once. Default: its share of the batch."""
    steps: int = 1000
    """Optimizer steps."""
    epochs: float | None = None
    """Passes over the data; replaces steps."""
    seed: int = 0
    """Seed of splits, initial weights, data order and augmentation."""

    optimizer: Optimizer = "adamw"
    """Optimizer."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Weight decay of matrices; biases and norms have none."""
    momentum: float = 0.9
    """Momentum of sgd."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of adamw."""
    schedule: Schedule = "linear"
    """How the learning rate falls after the warm-up."""
    warmup: float = 0.0
    """Share of the steps over which the learning rate rises."""
    max_grad_norm: float | None = None
    """Also clip the norm of the whole gradient, after micro-batch clipping."""
    precision: Precision = "no"
    """Mixed precision."""
    start_from: Path | None = None
    """Initial weights: a folder with model.safetensors, such as a checkpoint."""

    evaluate_every: int | None = None
    """Steps between two evaluations on validation data. Default: a twentieth of all steps."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints. Default: evaluate_every."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    workers: int = 0
    """Processes per rank that load data."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl: trackers of Accelerate (tensorboard, wandb)."""
    ledger: bool = True
    """Record what clipping does to every micro-batch."""
    page: bool = True
    """Write a report page at the end of the run."""
    cpu: bool = False
    """Train on the CPU even if there is an accelerator."""
    threads: int | None = None
    """CPU threads. Default: torch's choice. Small models are as fast with one, and less sensitive
    to other load on the machine."""

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
                f"{self.batch_size}. To train without clipping, use --microbatch-size none."
            )
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be greater than 0, but got {self.learning_rate}.")
        if not 0 <= self.warmup < 1:
            raise ValueError(
                f"warmup must be a share of the steps, at least 0 and below 1, but got "
                f"{self.warmup}."
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be greater than 0, but got {self.max_grad_norm}.")
        if self.workers < 0:
            raise ValueError(f"workers must be 0 or more, but got {self.workers}.")
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more, but got {self.seed}.")

    def all_steps(self, examples: int) -> int:
        """Return the number of steps, given the number of training examples."""
        if self.epochs is None:
            return self.steps
        return max(1, round(self.epochs * examples / self.batch_size))


def _at_least_one(name: str, value: int | None, or_none: bool = False) -> None:
    if value is None and or_none:
        return
    if value is None or value < 1:
        raise ValueError(f"{name} must be 1 or more, but got {value}.")
