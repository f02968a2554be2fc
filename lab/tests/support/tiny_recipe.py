"""A recipe that trains in a moment, for tests and their subprocesses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch import nn

from microclip_lab.training.config import Training
from microclip_lab.training.recipe import Data, Recipe


@dataclass(frozen=True)
class Tiny(Recipe):
    """Points in a plane, by the side of a line they are on."""

    name = "tiny"
    headline = "accuracy"

    examples: int = 96
    """Points to train on."""
    dropout: float = 0.0
    """Dropout, to check that random states are restored."""
    jitter: float = 0.1
    """Augmentation."""
    domains: bool = False
    """Whether points have a domain."""
    blow_up: float = 1.0
    """What losses are multiplied by."""

    @classmethod
    def presets(cls):
        training = Training(
            microbatch_size=4, batch_size=16, steps=40, learning_rate=0.02, trackers=()
        )
        return {"default": (cls(), training), "dropping": (cls(dropout=0.5), training)}

    def load(self, seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.examples + 55, 2, generator=generator)
        rows = list(zip(x, (x.sum(1) > 0).long().tolist(), strict=True))
        n = self.examples
        return Data(
            rows[:n],
            rows[n : n + 25],
            rows[n + 25 :],
            ids=[f"point-{i}" for i in range(n)],
            domains=[("near", "far")[int(p.norm() > 1)] for p, _ in rows[:n]]
            if self.domains
            else None,
            facts={"points": n},
        )

    def build(self, data):
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 2))

    def collate(self, examples, rng):
        x = torch.stack([x for x, _ in examples])
        if rng is not None:
            x = x + self.jitter * torch.tensor(rng.normal(2), dtype=torch.float32)
        return {"x": x, "y": torch.tensor([y for _, y in examples])}

    def losses(self, model, batch):
        losses = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return losses * self.blow_up

    def judge(self, model, batch):
        return (model(batch["x"]).argmax(1) == batch["y"]).tolist()

    def summary(self, records):
        return {"accuracy": sum(records) / len(records), "points": float(len(records))}

    def describe(self, data, row):
        x, y = data.training[row]
        return {"text": f"the point {x.tolist()}", "label": y}


def training(**changes) -> Training:
    """Return how it is trained."""
    base = {
        "microbatch_size": 4,
        "batch_size": 16,
        "steps": 40,
        "learning_rate": 0.02,
        "trackers": (),
        "page": False,
    }
    return Training(**{**base, **changes})


def forget_accelerate() -> None:
    """Reset global state, as in a new process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def weights(run):
    """Return the weights of a run's last checkpoint."""
    last = max((run / "checkpoints").glob("step-*"))
    return load_file(last / "model.safetensors")
