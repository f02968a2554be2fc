"""Random image augmentation as tensor operations. Knows nothing of files, class names or models.

All random numbers come from `BatchRng`, and every function draws the same amount whatever it does,
so that an example is augmented in the same way however a mini-batch is cut into parts. Images are
mixed in pairs, the first with the second, the third with the fourth: cut mini-batches into even
parts, so that pairs stay together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from microclip_lab.training.batch_rng import Array, BatchRng
from microclip_lab.vision.pictures import resized

TRIES = 10  # attempts to find a crop that fits
PROPORTIONS = 3 / 4, 4 / 3  # aspect ratios of random resized crops
ERASED_AREA, ERASED_PROPORTIONS = (0.02, 1 / 3), (0.3, 1 / 0.3)


@dataclass(frozen=True)
class Mixed:
    """Images that may be mixed with a partner, and both labels."""

    pixels: Tensor
    labels: Tensor
    partners: Tensor  # labels of the partners
    shares: Tensor  # share of the image itself, from 0 to 1


def resized_crops(
    pictures: Sequence[Tensor], size: int, smallest: float, rng: BatchRng
) -> list[Tensor]:
    """Return a random, nearly square crop of each image, resized; at least `smallest` of its area.

    If none of ten attempts fits, the crop is the largest one with an allowed aspect ratio.
    """
    numbers = rng.random(TRIES, 4)
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


def shifted(pixels: Tensor, padding: int, rng: BatchRng) -> Tensor:
    """Shift each image by up to `padding` pixels in both directions, filling with black."""
    offsets = torch.from_numpy(rng.integers(0, 2 * padding + 1, 2))
    count, channels, height, width = pixels.shape
    padded = F.pad(pixels, (padding,) * 4)
    rows = (offsets[:, :1] + torch.arange(height)).view(count, 1, height, 1)
    columns = (offsets[:, 1:] + torch.arange(width)).view(count, 1, 1, width)
    each = torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1)
    return padded[(*each, rows, columns)]


def flipped(pixels: Tensor, rng: BatchRng) -> Tensor:
    """Flip half of the images horizontally."""
    turned = torch.from_numpy(rng.random() < 0.5).view(-1, 1, 1, 1)
    return torch.where(turned, pixels.flip(3), pixels)


def erased(pixels: Tensor, probability: float, rng: BatchRng) -> Tensor:
    """Replace a rectangle of some images by noise; they must be normalized."""
    numbers = rng.random(TRIES, 4)
    chosen = rng.random() < probability
    seeds = rng.integers(0, 2**62)
    pixels = pixels.clone()
    for row in np.flatnonzero(chosen).tolist():
        top, left, height, width = _hole(pixels[row], numbers[row])
        # a seed per image: drawing noise for the whole mini-batch on every rank would be slow
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


def mixed(pixels: Tensor, labels: Tensor, mixup: float, cutmix: float, rng: BatchRng) -> Mixed:
    """Mix neighbors: as a weighted mean (mixup), or with a rectangle of the partner (CutMix).

    Args:
        pixels: The images.
        labels: Their labels.
        mixup: Shares are drawn from a Beta(mixup, mixup) distribution; 0 turns it off.
        cutmix: The same for rectangles. If both are given, each image gets one of them at random.
        rng: Source of random numbers.
    """
    cut = rng.random() < (0.5 if mixup and cutmix else float(cutmix > 0))
    blend = rng.beta(mixup, mixup) if mixup else np.ones(len(pixels))
    area = rng.beta(cutmix, cutmix) if cutmix else np.ones(len(pixels))
    partner = torch.arange(len(pixels)) ^ 1
    if len(pixels) % 2:
        partner[-1] = len(pixels) - 1  # the last of an odd number stays unmixed
    windows = _windows(pixels.shape[2:], 1 - area, rng.random(2))
    windows = windows & torch.from_numpy(cut).view(-1, 1, 1)
    kept = torch.from_numpy(np.where(cut, 1.0, blend)).to(pixels.dtype).view(-1, 1, 1, 1)
    own = torch.where(windows[:, None], torch.zeros(()), kept)
    return Mixed(
        own * pixels + (1 - own) * pixels[partner],
        labels,
        labels[partner],
        own.mean((1, 2, 3)),  # windows at the edge are cut off
    )


def _windows(shape: Sequence[int], areas: Array, centres: Array) -> Tensor:
    """Return masks of rectangles with the images' aspect ratio, cut off at the edges."""
    inside = []
    for side, centre in zip(shape, centres.T, strict=True):
        length = torch.from_numpy((np.sqrt(areas) * side).astype(np.int64))
        first = torch.from_numpy((centre * side).astype(np.int64)) - length // 2
        places = torch.arange(side)
        inside.append((places >= first[:, None]) & (places < (first + length)[:, None]))
    return inside[0][:, :, None] & inside[1][:, None, :]
