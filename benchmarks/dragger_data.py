"""Data whose wrong labels are known: digits with synthetic ones, CIFAR-10 with those people made.

CIFAR-10 and the labels of people (CIFAR-10N) are those of the vision recipe: fetched once into the
user's cache folder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from microclip_lab.training.fetch import cache_folder
from microclip_lab.vision.cifar import DEVIATION, MEAN, cifar10, labels_of_people
from microclip_lab.vision.digit_splits import mislabel

CACHE = cache_folder()


@dataclass(frozen=True)
class Noisy:
    """Training images with their labels as given, which of them are wrong, and clean test data."""

    images: Tensor  # examples x channels x height x width
    labels: Tensor
    wrong: Tensor  # bool
    test_images: Tensor
    test_labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, rows: Tensor) -> Noisy:
        """Return the same with some of the training images."""
        return replace(
            self, images=self.images[rows], labels=self.labels[rows], wrong=self.wrong[rows]
        )


def digits(seed: int, noise: float = 0.2, test: int = 500) -> Noisy:
    """Scikit-learn's digits, 1,297 to train on, exactly a share `noise` with wrong labels."""
    pixels, truth = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    truth = truth.astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(truth))
    aside, training = order[:test], order[test:]
    given, wrong = mislabel(truth[training], noise, seed)
    return Noisy(
        images[training],
        torch.tensor(given),
        torch.tensor(wrong),
        images[aside],
        torch.tensor(truth[aside]),
    )


def cifar10n(seed: int, size: int, test: int = 2000, labels: str = "random_label1") -> Noisy:
    """CIFAR-10 as one person each labelled it: a subset to train on, and clean test labels."""
    photographs, given = cifar10(), labels_of_people(labels)
    truth, test_truth = photographs.training_truth, photographs.test_truth
    draw = np.random.default_rng(seed)
    rows = draw.permutation(len(truth))[:size]
    tested = draw.permutation(len(test_truth))[:test]
    return Noisy(
        _scaled(photographs.training[rows]),
        torch.tensor(given[rows]),
        torch.tensor(given[rows] != truth[rows]),
        _scaled(photographs.test[tested]),
        torch.tensor(test_truth[tested]),
    )


def _scaled(pixels: np.ndarray) -> Tensor:
    images = torch.tensor(pixels, dtype=torch.float32).permute(0, 3, 1, 2) / 255
    return (images - MEAN[0]) / DEVIATION[0]
