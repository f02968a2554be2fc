"""The options of `microclip probe`. Imports nothing heavy, so `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProbeConfig:
    """Predict what each micro-batch size would do to a model, from its per-example gradients.

    Needs a model and data: a function of yours that returns (model, loss_fn, batches). loss_fn
    returns one loss per example, and batches is a list of two to four batches, as they are trained
    on. Prints a table and a sentence. It looks one step ahead, from these weights.

    With a function digits in tasks.py, in the current folder:
      microclip probe --task tasks:digits

    Some sizes only, other rules, and a plot:
      microclip probe --task tasks:digits --sizes 2 4 8 --rules MinNorm Unit --plot probe.png
    """

    task: str
    """Where the function is, as module:function."""
    sizes: tuple[int, ...] = ()
    """The micro-batch sizes b; by default powers of two up to the batch size."""
    rules: tuple[str, ...] = ("MinNorm",)
    """Rules from microclip.rules, written as in Python: MinNorm, Median, Quantile(0.25), ..."""
    batch_size: int | None = None
    """B, the examples of a simulated step; by default the largest batch."""
    draws: int = 256
    """How many steps to simulate."""
    seed: int = 0
    """The seed of the simulation."""
    csv: Path | None = None
    """Where to write the table."""
    plot: Path | None = None
    """Where to save a plot; the file extension sets the format."""

    def __post_init__(self) -> None:
        module, colon, function = self.task.partition(":")
        if not (module and colon and function):
            raise ValueError(
                f"task must be written as module:function, as in tasks:digits, but got {self.task}."
            )
