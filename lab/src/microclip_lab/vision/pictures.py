"""Pictures with labels: what every data set of this recipe is made of. Knows no data set."""

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
    """Where pixels come from: memory, or files that are read when they are asked for."""

    def pixels(self, place: int) -> Tensor:
        """Return a picture: channels x height x width."""

    def shown(self, place: int) -> Any:
        """Return it for the page: the bytes of an image file, or height x width x channels."""


@dataclass(frozen=True)
class Memory:
    """Pictures that are all of one size and few enough to be held."""

    held: Tensor  # pictures x channels x height x width

    def pixels(self, place: int) -> Tensor:
        """Return a picture."""
        return self.held[place]

    def shown(self, place: int) -> Any:
        """Return it as the page's own PNG writer takes it."""
        return self.held[place].permute(1, 2, 0).numpy()

    def resized(self, size: int) -> Memory:
        """Return the same pictures in another size, with neighbouring pixels averaged."""
        if self.held.shape[2:] == (size, size):
            return self
        smaller = F.interpolate(self.held.float(), (size, size), mode="bilinear", antialias=True)
        if not self.held.is_floating_point():
            smaller = smaller.round().clamp(0, 255)
        return Memory(smaller.to(self.held.dtype))


class Pictures(Sequence[Picture]):
    """Some pictures of a source, with labels.

    Args:
        source: Where their pixels are.
        places: Which of the source's pictures these are.
        labels: The number of each one's class, as it is trained or judged with.
        classes: What the classes are called.
        truths: The right labels, where they are known.
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
        """Return some of them."""
        truths = None if self.truths is None else self.truths[rows]
        return Pictures(self.source, self.places[rows], self.labels[rows], self.classes, truths)

    def drawn(self, count: int | None, seed: int) -> Labels:
        """Return the rows of so many, drawn, in the order that they have; of all, if fewer."""
        if count is None or count >= len(self):
            return np.arange(len(self))
        return np.sort(np.random.default_rng(seed).choice(len(self), count, replace=False))

    @property
    def wrong(self) -> float | None:
        """The share of wrong labels, where it is known."""
        if self.truths is None:
            return None
        return float((self.labels != self.truths).mean())

    def described(self, row: int) -> dict[str, Any]:
        """Return how the page shows one: the picture, its label and the right one."""
        described = {
            "image": self.source.shown(int(self.places[row])),
            "label": self.classes[self.labels[row]],
        }
        if self.truths is not None:
            described["truth"] = self.classes[self.truths[row]]
        return described


def in_pictures(data: Data[Picture]) -> Pictures:
    """Return the training pictures as what they are."""
    if not isinstance(data.training, Pictures):
        raise TypeError(
            "The vision recipe works on the data that it loaded itself, but got "
            f"{type(data.training).__name__}."
        )
    return data.training


def set_aside(labels: Labels, share: float) -> tuple[Labels, Labels]:
    """Part rows into those that are kept and a share of each class, the same whatever the seed.

    >>> import numpy as np
    >>> kept, aside = set_aside(np.array([0, 0, 0, 0, 1, 1]), share=0.5)
    >>> len(kept), len(aside), sorted(np.array([0, 0, 0, 0, 1, 1])[aside].tolist())
    (3, 3, [0, 0, 1])

    A class of two or more has at least one picture on each side; a single picture is kept.
    """
    draw = np.random.default_rng(0)
    aside = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        rows = draw.permutation(np.flatnonzero(labels == label))
        if len(rows) > 1:
            aside[rows[: min(max(1, round(share * len(rows))), len(rows) - 1)]] = True
    return np.flatnonzero(~aside), np.flatnonzero(aside)


def square(picture: Tensor, size: int) -> Tensor:
    """Return the middle of a picture, size x size; a shorter side that differs is first resized."""
    shorter = min(picture.shape[1:])
    if shorter < size:
        side = [round(length * size / shorter) for length in picture.shape[1:]]
        picture = resized(picture, side[0], side[1])
    top, left = ((length - size) // 2 for length in picture.shape[1:])
    return floats(picture[:, top : top + size, left : left + size])


def resized(picture: Tensor, height: int, width: int) -> Tensor:
    """Return a picture in another size, from 0 to 1; bicubic, every pixel counted."""
    if picture.shape[1:] == (height, width):
        return floats(picture)
    return F.interpolate(floats(picture)[None], (height, width), mode="bicubic", antialias=True)[
        0
    ].clamp(0, 1)


def floats(picture: Tensor) -> Tensor:
    """Return pixels from 0 to 1."""
    return picture if picture.is_floating_point() else picture.to(torch.float32) / 255
