"""How unequal gradients are: two figures of a Gram matrix that need no knowledge of bad examples.

Few examples that hold most of the gradient energy, or a micro-batch norm far below the others, are
what clipping acts on. Whether that helps is up to `forecast`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from microclip.probing.forecast import SMALLEST, TOP_TENTH

DRAWN = 64  # mini-batches drawn for the micro-batch norms
TINY = 1e-300
SIZE = 4  # the b of the forecast


def top_tenth_share(squares: Tensor) -> float:
    """Return the share of the gradient energy that the top tenth of the examples holds.

    >>> top_tenth_share(torch.tensor([9.0] + 9 * [1.0]))  # one of ten examples has 9 of 18
    0.5
    """
    energy = squares.double().clamp_min(0).sort(descending=True).values
    tenth = max(1, len(energy) // 10)
    return float(energy[:tenth].sum() / energy.sum().clamp_min(TINY))


def smallest_over_mean(matrix: Tensor, batch_size: int, b: int, draw: torch.Generator) -> float:
    """Return the smallest over the mean micro-batch norm, averaged over drawn mini-batches.

    Args:
        matrix: The Gram matrix.
        batch_size: Examples of a mini-batch; those beyond a multiple of b are left out.
        b: Examples of a micro-batch.
        draw: Draws the mini-batches.
    """
    ratios = []
    for _ in range(DRAWN):
        rows = torch.randperm(len(matrix), generator=draw)[: batch_size // b * b].view(-1, b)
        blocks = matrix[rows[:, :, None], rows[:, None, :]]
        norms = blocks.mean((1, 2)).clamp_min(0).sqrt()
        ratios.append(float(norms.min() / norms.mean().clamp_min(TINY)))
    return sum(ratios) / len(ratios)


def inequality(matrix: Tensor, batch_size: int, seed: int = 0) -> dict[str, float]:
    """Return both figures by name; the second needs mini-batches of two micro-batches or more.

    Gradients that are all 0 have neither.
    """
    if not (matrix.diagonal() > 0).any():
        return {}
    found = {TOP_TENTH: top_tenth_share(matrix.diagonal())}
    if batch_size >= 2 * SIZE:
        draw = torch.Generator().manual_seed(seed)
        found[SMALLEST] = smallest_over_mean(matrix, batch_size, SIZE, draw)
    return found
