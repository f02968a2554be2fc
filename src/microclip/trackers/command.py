"""`microclip track`: its options, and handing over. Heavy imports wait until it runs, so that
`--help` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from microclip.trackers.tracker import Tracked


@dataclass(frozen=True)
class TrackConfig:
    """Log a recorded run to an experiment tracker: its steps, and a table of the worst examples.

    A run is the folder of a microclip.Ledger, or one written by microclip.report.RunFolder, which
    also has the texts and pictures of examples.

    For `tensorboard --logdir runs`:  microclip track runs/first --to tensorboard

    wandb, MLflow and Trackio send it where their own settings say: WANDB_MODE,
    MLFLOW_TRACKING_URI, TRACKIO_DIR.
    """

    run: Path
    """The folder of a run or ledger."""
    to: Literal["tensorboard", "wandb", "mlflow", "trackio"] = "tensorboard"
    """The tracker. TensorBoard's files go to the folder "tensorboard" inside the run."""
    project: str = "microclip"
    """The project or experiment that the run belongs to."""
    name: str = ""
    """The name of the run; by default that of its folder."""
    every: int = 1
    """Log only steps whose number is a multiple of this."""
    most: int = 50
    """How many examples the table holds."""


def run(config: TrackConfig) -> Tracked:
    """Log the run, and say how much that was."""
    from rich.console import Console

    from microclip.trackers.tracker import track

    console = Console()
    try:
        found = track(
            config.run,
            config.to,
            every=config.every,
            most=config.most,
            project=config.project,
            name=config.name or None,
        )
    except (ValueError, ImportError, RuntimeError) as error:
        raise SystemExit(f"microclip: {error}") from error
    steps = "1 step" if found.steps == 1 else f"{found.steps:,} steps"
    examples = "1 example" if found.examples == 1 else f"{found.examples:,} examples"
    said = f"{steps} and {examples} were logged to {config.to}."
    for text in (said, *found.notes):
        console.print(text, soft_wrap=True, markup=False, highlight=False)
    return found
