"""Image tasks: digits with wrong labels, CIFAR-10 with human labels, and fine-tuning on CIFAR-10.

Networks are small and memorize wrong labels within seconds.
"""

from __future__ import annotations

import functools
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from microclip_lab.dirty_data.task import (
    Data,
    Part,
    Purpose,
    Task,
    classification,
    mislabeled,
    mlp,
)
from microclip_lab.vision import cifar, digit_splits

# ---- digits


def digits_data(seed: int, noise: float, pairs: bool = False) -> Data:
    """Return 900 images for training and 297 for validation, both dirty, and 600 clean ones."""
    clean = digit_splits.load(seed, noise=0.0)
    draw = np.random.default_rng((seed, 13))

    def dirty(images: digit_splits.Images) -> tuple[Part, Tensor]:
        given, wrong = mislabeled(
            images.labels.numpy(), noise, digit_splits.CLASSES, draw, pairs=pairs
        )
        return Part(images.pixels, torch.tensor(given)), torch.tensor(wrong)

    training, wrong = dirty(clean.training)
    validation, _ = dirty(clean.validation)
    return Data(training, wrong, validation, Part(clean.test.pixels, clean.test.labels))


def _digits(
    name: str,
    title: str,
    purpose: Purpose,
    noise: float,
    *,
    pairs: bool = False,
    epochs: int = 32,
) -> Task:
    kind = "replaced by the next class" if pairs else "wrong"
    return classification(
        name=name,
        title=title,
        purpose=purpose,
        description=f"900 of scikit-learn's digits, {noise:.0%} of the labels {kind}. MLP "
        f"64-256-256-10, {epochs} epochs. Accuracy on 600 clean images.",
        noise=noise,
        make_data=partial(digits_data, noise=noise, pairs=pairs),
        make_model=partial(mlp, 64, 256, 256, 10),
        epochs=epochs,
    )


# ---- CIFAR-10
PHOTOS, VALIDATION = 3072, 1024  # for training and validation, drawn with the seed
SIDE = 16


@functools.cache
def photographs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return CIFAR-10 at 16 x 16, one photo per row, and its labels: training, then test."""
    found = cifar.cifar10()

    def small(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Tensor:
        rows = [
            F.avg_pool2d(some.permute(0, 3, 1, 2).float() / 255, cifar.SIZE // SIDE)
            for some in torch.split(torch.from_numpy(pixels.copy()), 10_000)
        ]
        return ((torch.cat(rows) - cifar.MEAN[0]) / cifar.DEVIATION[0]).flatten(1)

    return (
        small(found.training),
        torch.from_numpy(found.training_truth),
        small(found.test),
        torch.from_numpy(found.test_truth),
    )


def cifar_data(seed: int, labels: str) -> Data:
    """Return photos with human (or clean) labels, and all test photos."""
    training, truth, test, test_truth = photographs()
    given = torch.from_numpy(cifar.labels_of_people(labels))
    order = torch.from_numpy(np.random.default_rng((seed, 14)).permutation(len(truth)))
    rows, others = order[:PHOTOS], order[PHOTOS : PHOTOS + VALIDATION]
    return Data(
        Part(training[rows], given[rows]),
        given[rows] != truth[rows],
        Part(training[others], given[others]),
        Part(test, test_truth),
    )


def _cifar(name: str, title: str, purpose: Purpose, labels: str, noise: float) -> Task:
    said = "true labels" if purpose == "clean" else f"human labels ({labels}, {noise:.0%} wrong)"
    return classification(
        name=name,
        title=title,
        purpose=purpose,
        description=f"{PHOTOS:,} photos of CIFAR-10 at {SIDE} x {SIDE}, {said}. MLP "
        "768-256-256-10. Accuracy on the 10,000 test photos.",
        noise=noise,
        make_data=partial(cifar_data, labels=labels),
        make_model=partial(mlp, 3 * SIDE * SIDE, 256, 256, 10),
        epochs=24,
        batch_size=64,
        start=-2,
        test_every=5,
    )


# ---- fine-tuning: other classes than the network was pre-trained on
KNOWN, NEW = (0, 2, 4, 6, 8), (1, 3, 5, 7, 9)  # classes of CIFAR-10
FEW = 512
PRETRAINING_EPOCHS, PRETRAINING_RATE = 6, 1e-3


def _of_classes(labels: Tensor, classes: tuple[int, ...]) -> Tensor:
    return torch.isin(labels, torch.tensor(classes)).nonzero().squeeze(1)


def _renumbered(classes: tuple[int, ...]) -> Tensor:
    """Return the new number of every class: 0, 1, ... for these, -1 for the others."""
    return torch.full((10,), -1).index_copy(0, torch.tensor(classes), torch.arange(len(classes)))


def _small_cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (3, SIDE, SIDE)),
        *(nn.Conv2d(3, 32, 3, 2, 1), nn.GroupNorm(4, 32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, 2, 1), nn.GroupNorm(4, 64), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, len(KNOWN))),
    )


@functools.cache
def pretrained() -> dict[str, Tensor]:
    """Return weights trained on all clean photos of five classes: a checkpoint, for all seeds."""
    photos, truth, _, _ = photographs()
    rows = _of_classes(truth, KNOWN)
    numbers = _renumbered(KNOWN)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(15)
        model = _small_cnn()
        optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINING_RATE, fused=True)
        for _ in range(PRETRAINING_EPOCHS):
            for some in torch.split(rows[torch.randperm(len(rows))], 128):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(photos[some]), numbers[truth[some]])
                torch.autograd.backward(loss)
                optimizer.step()
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def fine_tuned_model() -> nn.Module:
    """Return the pre-trained network with a new last layer, drawn from torch's generator."""
    model = _small_cnn()
    head = model[-1].state_dict()
    model.load_state_dict(pretrained())
    model[-1].load_state_dict(head)
    return model


