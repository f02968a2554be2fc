"""Scikit-learn's digits, split into training, validation and test images, with wrong labels.

Only training images have wrong labels; validation and test data are clean. The validation images
are the same for every seed, so that no image used for selection is in any test set. How the others
are split into training and test images, and which labels are wrong, depends on the seed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
from torch import Tensor

TRAINING_IMAGES = 900
VALIDATION_IMAGES = 297
TEST_IMAGES = 600
CLASSES = 10
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Images:
    """Images, one per row, their given labels, and their indices in scikit-learn's digits."""

    pixels: Tensor
    labels: Tensor
    places: Tensor


@dataclass(frozen=True)
class Digits:
    """One seed's data."""

    training: Images
    wrong: Tensor  # bool: this training label is wrong
    validation: Images
    test: Images


def load(seed: int, noise: float, tested: int = TEST_IMAGES) -> Digits:
    """Return the data of a seed, with a share `noise` of its training labels wrong.

    `tested` images are held out for testing: 600 leave 900 for training.
    """
    pixels, labels = originals()
    others, validation = _split(np.arange(len(labels)), labels, VALIDATION_IMAGES, seed=0)
    training, test = _split(others, labels, tested, seed)
    assert len(training) == TRAINING_IMAGES + TEST_IMAGES - tested
    given, wrong = mislabel(labels[training], noise, seed)
    mean, deviation = pixels[training].mean(), pixels[training].std()

    def images(rows: Labels, their_labels: Labels) -> Images:
        scaled = (pixels[rows] - mean) / deviation
        return Images(
            torch.tensor(scaled, dtype=torch.float32),
            torch.tensor(their_labels),
            torch.tensor(rows),
        )

    return Digits(
        training=images(training, given),
        wrong=torch.tensor(wrong),
        validation=images(validation, labels[validation]),
        test=images(test, labels[test]),
    )


def mislabel(labels: Labels, noise: float, seed: int) -> tuple[Labels, npt.NDArray[np.bool_]]:
    """Replace exactly round(noise x n) labels, each by one of the nine others, drawn uniformly."""
    draw = np.random.default_rng(seed)
    chosen = draw.choice(len(labels), size=round(noise * len(labels)), replace=False)
    wrong = np.zeros(len(labels), dtype=np.bool_)
    wrong[chosen] = True
    given = labels.copy()
    # a shift by 1 to 9 reaches every other class, equally often, and never the label itself
    given[chosen] = (given[chosen] + draw.integers(1, CLASSES, size=len(chosen))) % CLASSES
    return given, wrong


@functools.cache
def originals() -> tuple[npt.NDArray[np.float64], Labels]:
    """Return all images, 64 pixels from 0 to 16 each, and their true labels."""
    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels.astype(np.int64)


def _split(rows: Labels, labels: Labels, held_out: int, seed: int) -> tuple[Labels, Labels]:
    """Set rows aside, each class in its proportion."""
    kept, aside = train_test_split(
        rows, test_size=held_out, stratify=labels[rows], random_state=seed
    )
    return kept, aside
