"""Runs of the demo that need no training, and one that is short."""

import torch
from sklearn.datasets import load_digits

from microclip.demo.config import DemoConfig
from microclip.demo.plan import missing
from microclip.demo.train import Result, Run

SHORT = Run(setting=None, learning_rate=1e-3, seed=3, steps=8, batch_size=32, noise=0.2)
SMALL = DemoConfig(seeds=2, steps=10, microbatch_sizes=(2, 4), workers=2)
TRUTH = torch.tensor(load_digits().target)


def made_up(config: DemoConfig, validation=lambda run: 0.5, test=lambda run: 0.5):
    """Return the runs of a whole demo, without training."""
    finished: dict[Run, Result] = {}
    while runs := missing(config, finished):
        for run in runs:
            b = run.setting or 1
            finished[run] = Result(
                validation(run), test(run), (1.0,) * (b + 1), tuple(range(1, b + 2))
            )
    return finished
