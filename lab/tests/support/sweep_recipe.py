"""A recipe that takes milliseconds, for sweeps: a line through points, with some that lie far off.

What a test wants of a process that sweeps (to be killed at some moment, to wait for another worker)
it says in the environment, since options would make it another sweep.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from microclip_lab.training.config import Training
from microclip_lab.training.recipe import Data, Recipe

TRAP = "SWEEP_RECIPE_TRAP"  # a file with the number of mini-batches after which to be killed
MEETING = "SWEEP_RECIPE_MEETING"  # a folder in which two workers wait for each other
STEPS, BATCH = 20, 8
TRUTH = torch.tensor([2.0, -1.0])


@dataclass(frozen=True)
class Line(Recipe):
    """Two inputs, one output, a few outliers."""

    name: ClassVar[str] = "line"
    headline: ClassVar[str] = "error"
    lower_is_better: ClassVar[bool] = True

    contrary: bool = False
    """Whether test data contradicts validation data."""
    broken: float = 0.0
    """The seed that cannot be loaded, if it is above 0."""

    @classmethod
    def presets(cls):
        training = Training(
            steps=STEPS,
            batch_size=BATCH,
            learning_rate=0.1,
            optimizer="sgd",
            momentum=0.0,
            schedule="constant",
            evaluate_every=4,
            log_every=4,
            engine="stream",
            trackers=(),
            cpu=True,
        )
        return {"default": (cls(), training)}

    def load(self, seed):
        if self.broken and seed == self.broken:
            raise RuntimeError("the disk is on fire")
        _meet()
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(96, 2, generator=generator)
        y = x @ TRUTH + 0.1 * torch.randn(96, generator=generator)
        y[:8] += 20
        test = torch.zeros(96) if self.contrary else y
        return Data(
            training=list(zip(x[:64], y[:64], strict=True)),
            validation=list(zip(x[64:80], y[64:80], strict=True)),
            test=list(zip(x[80:], test[80:], strict=True)),
        )

    def build(self, data):
        model = nn.Linear(2, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    def losses(self, model, batch):
        _fall_into_trap()
        return (model(batch[0])[:, 0] - batch[1]).square()

    def judge(self, model, batch):
        return (model(batch[0])[:, 0] - batch[1]).square().tolist()

    def summary(self, records):
        return {"error": sum(records) / len(records)}


def _fall_into_trap() -> None:
    trap = Path(os.environ.get(TRAP) or os.devnull)
    if not trap.is_file():
        return
    left = int(trap.read_text()) - 1
    trap.write_text(str(left))
    if left <= 0:
        trap.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def _meet() -> None:
    folder = os.environ.get(MEETING)
    if not folder:
        return
    (Path(folder) / str(os.getpid())).touch()
    end = time.monotonic() + 120
    while len(list(Path(folder).iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.01)
