"""A recipe with wrong labels that a rule with memory finds, for tests and their subprocesses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from microclip_lab.training.config import Training
from microclip_lab.training.recipe import Data, Recipe


@dataclass(frozen=True)
class Corners(Recipe):
    """Points around three corners, a few of them with another corner's label."""

    name = "corners"
    headline = "accuracy"

    wrong: int = 8
    """Points with a wrong label."""
    domains: bool = False
    """Whether points have a domain."""
    dropout: float = 0.1
    """Dropout, which processes draw for themselves."""

    @classmethod
    def presets(cls):
        return {"default": (cls(), training())}

    def load(self, seed):
        draw = torch.Generator().manual_seed(seed)
        y = torch.arange(72) % 3
        x = 3 * F.one_hot(y, 4) + torch.randn(72, 4, generator=draw) / 2
        told = torch.where(torch.arange(72) < self.wrong, (y + 1) % 3, y)
        rows = list(zip(x, told.tolist(), strict=True))
        ids = [f"point {row}" for row in range(48)]
        kinds = [f"corner {row % 3}" for row in range(48)] if self.domains else None
        return Data(rows[:48], rows[48:60], rows[60:], ids=ids, domains=kinds)

    def build(self, data):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 3))

    def losses(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def judge(self, model, batch):
        return (model(batch[0]).argmax(1) == batch[1]).tolist()

    def summary(self, records):
        return {"accuracy": sum(records) / len(records)}


def training(**changes) -> Training:
    base = {"batch_size": 16, "steps": 120, "learning_rate": 0.5, "optimizer": "sgd"}
    base |= {"momentum": 0.0, "schedule": "constant", "trackers": (), "page": False, "cpu": True}
    base |= {"engine": "stream", "rule": "loss-history", "log_every": 1, "ledger": False}
    base |= {"evaluate_every": 60, "threads": 1}
    return Training(**{**base, **changes})
