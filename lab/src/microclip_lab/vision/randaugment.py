"""RandAugment: two changes per picture, of fifteen kinds, about as strong as one number says.

The kinds and their strengths are those DeiT was trained with (timm's rand-m9-mstd0.5-inc1), here on
tensors with pixels from 0 to 1. Nothing is computed across pictures, so that a picture comes out
the same in whichever company.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from microclip_lab.training.batch_rng import BatchRng

CHANGES = 2  # per picture
PROBABILITY = 0.5  # that a change is made
SPREAD = 0.5  # standard deviation of the magnitude
MOST = 10.0  # the highest magnitude
GREY = 0.299, 0.587, 0.114  # brightness of red, green and blue

# pictures, strength of each from 0 to 1, its direction, 1 or -1, and the colour of what comes in
Change = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def rand_augmented(pixels: Tensor, magnitude: float, fill: Tensor, rng: BatchRng) -> Tensor:
    """Augment images at random.

    Args:
        pixels: Pictures x channels x height x width, from 0 to 1.
        magnitude: How much, up to 10.
        fill: The colour of what comes in from outside, one number per channel.
        rng: Source of random numbers.
    """
    changed = pixels.clone()
    for _ in range(CHANGES):
        kinds = torch.from_numpy(rng.integers(0, len(KINDS)))
        made = torch.from_numpy(rng.random() < PROBABILITY)
        drawn = torch.from_numpy(magnitude + SPREAD * rng.normal()).clamp(0, MOST)
        strengths = (drawn / MOST).to(pixels.dtype)
        directions = torch.from_numpy(rng.random() < 0.5).to(pixels.dtype) * 2 - 1
        for number, change in enumerate(KINDS.values()):
            rows = (made & (kinds == number)).nonzero()[:, 0]
            if len(rows):
                found = change(changed[rows], strengths[rows], directions[rows], fill)
                changed[rows] = found.clamp(0, 1)
    return changed


def auto_contrast(pixels: Tensor, strength: Tensor, direction: Tensor, fill: Tensor) -> Tensor:
    """Stretch each channel to 0 to 1; constant channels stay unchanged."""
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    flat = low == high
    return torch.where(flat, pixels, (pixels - low) / torch.where(flat, 1, high - low))


def equalize(pixels: Tensor, strength: Tensor, direction: Tensor, fill: Tensor) -> Tensor:
    """Spread the values of each channel evenly, as far as equal pixels stay equal."""
    values = (pixels * 255).round().long().flatten(2)
    counts = torch.zeros(*values.shape[:2], 256, dtype=torch.long)
    counts.scatter_add_(2, values, torch.ones_like(values))
    last = counts.gather(2, values.amax(2, keepdim=True))
    step = (values.shape[2] - last) // 255  # pixels per value, as Pillow counts
    before = counts.cumsum(2) - counts
    table = ((before + step // 2) // step.clamp(min=1)).clamp(max=255)
    spread = table.gather(2, values).view(pixels.shape).to(pixels.dtype) / 255
    return torch.where(step[..., None] == 0, pixels, spread)


def invert(pixels: Tensor, strength: Tensor, direction: Tensor, fill: Tensor) -> Tensor:
    """Invert pixels."""
    return 1 - pixels


def posterize(pixels: Tensor, strength: Tensor, direction: Tensor, fill: Tensor) -> Tensor:
    """Keep the leading bits of each value: four or fewer, by strength."""
    bits = 4 - (4 * strength).floor()
    width = (2 ** (8 - bits)).view(-1, 1, 1, 1)
    return ((pixels * 255).round() / width).floor() * width / 255


def solarize(pixels: Tensor, strength: Tensor, direction: Tensor, fill: Tensor) -> Tensor:
    """Invert bright pixels."""
    return torch.where(pixels >= 1 - _each(strength), 1 - pixels, pixels)


def solarize_add(pixels: Tensor, strength: Tensor, direction: Tensor, fill: Tensor) -> Tensor:
    """Brighten dark pixels."""
    return torch.where(pixels < 128 / 255, pixels + _each(strength) * 110 / 255, pixels)


def colour(pixels: Tensor, strength: Tensor, direction: Tensor, fill: Tensor) -> Tensor:
    """Make colours stronger or weaker."""
    return _away_from(_grey(pixels), pixels, strength, direction)


def contrast(pixels: Tensor, strength: Tensor, direction: Tensor, fill: Tensor) -> Tensor:
    """Move values away from their mean, or towards it."""
    return _away_from(_grey(pixels).mean((2, 3), keepdim=True), pixels, strength, direction)


def brightness(pixels: Tensor, strength: Tensor, direction: Tensor, fill: Tensor) -> Tensor:
    """Change the brightness."""
    return _away_from(torch.zeros_like(pixels), pixels, strength, direction)


def sharpness(pixels: Tensor, strength: Tensor, direction: Tensor, fill: Tensor) -> Tensor:
    """Move values away from those around them, or towards them; the rim stays."""
    height, width = pixels.shape[2:]
    smooth = pixels.clone()
    if min(height, width) > 2:
        around = sum(
            pixels[:, :, row : row + height - 2, column : column + width - 2]
            for row in range(3)
            for column in range(3)
        )
        inner = pixels[:, :, 1:-1, 1:-1]
        smooth[:, :, 1:-1, 1:-1] = (around + 4 * inner) / 13
    return _away_from(smooth, pixels, strength, direction)


def rotate(pixels: Tensor, strength: Tensor, direction: Tensor, fill: Tensor) -> Tensor:
    """Rotate by up to 30 degrees."""
    angle = torch.deg2rad(30 * strength * direction)
    cos, sin = angle.cos(), angle.sin()
    return _moved(pixels, fill, xx=cos, xy=-sin, yx=sin, yy=cos)


def shear_x(pixels: Tensor, strength: Tensor, direction: Tensor, fill: Tensor) -> Tensor:
    """Shift lower rows further than upper ones."""
    return _moved(pixels, fill, xy=0.3 * strength * direction)


def shear_y(pixels: Tensor, strength: Tensor, direction: Tensor, fill: Tensor) -> Tensor:
    """Shift right columns further than left ones."""
    return _moved(pixels, fill, yx=0.3 * strength * direction)


def translate_x(pixels: Tensor, strength: Tensor, direction: Tensor, fill: Tensor) -> Tensor:
    """Shift horizontally by up to 45 % of the width."""
    return _moved(pixels, fill, x=0.45 * strength * direction * pixels.shape[3])


def translate_y(pixels: Tensor, strength: Tensor, direction: Tensor, fill: Tensor) -> Tensor:
    """Shift vertically by up to 45 % of the height."""
    return _moved(pixels, fill, y=0.45 * strength * direction * pixels.shape[2])


KINDS: dict[str, Change] = {
    change.__name__: change
    for change in (
        *(auto_contrast, equalize, invert, rotate, posterize, solarize, solarize_add, colour),
        *(contrast, brightness, sharpness, shear_x, shear_y, translate_x, translate_y),
    )
}


def _each(numbers: Tensor) -> Tensor:
    """Broadcast one number per image over its pixels."""
    return numbers.view(-1, 1, 1, 1)


def _grey(pixels: Tensor) -> Tensor:
    if pixels.shape[1] != 3:
        return pixels.mean(1, keepdim=True)
    red, green, blue = (pixels[:, i : i + 1] * share for i, share in enumerate(GREY))
    return red + green + blue


def _away_from(base: Tensor, pixels: Tensor, strength: Tensor, direction: Tensor) -> Tensor:
    factor = _each((1 + 0.9 * strength * direction).clamp(min=0.1))
    return base + factor * (pixels - base)


def _moved(
    pixels: Tensor,
    fill: Tensor,
    *,
    xx: Tensor | float = 1.0,
    xy: Tensor | float = 0.0,
    yx: Tensor | float = 0.0,
    yy: Tensor | float = 1.0,
    x: Tensor | float = 0.0,
    y: Tensor | float = 0.0,
) -> Tensor:
    """Apply an affine map around the center, in pixels."""
    count, _, height, width = pixels.shape
    rows = (torch.arange(height) - (height - 1) / 2).view(1, -1, 1)
    columns = (torch.arange(width) - (width - 1) / 2).view(1, 1, -1)
    a, b, c, d, e, f = (
        torch.as_tensor(n).expand(count).view(-1, 1, 1) for n in (xx, xy, yx, yy, x, y)
    )
    from_columns = (a * columns + b * rows + e) * 2 / width
    from_rows = (c * columns + d * rows + f) * 2 / height
    grid = torch.stack([from_columns, from_rows], 3).to(pixels.dtype)
    # pixels from outside are 0: replace them by the fill color
    colour = fill.to(pixels.dtype).view(1, -1, 1, 1)
    return F.grid_sample(pixels - colour, grid, mode="bilinear", align_corners=False) + colour
