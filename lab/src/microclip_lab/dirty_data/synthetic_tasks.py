"""Synthetic tasks: a Gaussian mixture with wrong labels, and regression with outliers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
import torch

from microclip_lab.dirty_data.task import (
    Data,
    Flags,
    Part,
    Purpose,
    Task,
    chosen,
    classification,
    mean_absolute_error,
    mean_squared_error,
    mislabeled,
    mlp,
    squared_errors,
)

TRAINING, VALIDATION, TEST = 1024, 512, 2000

# ---- mixture
MIXTURE_DIMENSIONS, CLASSES, CENTERS = 24, 6, 3  # centers per class
SPREAD = 1.2  # of the centers; the clusters have variance 1 in every direction


def mixture_data(seed: int, noise: float) -> Data:
    """Return points around random centers, several per class, some with a wrong label."""
    draw = np.random.default_rng((seed, 11))
    centers = SPREAD * draw.standard_normal((CLASSES * CENTERS, MIXTURE_DIMENSIONS))
    parts, wrong = [], np.zeros(0, dtype=np.bool_)
    for count, share in ((TRAINING, noise), (VALIDATION, noise), (TEST, 0.0)):
        cluster = draw.integers(len(centers), size=count)
        points = centers[cluster] + draw.standard_normal((count, MIXTURE_DIMENSIONS))
        given, flags = mislabeled(cluster % CLASSES, share, CLASSES, draw)
        parts.append(Part(torch.tensor(points, dtype=torch.float32), torch.tensor(given)))
        wrong = flags if len(parts) == 1 else wrong
    return Data(parts[0], torch.tensor(wrong), parts[1], parts[2])


def _mixture(name: str, title: str, purpose: Purpose, noise: float) -> Task:
    return classification(
        name=name,
        title=title,
        purpose=purpose,
        description=f"{TRAINING} points in {MIXTURE_DIMENSIONS} dimensions, {CLASSES} classes of "
        f"{CENTERS} clusters each, {noise:.0%} of the labels wrong. MLP "
        f"{MIXTURE_DIMENSIONS}-256-256-{CLASSES}. Accuracy on {TEST} clean points.",
        noise=noise,
        make_data=partial(mixture_data, noise=noise),
        make_model=partial(mlp, MIXTURE_DIMENSIONS, 256, 256, CLASSES),
        epochs=30,
        start=-2,
    )


# ---- regression
Outliers = Literal["none", "symmetric", "skewed"]
DIMENSIONS, WAVES = 12, 8
FUZZ = 0.1  # standard deviation of the ordinary noise; that of the targets is 1
FARTHEST = (2.0, 6.0)  # how far outliers are off, in standard deviations of the targets


def regression_data(seed: int, noise: float, outliers: Outliers) -> Data:
    """Return points of a smooth random function, some of them far off."""
    draw = np.random.default_rng((seed, 12))
    directions = draw.standard_normal((WAVES, DIMENSIONS)) / np.sqrt(DIMENSIONS)
    phases = draw.uniform(0, 2 * np.pi, WAVES)

    def points(count: int, share: float, fuzz: float) -> tuple[Part, Flags]:
        inputs = draw.standard_normal((count, DIMENSIONS))
        # the mean square of a wave is about 1/2
        values = np.sin(1.5 * inputs @ directions.T + phases).sum(1) * np.sqrt(2 / WAVES)
        values += fuzz * draw.standard_normal(count)
        wrong = chosen(count, share, draw)
        far = draw.uniform(*FARTHEST, size=count)
        signs = np.ones(count) if outliers == "skewed" else draw.choice((-1.0, 1.0), size=count)
        values = np.where(wrong, values + signs * far, values)
        as_tensor = partial(torch.tensor, dtype=torch.float32)
        return Part(as_tensor(inputs), as_tensor(values)), wrong

    training, wrong = points(TRAINING, noise, FUZZ)
    validation, _ = points(VALIDATION, noise, FUZZ)
    test, _ = points(TEST, 0.0, 0.0)
    return Data(training, torch.tensor(wrong), validation, test)


def _regression(name: str, title: str, purpose: Purpose, noise: float, outliers: Outliers) -> Task:
    off = {
        "none": "no outliers",
        "symmetric": f"{noise:.0%} of the targets off by 2 to 6 standard deviations, up or down",
        "skewed": f"{noise:.0%} of the targets off by 2 to 6 standard deviations, always up",
    }
    make_data: Callable[[int], Data] = partial(regression_data, noise=noise, outliers=outliers)
    return Task(
        name=name,
        title=title,
        purpose=purpose,
        kind="regression",
        description=f"{TRAINING} points of a smooth function in {DIMENSIONS} dimensions, "
        f"{off[outliers]}. MLP {DIMENSIONS}-128-128-1. Points are -100 x the mean squared error on "
        f"{TEST} clean points; on validation data, -100 x the mean absolute error.",
        noise=noise,
        make_data=make_data,
        make_model=partial(mlp, DIMENSIONS, 128, 128, 1),
        losses=squared_errors,
        validate=mean_absolute_error,
        test=mean_squared_error,
        epochs=40,
    )


SYNTHETIC_TASKS = (
    _mixture("mixture-7", "Mixture, 7 % wrong labels", "noisy", 0.07),
    _mixture("mixture-clean", "Mixture", "clean", 0.0),
    _regression("regression-7", "Regression, 7 % outliers", "noisy", 0.07, "symmetric"),
    _regression("regression-20", "Regression, 20 % outliers", "noisy", 0.2, "symmetric"),
    _regression("regression-skewed", "Regression, 20 % skewed outliers", "noisy", 0.2, "skewed"),
    _regression("regression-clean", "Regression", "clean", 0.0, "none"),
)
