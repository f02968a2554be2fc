"""What a user may choose about `microclip probe`. Imports nothing heavy, so `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProbeConfig:
    """Say what each micro-batch size would do to a model, by its per-example gradients.

    Needs a model and data: a function of yours that returns (model, loss_fn, batches). The loss
    function gives one loss per example, and batches is a list of two to four, as they are trained
    on. Ends with a table and a sentence. It looks one step ahead, from these weights.

    With tasks.py in this folder, which has a function digits:
      microclip probe --task tasks:digits

    Some sizes only, other rules, a picture and the table as a file:
      microclip probe --task tasks:digits --sizes 2 4 8 --rules MinNorm Unit --plot probe.png
    """

    task: str
    """Where the function is, as module:function."""
    sizes: tuple[int, ...] = ()
    """The micro-batch sizes b; powers of two up to the batch size unless given."""
    rules: tuple[str, ...] = ("MinNorm",)
    """Rules of microclip.rules, as they are written there: MinNorm, Median, Quantile(0.25), ..."""
    batch_size: int | None = None
    """B, the examples of a simulated step; the largest batch unless given."""
    draws: int = 256
    """How many steps are simulated."""
    seed: int = 0
    """Of the simulation."""
    csv: Path | None = None
    """Where to write the table."""
    plot: Path | None = None
    """Where to draw a picture; its ending says in which format."""

    def __post_init__(self) -> None:
        module, colon, function = self.task.partition(":")
        if not (module and colon and function):
            raise ValueError(
                f"task must be written as module:function, as in tasks:digits, but got {self.task}."
            )
