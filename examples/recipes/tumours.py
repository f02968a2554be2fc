"""A recipe of your own: data, a model, a loss and a measure in one file.

microclip train examples/recipes/tumours.py                          # clipped, about ten seconds
microclip train examples/recipes/tumours.py --microbatch-size none   # plainly
microclip sweep examples/recipes/tumours.py --race                   # which micro-batch size?

The data is scikit-learn's: 569 tumours, 30 measurements each, benign or malignant. Some training
labels are turned round, so that there is something for clipping to find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

from microclip_lab.training.batch_rng import Draws
from microclip_lab.training.config import Training
from microclip_lab.training.recipe import Data, Recipe

Example = tuple[Tensor, int, int]  # measurements, the label it is trained with, the right one


@dataclass(frozen=True)
class Tumours(Recipe[Example, bool]):
    """Tell malignant tumours from benign ones, with some of the labels turned round."""

    name = "tumours"
    headline = "accuracy"

    noise: float = 0.15
    """The share of the training labels that is wrong."""
    hidden: int = 64
    """Width of the network."""
    jitter: float = 0.05
    """How much measurements are disturbed in training, in standard deviations."""

    def __post_init__(self) -> None:
        if not 0 <= self.noise <= 1:
            raise ValueError(f"noise is a share, from 0 to 1, but got {self.noise}.")

    @classmethod
    def presets(cls) -> Mapping[str, tuple[Tumours, Training]]:
        """Return what runs by default, and the same on clean labels."""
        training = Training(microbatch_size=4, batch_size=32, steps=300, learning_rate=3e-3)
        return {"default": (cls(), training), "clean": (cls(noise=0.0), training)}

    def load(self, seed: int) -> Data[Example]:
        """Return 369 tumours to learn from, 100 to choose by and 100 to be judged by."""
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
            ids=training.tolist(),  # their places in scikit-learn's data
        )

    def build(self, data: Data[Example]) -> nn.Module:
        """Return a small network."""
        return nn.Sequential(nn.Linear(30, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 2))

    def collate(self, examples: Sequence[Example], draws: Draws | None) -> tuple[Tensor, Tensor]:
        """Return measurements, disturbed a little in training, and labels."""
        x = torch.stack([example[0] for example in examples])
        if draws is not None:
            x = x + self.jitter * torch.tensor(draws.normal(30), dtype=torch.float32)
        return x, torch.tensor([example[1] for example in examples])

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """Return one loss per tumour."""
        x, labels = batch
        return nn.functional.cross_entropy(model(x), labels, reduction="none")

    def judge(self, model: nn.Module, batch: Any) -> list[bool]:
        """Say of each tumour whether it was told right."""
        x, labels = batch
        return (model(x).argmax(1) == labels).tolist()

    def summary(self, records: Sequence[bool]) -> dict[str, float]:
        """Return the share that was."""
        return {"accuracy": sum(records) / len(records)}

    def describe(self, data: Data[Example], row: int) -> dict[str, Any]:
        """Show a tumour by its first measurements."""
        x, label, truth = data.training[row]
        names = ("radius", "texture", "perimeter", "area")
        shown = ", ".join(f"{name} {value:+.1f}" for name, value in zip(names, x, strict=False))
        kinds = ("malignant", "benign")
        return {"text": shown, "label": kinds[label], "truth": kinds[truth]}
