"""CIFAR-10 with human labels, on features that are fixed: quick to train on, easy to memorize.

A photo is described by how well 6 x 6 patches match 256 centroids that k-means found (Coates, Lee
and Ng 2011), summed over its quadrants. Computed once and cached.
"""

from __future__ import annotations

import functools
import os
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from microclip_lab.dirty_data.task import Data, Part, Task, classification, mlp
from microclip_lab.evidence.wording import percent
from microclip_lab.training.fetch import cache_folder
from microclip_lab.vision import cifar

PATCH, STRIDE, CENTROIDS, QUADRANTS = 6, 2, 256, 2
POOL, PHOTOS, VALIDATION = 20_000, 3072, 2048  # photos to draw from, and drawn with the seed
EDITION = 1  # increase it when features change
WIDTH = CENTROIDS * QUADRANTS**2


def _patches(pixels: Tensor) -> Tensor:
    """Return normalized patches: (photos, places, values)."""
    found = F.unfold(pixels, PATCH, stride=STRIDE).transpose(1, 2)
    found = found - found.mean(2, keepdim=True)
    return found / (found.square().mean(2, keepdim=True) + 1e-2).sqrt()


def _whitening(patches: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    scaled: Tensor = (vectors / (values.clamp_min(0) + 0.1).sqrt()) @ vectors.T
    return scaled


def _centroids(patches: Tensor, draw: torch.Generator) -> Tensor:
    """Return unit centroids, by spherical k-means."""
    found = F.normalize(patches[torch.randperm(len(patches), generator=draw)[:CENTROIDS]])
    for _ in range(8):
        matches = patches @ found.T
        nearest = matches.argmax(1)
        values = matches.gather(1, nearest[:, None])
        sums = torch.zeros_like(found).index_add_(0, nearest, values * patches)
        found = F.normalize(sums + 1e-3 * found)
    return found


def _described(pixels: Tensor, whitening: Tensor, centroids: Tensor) -> Tensor:
    rows = []
    for some in torch.split(pixels, 500):
        matches = F.relu(_patches(some) @ whitening @ centroids.T - 0.5)
        side = round(matches.shape[1] ** 0.5)
        grid = matches.transpose(1, 2).reshape(len(some), CENTROIDS, side, side)
        rows.append(F.adaptive_avg_pool2d(grid, QUADRANTS).flatten(1))
    return torch.cat(rows)


@functools.cache
def features() -> tuple[Tensor, Tensor]:
    """Return the features of the first training photos and of all test photos."""
    path = cache_folder() / f"cifar-patches-{EDITION}.pt"
    if not path.exists():
        found = cifar.cifar10()
        training, test = (
            torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2).float() / 255
            for pixels in (found.training[:POOL], found.test)
        )
        draw = torch.Generator().manual_seed(41)
        sample = _patches(training[:1000]).flatten(0, 1)
        sample = sample[torch.randperm(len(sample), generator=draw)[:40_000]]
        whitening = _whitening(sample)
        centroids = _centroids(sample @ whitening, draw)
        made = [_described(pixels, whitening, centroids) for pixels in (training, test)]
        mean, deviation = made[0].mean(0), made[0].std(0) + 1e-6
        part = path.with_suffix(f".{os.getpid()}")
        torch.save([((each - mean) / deviation).half() for each in made], part)
        part.replace(path)
    training, test = torch.load(path, weights_only=True)
    return training.float() / 4, test.float() / 4


def photo_data(seed: int, labels: str) -> Data:
    """Return photos with human (or clean) labels, and all test photos."""
    training, test = features()
    found = cifar.cifar10()
    truth = torch.from_numpy(found.training_truth)
    given = torch.from_numpy(cifar.labels_of_people(labels))
    order = torch.from_numpy(np.random.default_rng((seed, 34)).permutation(POOL))
    rows, others = order[:PHOTOS], order[PHOTOS : PHOTOS + VALIDATION]
    return Data(
        Part(training[rows], given[rows]),
        given[rows] != truth[rows],
        Part(training[others], given[others]),
        Part(test, torch.from_numpy(found.test_truth)),
        Part(training[others], truth[others]),
    )


def _photos(name: str, labels: str, noise: float) -> Task:
    said = (
        f"human labels ({labels.split('_')[0]}, {percent(noise)} wrong)" if noise else "true labels"
    )
    return classification(
        name=name,
        title=f"CIFAR-10, {said}",
        purpose="noisy" if noise else "clean",
        description=f"{PHOTOS:,} photos of CIFAR-10 as {WIDTH:,} patch features, {said}. MLP "
        f"{WIDTH}-128-10. Error on the 10,000 test photos.",
        noise=noise,
        make_data=partial(photo_data, labels=labels),
        make_model=partial(mlp, WIDTH, 128, 10),
        epochs=12,
        batch_size=64,
        start=-1,
    )


PHOTO_TASKS = (
    _photos("photos-worse", "worse_label", 0.40),
    _photos("photos-random1", "random_label1", 0.17),
    _photos("photos-clean", "clean_label", 0.0),
)
