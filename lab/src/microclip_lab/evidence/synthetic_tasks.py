"""Synthetic tasks: a shifted mixture, fine-tuned or from scratch, and regression with outliers.

Canaries are points with nothing to learn from: random inputs with random labels. Outliers are
targets that are off by a given number of standard deviations: the positive control.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from microclip_lab.dirty_data.synthetic_tasks import DIMENSIONS, FUZZ, WAVES
from microclip_lab.dirty_data.task import (
    Data,
    Flags,
    Part,
    Task,
    accuracy,
    chosen,
    cross_entropies,
    mean_absolute_error,
    mean_squared_error,
    mlp,
    squared_errors,
)
from microclip_lab.evidence.wording import percent

TRAINING, VALIDATION, TEST = 1024, 512, 4000

# ---- a mixture that has moved since the network was trained
INPUTS, CLASSES, CENTERS = 24, 6, 3  # centers per class
SPREAD, SHIFT = 1.0, 0.5  # of the centers, and of how far each has moved
BEFORE = 8192  # points to pre-train on
Damage = Literal["none", "canaries", "labels"]


def _points(
    centers: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    count: int,
    share: float,
    damage: Damage,
    draw: np.random.Generator,
) -> tuple[Part, Part, Flags]:
    """Return points as given, the same with right targets, and which are draggers."""
    cluster = draw.integers(len(centers), size=count)
    inputs = centers[cluster] + draw.standard_normal((count, INPUTS))
    truth = cluster % CLASSES
    given, wrong = truth.copy(), chosen(count, share, draw)
    number = int(wrong.sum())
    seen = inputs.copy()
    if damage == "canaries":
        deviation = np.sqrt(1 + SPREAD**2 + SHIFT**2)  # of all points together
        seen[wrong] = deviation * draw.standard_normal((number, INPUTS))
        given[wrong] = draw.integers(CLASSES, size=number)
    elif damage == "labels":
        given[wrong] = (given[wrong] + draw.integers(1, CLASSES, size=number)) % CLASSES
    as_inputs = partial(torch.tensor, dtype=torch.float32)
    return (
        Part(as_inputs(seen), torch.tensor(given)),
        Part(as_inputs(inputs), torch.tensor(truth)),
        wrong,
    )


@functools.lru_cache(maxsize=8)
def _mixture(seed: int, share: float, damage: Damage) -> tuple[Data, Part]:
    """Return the data of a seed, and what came before."""
    draw = np.random.default_rng((seed, 31))
    before = SPREAD * draw.standard_normal((CLASSES * CENTERS, INPUTS))
    centers = before + SHIFT * draw.standard_normal(before.shape)
    earlier, _, _ = _points(before, BEFORE, 0.0, "none", draw)
    training, _, wrong = _points(centers, TRAINING, share, damage, draw)
    validation, right, _ = _points(centers, VALIDATION, share, damage, draw)
    test, _, _ = _points(centers, TEST, 0.0, "none", draw)
    return Data(training, torch.tensor(wrong), validation, test, right), earlier


def mixture_data(seed: int, share: float, damage: Damage) -> Data:
    """Return points of a mixture, some of them draggers."""
    return _mixture(seed, share, damage)[0]


@functools.lru_cache(maxsize=64)
def pretrained_on_mixture(seed: int) -> dict[str, Tensor]:
    """Return weights trained on the clean mixture as it was before; the same for all damages."""
    part = _mixture(seed, 0.0, "none")[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mlp(INPUTS, 256, 256, CLASSES)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for _ in range(6):
            for rows in torch.split(torch.randperm(len(part)), 64):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(part.inputs[rows]), part.targets[rows])
                torch.autograd.backward(loss)
                optimizer.step()
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


class MovedMixture(Task):
    """A task whose network was trained on the same seed's mixture as it was before."""

    def model(self, seed: int) -> nn.Module:
        """Return the pre-trained network of a seed."""
        model = super().model(seed)
        model.load_state_dict(pretrained_on_mixture(seed))
        return model


