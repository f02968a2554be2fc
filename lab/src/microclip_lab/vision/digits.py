"""Scikit-learn's digits with some wrong training labels, for the recipe. See `digit_splits`."""

from __future__ import annotations

import torch

from microclip_lab.training.recipe import Data
from microclip_lab.vision.pictures import Memory, Picture, Pictures

SIZE = 8
TESTED = 300  # fewer than digit_splits has: a transformer needs more training data
MEAN, DEVIATION = (0.305,), (0.376,)  # of all pixels, from 0 to 1


def load(seed: int, noise: float, size: int = SIZE) -> Data[Picture]:
    """Return 1,200 training images, some with wrong labels, and 297 + 300 clean ones."""
    from microclip_lab.vision.digit_splits import CLASSES, originals
    from microclip_lab.vision.digit_splits import load as load_digits

    parts = load_digits(seed, noise, TESTED)
    pixels, truth = originals()
    held = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, SIZE, SIZE)
    memory = Memory(held).resized(size)

    def pictures(rows: torch.Tensor, labels: torch.Tensor) -> Pictures:
        places, names = rows.numpy(), [str(digit) for digit in range(CLASSES)]
        return Pictures(memory, places, labels.numpy(), names, truths=truth[places])

    training, validation, test = (
        pictures(part.places, part.labels)
        for part in (parts.training, parts.validation, parts.test)
    )
    return Data(
        training,
        validation,
        test,
        ids=training.places.tolist(),
        facts={"splits": "The validation digits are the same for every seed, the others drawn."},
    )
