"""Pictures changed at random, as tensor operations. Knows nothing of files, labels' names, models.

Everything random comes from `Draws`, and every function draws the same amount whatever it does, so
that an example is changed in the same way however a mini-batch is cut into parts. Pictures are
mixed in pairs, the first with the second, the third with the fourth: cut mini-batches into even
parts, and a pair is never torn apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from microclip_lab.training.batch_rng import Array, Draws
from microclip_lab.vision.pictures import resized

TRIES = 10  # for a crop that fits into the picture
PROPORTIONS = 3 / 4, 4 / 3  # of random resized crops
ERASED_AREA, ERASED_PROPORTIONS = (0.02, 1 / 3), (0.3, 1 / 0.3)


@dataclass(frozen=True)
class Mixed:
    """Pictures, each of which may have a share of its partner in it, and both labels."""

    pixels: Tensor
    labels: Tensor
    partners: Tensor  # the labels of what was mixed in
    shares: Tensor  # of the picture itself, from 0 to 1


def resized_crops(
    pictures: Sequence[Tensor], size: int, smallest: float, draws: Draws
) -> list[Tensor]:
    """Return a random part of each picture, resized: of its area `smallest` or more, nearly square.

    If none of ten tries fits into the picture, it is the largest part of it that is as near to a
    square as the others.
    """
    numbers = draws.random(TRIES, 4)
    return [
        resized(picture[:, top : top + height, left : left + width], size, size)
        for picture, drawn in zip(pictures, numbers, strict=True)
        for top, left, height, width in [_box(picture, drawn, smallest)]
    ]


def _box(picture: Tensor, drawn: Array, smallest: float) -> tuple[int, int, int, int]:
    full_height, full_width = picture.shape[1:]
    low, high = (math.log(proportion) for proportion in PROPORTIONS)
    for area_drawn, proportion_drawn, y, x in drawn.tolist():
        area = (smallest + (1 - smallest) * area_drawn) * full_height * full_width
        proportion = math.exp(low + (high - low) * proportion_drawn)  # of width to height
        width, height = round(math.sqrt(area * proportion)), round(math.sqrt(area / proportion))
        if 0 < width <= full_width and 0 < height <= full_height:
            return _place(y, full_height, height), _place(x, full_width, width), height, width
    height = min(full_height, round(full_width / PROPORTIONS[0]))
    width = min(full_width, round(full_height * PROPORTIONS[1]))
    return (full_height - height) // 2, (full_width - width) // 2, height, width


def _place(drawn: float, full: int, part: int) -> int:
    return int(drawn * (full - part + 1))


def shifted(pixels: Tensor, padding: int, draws: Draws) -> Tensor:
    """Shift each picture by up to `padding` pixels both ways; what comes in is black."""
    offsets = torch.from_numpy(draws.integers(0, 2 * padding + 1, 2))
    count, channels, height, width = pixels.shape
    padded = F.pad(pixels, (padding,) * 4)
    rows = (offsets[:, :1] + torch.arange(height)).view(count, 1, height, 1)
    columns = (offsets[:, 1:] + torch.arange(width)).view(count, 1, 1, width)
    each = torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1)
    return padded[(*each, rows, columns)]


def flipped(pixels: Tensor, draws: Draws) -> Tensor:
    """Mirror every other picture, left to right."""
    turned = torch.from_numpy(draws.random() < 0.5).view(-1, 1, 1, 1)
    return torch.where(turned, pixels.flip(3), pixels)


def erased(pixels: Tensor, probability: float, draws: Draws) -> Tensor:
    """Put noise in place of a rectangle of some pictures, which are normalised already."""
    numbers = draws.random(TRIES, 4)
    chosen = draws.random() < probability
    seeds = draws.integers(0, 2**62)
    pixels = pixels.clone()
    for row in np.flatnonzero(chosen).tolist():
        top, left, height, width = _hole(pixels[row], numbers[row])
        # a mini-batch's worth of noise would be drawn on every rank; a seed each costs nothing
        generator = torch.Generator().manual_seed(int(seeds[row]))
        noise = torch.randn(len(pixels[row]), height, width, generator=generator)
        pixels[row, :, top : top + height, left : left + width] = noise
    return pixels


def _hole(picture: Tensor, drawn: Array) -> tuple[int, int, int, int]:
    full_height, full_width = picture.shape[1:]
    least, most = ERASED_AREA
    low, high = (math.log(proportion) for proportion in ERASED_PROPORTIONS)
    for area_drawn, proportion_drawn, y, x in drawn.tolist():
        area = (least + (most - least) * area_drawn) * full_height * full_width
        proportion = math.exp(low + (high - low) * proportion_drawn)
        height, width = round(math.sqrt(area * proportion)), round(math.sqrt(area / proportion))
        if height < full_height and width < full_width:
            return _place(y, full_height, height), _place(x, full_width, width), height, width
    return 0, 0, 0, 0


def mixed(pixels: Tensor, labels: Tensor, mixup: float, cutmix: float, draws: Draws) -> Mixed:
    """Mix neighbours: as a weighted mean (mixup), or with a rectangle of the partner (cutmix).

    Args:
        pixels: The pictures.
        labels: Theirs.
        mixup: Shares are drawn from the beta distribution with this parameter twice; 0: no mixup.
        cutmix: The same for rectangles. If both are given, each picture has an even chance.
        draws: Where random numbers come from.
    """
    cut = draws.random() < (0.5 if mixup and cutmix else float(cutmix > 0))
    blend = draws.beta(mixup, mixup) if mixup else np.ones(len(pixels))
    area = draws.beta(cutmix, cutmix) if cutmix else np.ones(len(pixels))
    partner = torch.arange(len(pixels)) ^ 1
    if len(pixels) % 2:
        partner[-1] = len(pixels) - 1  # the last of an odd number has nobody but itself
    windows = _windows(pixels.shape[2:], 1 - area, draws.random(2))
    windows = windows & torch.from_numpy(cut).view(-1, 1, 1)
    kept = torch.from_numpy(np.where(cut, 1.0, blend)).to(pixels.dtype).view(-1, 1, 1, 1)
    own = torch.where(windows[:, None], torch.zeros(()), kept)
    return Mixed(
        own * pixels + (1 - own) * pixels[partner],
        labels,
        labels[partner],
        own.mean((1, 2, 3)),  # a window at the edge is smaller than it was drawn
    )


def _windows(shape: Sequence[int], areas: Array, centres: Array) -> Tensor:
    """Return where rectangles of the pictures' proportion are, with what lies beyond cut off."""
    inside = []
    for side, centre in zip(shape, centres.T, strict=True):
        length = torch.from_numpy((np.sqrt(areas) * side).astype(np.int64))
        first = torch.from_numpy((centre * side).astype(np.int64)) - length // 2
        places = torch.arange(side)
        inside.append((places >= first[:, None]) & (places < (first + length)[:, None]))
    return inside[0][:, :, None] & inside[1][:, None, :]