def fine_tuning_data(seed: int, noise: float) -> Data:
    """Return a few photos of the other five classes, some with a wrong label."""
    photos, truth, test, test_truth = photographs()
    numbers = _renumbered(NEW)
    draw = np.random.default_rng((seed, 16))
    rows = _of_classes(truth, NEW)
    rows = rows[torch.from_numpy(draw.permutation(len(rows))[: FEW + VALIDATION])]
    given, wrong = mislabeled(numbers[truth[rows[:FEW]]].numpy(), noise, len(NEW), draw)
    others, _ = mislabeled(numbers[truth[rows[FEW:]]].numpy(), noise, len(NEW), draw)
    tested = _of_classes(test_truth, NEW)
    return Data(
        Part(photos[rows[:FEW]], torch.tensor(given)),
        torch.tensor(wrong),
        Part(photos[rows[FEW:]], torch.tensor(others)),
        Part(test[tested], numbers[test_truth[tested]]),
    )


def _fine_tuning(name: str, title: str, purpose: Purpose, noise: float) -> Task:
    return classification(
        name=name,
        title=title,
        purpose=purpose,
        description="A small CNN, pre-trained on the clean photos of five classes of CIFAR-10, "
        f"fine-tuned on {FEW} photos of the other five, {noise:.0%} of the labels wrong. Accuracy "
        "on their 5,000 test photos.",
        noise=noise,
        make_data=partial(fine_tuning_data, noise=noise),
        make_model=fine_tuned_model,
        epochs=20,
        start=-1,
        test_every=5,
    )


VISION_TASKS = (
    _digits("digits-20", "Digits, 20 % wrong labels", "noisy", 0.2),
    _digits("digits-40", "Digits, 40 % wrong labels", "noisy", 0.4),
    _digits("digits-pairs", "Digits, 40 % pair-flipped", "noisy", 0.4, pairs=True),
    _cifar("cifar-random1", "CIFAR-10N random1", "noisy", "random_label1", 0.17),
    _cifar("cifar-worse", "CIFAR-10N worse", "noisy", "worse_label", 0.40),
    _fine_tuning("finetune-20", "Fine-tuning, 20 % wrong labels", "noisy", 0.2),
    _digits("digits-clean", "Digits", "clean", 0.0),
    _cifar("cifar-clean", "CIFAR-10, true labels", "clean", "clean_label", 0.0),
    _fine_tuning("finetune-clean", "Fine-tuning", "clean", 0.0),
    _digits("digits-short", "Digits, 20 %, 5 epochs", "failure", 0.2, epochs=5),
)
