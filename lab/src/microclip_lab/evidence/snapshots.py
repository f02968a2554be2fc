"""What gradients look like at a point of training: one Gram matrix of a random sample of examples.

From it come figures that need no knowledge of the draggers (how concentrated the energy is, the
smallest over the mean micro-batch norm) and, where draggers are known, their share of the energy,
their length and their cosines.
"""

from __future__ import annotations

import torch
from torch import Tensor

from microclip.probing import gram_of, smallest_over_mean, top_tenth_share
from microclip_lab.dirty_data.training import Setup

SAMPLE = 256  # examples
SIZES = (1, 4, 16)


def snapshot(setup: Setup) -> dict[str, float]:
    """Return the figures at this point; the model and its gradients are left as they were."""
    draw = torch.Generator().manual_seed(setup.seed + 70_000)
    part = setup.data.training
    rows = torch.randperm(len(part), generator=draw)[:SAMPLE]
    batch = (part.inputs[rows], part.targets[rows])
    matrix = gram_of(setup.model, setup.losses, [batch]).matrix
    size = min(setup.task.batch_size, len(rows))
    return {
        **_concentration(matrix),
        **_microbatches(matrix, size, draw),
        **_draggers(matrix, setup.data.wrong[rows]),
    }


def _concentration(matrix: Tensor) -> dict[str, float]:
    energy = matrix.diagonal().clamp_min(0).sort(descending=True).values
    return {
        "top_decile": top_tenth_share(matrix.diagonal()),
        "median_over_mean": float(energy.sqrt().median() / energy.sqrt().mean().clamp_min(1e-300)),
        # |mean gradient|^2 over the mean energy: how far examples agree
        "agreement": float(matrix.mean() / energy.mean().clamp_min(1e-300)),
    }


def _microbatches(matrix: Tensor, batch_size: int, draw: torch.Generator) -> dict[str, float]:
    """Return the smallest over the mean micro-batch norm, averaged over drawn mini-batches."""
    return {
        f"min_over_mean_{b}": smallest_over_mean(matrix, batch_size, b, draw)
        for b in SIZES
        if b < batch_size
    }


def _draggers(matrix: Tensor, wrong: Tensor) -> dict[str, float]:
    if not 2 <= int(wrong.sum()) <= len(wrong) - 2:
        return {}
    norms = matrix.diagonal().clamp_min(0).sqrt()
    cosines = matrix / (norms[:, None] * norms[None, :]).clamp_min(1e-300)
    right = ~wrong
    among = cosines[right][:, right]
    pairs = len(among) * (len(among) - 1)
    return {
        "share": float(norms[wrong].square().sum() / norms.square().sum().clamp_min(1e-300)),
        "ratio": float(norms[wrong].mean() / norms[right].mean().clamp_min(1e-300)),
        "cosine_dragger_benign": float(cosines[wrong][:, right].mean()),
        "cosine_benign_benign": float((among.sum() - among.diagonal().sum()) / pairs),
    }
