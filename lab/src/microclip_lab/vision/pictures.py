"""Labeled images, in memory or in files. Knows no particular data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from microclip_lab.training.recipe import Data

Labels = npt.NDArray[np.int64]


class Picture(NamedTuple):
    """An example."""

    pixels: Tensor  # channels x height x width: bytes, or floats from 0 to 1
    label: int


class Source(Protocol):
    """Where pixels come from: memory, or files that are read on demand."""

    def pixels(self, place: int) -> Tensor:
        """Return an image: channels x height x width."""

    def shown(self, place: int) -> Any:
        """Return it for the page: the bytes of an image file, or height x width x channels."""


@dataclass(frozen=True)
class Memory:
    """Images of one size that fit into memory."""

    held: Tensor  # pictures x channels x height x width

    def pixels(self, place: int) -> Tensor:
        """Return a picture."""
        return self.held[place]

    def shown(self, place: int) -> Any:
        """Return it as the page's PNG writer expects it."""
        return self.held[place].permute(1, 2, 0).numpy()

    def resized(self, size: int) -> Memory:
        """Return the same images in another size, with antialiasing."""
        if self.held.shape[2:] == (size, size):
            return self
        smaller = F.interpolate(self.held.float(), (size, size), mode="bilinear", antialias=True)
        if not self.held.is_floating_point():
            smaller = smaller.round().clamp(0, 255)
        return Memory(smaller.to(self.held.dtype))


class Pictures(Sequence[Picture]):
    """Images of a source, with labels.

    Args:
        source: Where their pixels are.
        places: Their indices in the source.
        labels: Their class numbers, as used in training or evaluation.
        classes: Class names.
        truths: The right labels, if known.
    """

    def __init__(
        self,
        source: Source,
        places: Labels,
        labels: Labels,
        classes: Sequence[str],
        truths: Labels | None = None,
    ) -> None:
        self.source = source
        self.places = places
        self.labels = labels
        self.classes = tuple(classes)
        self.truths = truths

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, row: Any) -> Any:
        return Picture(self.source.pixels(int(self.places[row])), int(self.labels[row]))

    def only(self, rows: Labels) -> Pictures:
        """Return these rows."""
        truths = None if self.truths is None else self.truths[rows]
        return Pictures(self.source, self.places[rows], self.labels[rows], self.classes, truths)

    def drawn(self, count: int | None, seed: int) -> Labels:
        """Return the rows of a random subset, in order; all rows if there are fewer."""
        if count is None or count >= len(self):
            return np.arange(len(self))
        return np.sort(np.random.default_rng(seed).choice(len(self), count, replace=False))

    @property
    def wrong(self) -> float | None:
        """The share of wrong labels, if known."""
        if self.truths is None:
            return None
        return float((self.labels != self.truths).mean())

    def described(self, row: int) -> dict[str, Any]:
        """Return what the page shows: the image, its label and the right one."""
        described = {
            "image": self.source.shown(int(self.places[row])),
            "label": self.classes[self.labels[row]],
        }
        if self.truths is not None:
            described["truth"] = self.classes[self.truths[row]]
        return described


def in_pictures(data: Data[Picture]) -> Pictures:
    """Return the training data as `Pictures`."""
    if not isinstance(data.training, Pictures):
        raise TypeError(
            "The vision recipe needs data from its own load(), but got "
            f"{type(data.training).__name__}."
        )
    return data.training


def set_aside(labels: Labels, share: float) -> tuple[Labels, Labels]:
    """Split rows into kept ones and a held-out share of each class, the same for every seed.

    >>> import numpy as np
    >>> kept, aside = set_aside(np.array([0, 0, 0, 0, 1, 1]), share=0.5)
    >>> len(kept), len(aside)
    (3, 3)
    >>> sorted(np.array([0, 0, 0, 0, 1, 1])[aside].tolist())
    [0, 0, 1]

    A class of two or more has at least one image on each side; a single image is kept.
    """
    draw = np.random.default_rng(0)
    aside = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        rows = draw.permutation(np.flatnonzero(labels == label))
        if len(rows) > 1:
            aside[rows[: min(max(1, round(share * len(rows))), len(rows) - 1)]] = True
    return np.flatnonzero(~aside), np.flatnonzero(aside)


def square(picture: Tensor, size: int) -> Tensor:
    """Return the center of an image, size x size; smaller images are enlarged first."""
    shorter = min(picture.shape[1:])
    if shorter < size:
        side = [round(length * size / shorter) for length in picture.shape[1:]]
        picture = resized(picture, side[0], side[1])
    top, left = ((length - size) // 2 for length in picture.shape[1:])
    return floats(picture[:, top : top + size, left : left + size])


def resized(picture: Tensor, height: int, width: int) -> Tensor:
    """Return an image in another size, from 0 to 1; bicubic, with antialiasing."""
    if picture.shape[1:] == (height, width):
        return floats(picture)
    return F.interpolate(floats(picture)[None], (height, width), mode="bicubic", antialias=True)[
        0
    ].clamp(0, 1)


def floats(picture: Tensor) -> Tensor:
    """Return pixels from 0 to 1."""
    return picture if picture.is_floating_point() else picture.to(torch.float32) / 255
