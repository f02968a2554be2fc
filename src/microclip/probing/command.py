"""`microclip probe`: its options, and what it runs.

Probes the model and data that a function returns, and prints the result. The probe itself is
imported once the options are known, so `--help` does not wait for torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from microclip.tasks import expect_task, find_task

if TYPE_CHECKING:
    from microclip.probing.result import Probe


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
        expect_task("task", self.task)


def run(config: ProbeConfig) -> Probe:
    """Probe, print the table and the sentence, write the requested files."""
    from microclip.files import require_file_name
    from microclip.probing.run_probe import probe
    from microclip.rules import parse_rule

    for path in (config.csv, config.plot):
        if path is not None:
            require_file_name(path)
    try:
        model, loss_fn, batches = find_task("task", config.task, "(model, loss_fn, batches)")
        found = probe(
            model,
            loss_fn,
            batches,
            config.sizes or None,
            [parse_rule(name) for name in config.rules],
            batch_size=config.batch_size,
            draws=config.draws,
            seed=config.seed,
        )
        print(found)
        if config.csv is not None:
            found.to_csv(config.csv)
        if config.plot is not None:
            found.plot(config.plot)
    except (ImportError, ValueError, TypeError, NotImplementedError) as error:
        raise SystemExit(f"microclip: {error}") from error
    return found
