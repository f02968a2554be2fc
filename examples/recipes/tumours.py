"""A custom recipe for `microclip train`: data, model, loss and metric in one file.

microclip train examples/recipes/tumours.py                          # clipped, about ten seconds
microclip train examples/recipes/tumours.py --microbatch-size none   # without clipping
microclip sweep examples/recipes/tumours.py --race                   # which micro-batch size?

The data comes with scikit-learn: 569 tumours, 30 measurements each, benign or malignant. We flip
some of the training labels, so that there is something for clipping to find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

from microclip_lab.training.batch_rng import BatchRng
from microclip_lab.training.config import Training
from microclip_lab.training.recipe import Data, Recipe

Example = tuple[Tensor, int, int]  # measurements, the label we train on, the true label


@dataclass(frozen=True)
class Tumours(Recipe[Example, bool]):
    """Tell malignant tumours from benign ones, with some of the training labels flipped."""

    name = "tumours"
    headline = "accuracy"

    noise: float = 0.15
    """Fraction of the training labels that are flipped."""
    hidden: int = 64
    """Width of the hidden layer."""
    jitter: float = 0.05
    """Noise added to the measurements in training, in standard deviations."""

    def __post_init__(self) -> None:
        if not 0 <= self.noise <= 1:
            raise ValueError(f"noise must be a fraction between 0 and 1, but got {self.noise}.")

    @classmethod
    def presets(cls) -> Mapping[str, tuple[Tumours, Training]]:
        """Return the default settings, and the same with clean labels."""
        training = Training(microbatch_size=4, batch_size=32, steps=300, learning_rate=3e-3)
        return {"default": (cls(), training), "clean": (cls(noise=0.0), training)}

    def load(self, seed: int) -> Data[Example]:
        """Return 369 tumours for training, 100 for validation and 100 for the test."""
        measured, truth = load_breast_cancer(return_X_y=True)
        draw = np.random.default_rng(seed)
        order = draw.permutation(len(truth))
        scaled = torch.tensor((measured - measured.mean(0)) / measured.std(0), dtype=torch.float32)
        wrong = draw.random(len(truth)) < self.noise

        def examples(rows: np.ndarray, noisy: bool) -> list[Example]:
            return [(scaled[i], int(truth[i] ^ (wrong[i] and noisy)), int(truth[i])) for i in rows]

        training = order[200:]
        return Data(
            training=examples(training, noisy=True),
            validation=examples(order[:100], noisy=False),
            test=examples(order[100:200], noisy=False),
            ids=training.tolist(),  # row numbers in scikit-learn's data
        )

    def build(self, data: Data[Example]) -> nn.Module:
        """Return a small two-layer network."""
        return nn.Sequential(nn.Linear(30, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 2))

    def collate(self, examples: Sequence[Example], rng: BatchRng | None) -> tuple[Tensor, Tensor]:
        """Return measurements, slightly jittered in training, and labels."""
        x = torch.stack([example[0] for example in examples])
        if rng is not None:
            x = x + self.jitter * torch.tensor(rng.normal(30), dtype=torch.float32)
        return x, torch.tensor([example[1] for example in examples])

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """Return one loss per tumour: microclip averages them per micro-batch."""
        x, labels = batch
        return nn.functional.cross_entropy(model(x), labels, reduction="none")

    def judge(self, model: nn.Module, batch: Any) -> list[bool]:
        """Return for each tumour whether it was classified correctly."""
        x, labels = batch
        return (model(x).argmax(1) == labels).tolist()

    def summary(self, records: Sequence[bool]) -> dict[str, float]:
        """Return the accuracy."""
        return {"accuracy": sum(records) / len(records)}

    def describe(self, data: Data[Example], row: int) -> dict[str, Any]:
        """Describe a tumour by its first measurements, for the report."""
        x, label, truth = data.training[row]
        names = ("radius", "texture", "perimeter", "area")
        shown = ", ".join(f"{name} {value:+.1f}" for name, value in zip(names, x, strict=False))
        kinds = ("malignant", "benign")
        return {"text": shown, "label": kinds[label], "truth": kinds[truth]}
