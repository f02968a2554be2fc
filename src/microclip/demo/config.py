"""What a user may choose about the demo. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TRAINING_IMAGES = 900
VALIDATION_IMAGES = 297
TEST_IMAGES = 600

Setting = int | None  # the micro-batch size b; None is plain training


@dataclass(frozen=True)
class DemoConfig:
    """Train on digits with wrong labels, plainly and clipped, and draw what comes out.

    Replaces 20 % of the training labels of scikit-learn's digits by wrong ones and trains a
    small network on them: plainly, and with micro-batch clipping at several micro-batch sizes b.
    Every setting gets its own learning rate, chosen on validation data. Ends with a table, a
    picture of test accuracy against b, and a page that explains both.

    Takes about two minutes on two cores. Interrupted with Ctrl-C, it goes on from there when
    started again.

    More seeds, narrower intervals:  microclip demo --seeds 20

    Cleaner data, in another folder:  microclip demo --noise 0.05 --out cleaner
    """

    out: Path = Path("demo-output")
    """Folder for the page, the picture and the finished runs."""
    seeds: int = 8
    """How many times each setting is trained for the comparison; 2 or more."""
    steps: int = 400
    """Optimizer steps per training."""
    batch_size: int = 32
    """B, the number of images per optimizer step."""
    microbatch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    """The sizes b to try, divisors of the batch size; b = B is always tried too."""
    noise: float = 0.2
    """The share of the training labels that is wrong, from 0 to 1."""
    workers: int | None = None
    """How many trainings run side by side; as many as there are cores unless given."""
    fresh: bool = False
    """Forget the finished runs in the folder and start anew."""

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(
                f"seeds must be 2 or more, since an interval needs two values, but got "
                f"{self.seeds}."
            )
        if self.steps < 1:
            raise ValueError(f"steps must be 1 or more, but got {self.steps}.")
        if not 2 <= self.batch_size <= TRAINING_IMAGES:
            raise ValueError(
                f"batch_size must be between 2 and {TRAINING_IMAGES}, the number of training "
                f"images, but got {self.batch_size}."
            )
        for b in self.microbatch_sizes:
            if b < 1 or self.batch_size % b:
                raise ValueError(
                    f"microbatch_sizes must divide the batch size {self.batch_size}, but got {b}. "
                    "Choose them, or --batch-size, so that no micro-batch is left incomplete."
                )
        if not any(b < self.batch_size for b in self.microbatch_sizes):
            raise ValueError(
                f"microbatch_sizes must name at least one size below the batch size "
                f"{self.batch_size}, but got {self.microbatch_sizes}: there would be nothing to "
                "compare plain training with."
            )
        if not 0 <= self.noise <= 1:
            raise ValueError(f"noise must be between 0 and 1, but got {self.noise}.")
        if self.workers is not None and self.workers < 1:
            raise ValueError(
                f"workers must be 1 or more, but got {self.workers}. Leave it out to use all cores."
            )

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Plain training, then the micro-batch sizes from the smallest to b = B."""
        return None, *sorted({*self.microbatch_sizes, self.batch_size})

    @property
    def evaluation_seeds(self) -> range:
        """The seeds of the comparison; those for choosing learning rates are not among them."""
        first = len(TUNING_SEEDS)
        return range(first, first + self.seeds)

    @property
    def watched(self) -> int:
        """The micro-batch size at which the weights of wrong labels are shown: 4 or nearest."""
        sizes = [b for b in self.microbatch_sizes if b < self.batch_size]
        return min(sizes, key=lambda b: (abs(b - 4), b))

    @property
    def processes(self) -> int:
        """How many trainings run side by side."""
        return self.workers or usable_cores()


TUNING_SEEDS = range(2)


def usable_cores() -> int:
    """Return how many cores this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # pragma: no cover (macOS and Windows)


def label(setting: Setting, batch_size: int) -> str:
    """Return what tables and pictures call a setting."""
    if setting is None:
        return "plain training"
    return f"b = {setting}" + (" = B" if setting == batch_size else "")
