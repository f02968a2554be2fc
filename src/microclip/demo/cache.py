"""Finished runs, kept in a file of JSON lines so that an interrupted demo can go on.

Lines are only ever added, whole. One that was cut off by a crash cannot be read and is passed
over; its run is then done again. A line counts only if it was written with the same recipe.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import sklearn  # type: ignore[import-untyped]
import torch

import microclip
from microclip.demo import config as sizes
from microclip.demo.train import HIDDEN, SCHEDULE, WEIGHT_DECAY, Result, Run
from microclip.files import append_line

# What results depend on besides the fields of a Run: whoever changes the recipe starts anew.
RECIPE: dict[str, Any] = {
    "images": [sizes.TRAINING_IMAGES, sizes.VALIDATION_IMAGES, sizes.TEST_IMAGES],
    "hidden": HIDDEN,
    "weight_decay": WEIGHT_DECAY,
    "schedule": SCHEDULE,
    "microclip": microclip.__version__,
    "torch": torch.__version__,
    "scikit-learn": sklearn.__version__,
}


class Cache:
    """The file of finished runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def clear(self) -> None:
        """Forget all runs."""
        self.path.unlink(missing_ok=True)

    def load(self) -> dict[Run, Result]:
        """Return the runs that were finished with the present recipe."""
        if not self.path.exists():
            return {}
        text = self.path.read_text(encoding="utf-8", errors="replace")
        return dict(entry for line in text.splitlines() if (entry := _read(line)) is not None)

    def add(self, run: Run, result: Result) -> None:
        """Append one run."""
        line = json.dumps({"recipe": RECIPE, "run": asdict(run), "result": asdict(result)})
        append_line(self.path, line)


def _read(line: str) -> tuple[Run, Result] | None:
    try:
        entry = json.loads(line)
        if entry["recipe"] != RECIPE:
            return None
        result = {name: _frozen(value) for name, value in entry["result"].items()}
        return Run(**entry["run"]), Result(**result)
    except (ValueError, TypeError, KeyError):
        return None


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