def _mixture_task(name: str, share: float, damage: Damage, *, tuned: bool) -> Task:
    what = {
        "none": "clean",
        "canaries": f"{percent(share)} canaries",
        "labels": f"{percent(share)} wrong labels",
    }[damage]
    how = "fine-tuned" if tuned else "from scratch"
    start = f", pre-trained on {BEFORE:,} clean points before the centers moved" if tuned else ""
    make = MovedMixture if tuned else Task
    return make(
        name=name,
        title=f"Mixture, {how}, {what}",
        purpose="clean" if damage == "none" else "noisy",
        kind="classification",
        description=f"{TRAINING:,} points of a Gaussian mixture in {INPUTS} dimensions, "
        f"{CLASSES} classes, {what}. MLP {INPUTS}-256-256-{CLASSES}{start}. Error on {TEST:,} "
        "clean points.",
        noise=share,
        make_data=partial(mixture_data, share=share, damage=damage),
        make_model=partial(mlp, INPUTS, 256, 256, CLASSES),
        losses=cross_entropies,
        validate=accuracy,
        test=accuracy,
        epochs=12,
        start=-1,
    )


# ---- regression with outliers


def outlier_data(seed: int, share: float, size: float) -> Data:
    """Return points of a smooth random function, a share of them off by `size`, up or down."""
    draw = np.random.default_rng((seed, 32))
    directions = draw.standard_normal((WAVES, DIMENSIONS)) / np.sqrt(DIMENSIONS)
    phases = draw.uniform(0, 2 * np.pi, WAVES)

    def points(count: int, off: float, fuzz: float) -> tuple[Part, Part, Flags]:
        inputs = draw.standard_normal((count, DIMENSIONS))
        # the mean square of a wave is about 1/2
        values = np.sin(inputs @ directions.T + phases).sum(1) * np.sqrt(2 / WAVES)
        values += fuzz * draw.standard_normal(count)
        wrong = chosen(count, off, draw)
        far = values + size * draw.choice((-1.0, 1.0), size=count)
        as_tensor = partial(torch.tensor, dtype=torch.float32)
        given = Part(as_tensor(inputs), as_tensor(np.where(wrong, far, values)))
        return given, Part(as_tensor(inputs), as_tensor(values)), wrong

    training, _, wrong = points(TRAINING, share, FUZZ)
    validation, right, _ = points(VALIDATION, share, FUZZ)
    test, _, _ = points(TEST, 0.0, 0.0)
    return Data(training, torch.tensor(wrong), validation, test, right)


def _outliers(name: str, share: float, size: float) -> Task:
    off = (
        f"{percent(share)} of the targets off by {size:g} standard deviations" if share else "clean"
    )
    return Task(
        name=name,
        title=f"Regression, {off}",
        purpose="noisy" if share else "clean",
        kind="regression",
        description=f"{TRAINING:,} points of a smooth function in {DIMENSIONS} dimensions, {off}. "
        f"MLP {DIMENSIONS}-64-64-1. Error is 100 x the mean squared error on {TEST:,} clean "
        "points; on validation data, 100 x the mean absolute error.",
        noise=share,
        make_data=partial(outlier_data, share=share, size=size),
        make_model=partial(mlp, DIMENSIONS, 64, 64, 1),
        losses=squared_errors,
        validate=mean_absolute_error,
        test=mean_squared_error,
        epochs=16,
        start=1,
    )


OUTLIER_TASKS = (
    _outliers("outliers-7-10", 0.07, 10.0),
    _outliers("outliers-7-3", 0.07, 3.0),
    _outliers("outliers-2-10", 0.02, 10.0),
    _outliers("outliers-20-10", 0.20, 10.0),
    _outliers("outliers-none", 0.0, 0.0),
)
MIXTURE_TASKS = (
    _mixture_task("tuned-canaries", 0.07, "canaries", tuned=True),
    _mixture_task("scratch-canaries", 0.07, "canaries", tuned=False),
    _mixture_task("tuned-labels", 0.07, "labels", tuned=True),
    _mixture_task("tuned-clean", 0.0, "none", tuned=True),
    _mixture_task("scratch-clean", 0.0, "none", tuned=False),
)
