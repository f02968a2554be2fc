"""A plan of the reproduction whose runs take milliseconds, for tests and processes they start.

As a program it works through the plan: `python reproduction_study.py FOLDER WORKERS`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from microclip_lab.reproduction.command import run_missing
from microclip_lab.reproduction.config import ReproduceConfig
from microclip_lab.reproduction.study import Study
from microclip_lab.reproduction.tasks import PLAIN, Arm, Task, clipped

from sweep_recipe import BATCH, Line

DIVERGES = 1e20


def study(recipe: Line | None = None) -> Study:
    """Return plain training, clipping, and plain steps as long as those of clipping."""
    _, training = Line.presets()["default"]
    task = Task(
        "line",
        "A line through points",
        recipe or Line(),
        replace(training, threads=1, page=False),
        (0.03, DIVERGES),
        (
            Arm(PLAIN, "plain training"),
            clipped(4, keeps_course=True),
            clipped(
                *(BATCH, "MinNorm"),
                name="as-long",
                tuned=None,
                rate_of="b4",
                replays="gradient_norm",
                source="b4",
            ),
        ),
        seeds=2,
        growth=0,
    )
    return Study((task,))


def work_through(out: Path, workers: int = 1, recipe: Line | None = None) -> None:
    """Do what is missing in a folder."""
    again = [sys.executable, __file__, str(out), str(workers)]
    storage = ReproduceConfig(out=out).storage_url
    run_missing(study(recipe), out, storage, workers, again, Console(stderr=True))


if __name__ == "__main__":
    work_through(Path(sys.argv[1]), int(sys.argv[2]))
