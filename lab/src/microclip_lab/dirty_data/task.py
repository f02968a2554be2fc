"""What a task is: data with known errors, a network, a loss per example, and two metrics.

Metrics are in points, higher is better: accuracy in percent, or an error times -100. Knows nothing
of the arms that are compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Kind = Literal["classification", "regression", "language", "speech"]
Purpose = Literal["noisy", "clean", "failure"]  # failure: a noisy task where we expect no gain

EVALUATED_AT_ONCE = 2000
TUNING_SEEDS = (100, 101)


@dataclass(frozen=True)
class Part:
    """Inputs and targets, one example per row."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class Data:
    """The data of one seed."""

    training: Part  # targets as given
    wrong: Tensor  # bool: this training target is wrong; only the oracle may see it
    validation: Part  # as dirty as the training data
    test: Part  # clean
    clean_validation: Part | None = None  # the validation data with right targets
    domains: Tensor | None = None  # of the training examples, numbered
    test_domains: Tensor | None = None  # of the test examples


@dataclass(frozen=True)
class Task:
    """A training problem, the same for every arm.

    Args:
        name: For the command line and records.
        title: For tables.
        purpose: "noisy", "clean", or "failure" for noisy tasks where we expect no gain.
        kind: What the targets are; decides which arms apply.
        description: One or two sentences on data, network and metrics.
        noise: The share of wrong training examples, which co-teaching is told.
        make_data: Returns the data of a seed.
        make_model: Returns an untrained (or pre-trained) network; draws from torch's generator.
        losses: One loss per example, from outputs and targets.
        validate: The metric on validation data, from outputs and targets.
        test: The metric on test data.
        epochs: Passes over the training data.
        batch_size: B.
        start: Where the search of plain training's learning rate starts: 0.001 x 2^start.
        weight_decay: Of AdamW, the same for all arms.
        test_every: Epochs between two tests; the best epoch so far and the last are always tested.
        edition: Increase it when the task changes; older records no longer count.
    """

    name: str
    title: str
    purpose: Purpose
    kind: Kind
    description: str
    noise: float
    make_data: Callable[[int], Data]
    make_model: Callable[[], nn.Module]
    losses: Callable[[Tensor, Tensor], Tensor]
    validate: Callable[[Tensor, Tensor], float]
    test: Callable[[Tensor, Tensor], float]
    epochs: int
    batch_size: int = 32
    start: int = 0
    weight_decay: float = 0.01
    test_every: int = 1
    edition: int = 1

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        """The seeds that every learning rate is tried with."""
        return TUNING_SEEDS

    def model(self, seed: int) -> nn.Module:
        """Return the network of a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_model()


def cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each example."""
    return F.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the percentage of examples whose target has the largest output."""
    return 100 * float((outputs.argmax(1) == targets).float().mean())


# a task of labels: all that is left to say is the data, the network, and how long to train
classification = partial(
    Task, kind="classification", losses=cross_entropies, validate=accuracy, test=accuracy
)


def squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the squared error of each example."""
    return (outputs.squeeze(1) - targets) ** 2


def mean_squared_error(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean squared error, times -100."""
    return -100 * float(squared_errors(outputs, targets).mean())


def mean_absolute_error(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean absolute error, times -100: which outliers do not dominate."""
    return -100 * float((outputs.squeeze(1) - targets).abs().mean())


def mlp(*sizes: int) -> nn.Module:
    """Return a multilayer perceptron of these widths."""
    layers: list[nn.Module] = []
    for place, (size, following) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.ReLU()] if place else []
        layers.append(nn.Linear(size, following))
    return nn.Sequential(*layers)


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the outputs for many examples, in evaluation mode."""
    was_training = model.training
    model.eval()
    found = torch.cat([model(some) for some in torch.split(inputs, EVALUATED_AT_ONCE)])
    model.train(was_training)
    return found


Labels = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def chosen(count: int, share: float, draw: np.random.Generator) -> Flags:
    """Return flags, exactly round(share x count) of which are set."""
    flags = np.zeros(count, dtype=np.bool_)
    flags[draw.choice(count, size=round(share * count), replace=False)] = True
    return flags


def mislabeled(
    labels: Labels, share: float, classes: int, draw: np.random.Generator, *, pairs: bool = False
) -> tuple[Labels, Flags]:
    """Make a share of the labels wrong: any other class, or the next one with `pairs`."""
    wrong = chosen(len(labels), share, draw)
    shift = 1 if pairs else draw.integers(1, classes, size=int(wrong.sum()))
    given = labels.copy()
    given[wrong] = (given[wrong] + shift) % classes
    return given, wrong


def is_better(value: float, than: float) -> bool:
    """Return whether a metric is better; NaN is worse than anything."""
    return not math.isnan(value) and (math.isnan(than) or value > than)
