"""The metrics of a step that go to a logger, under the same names in every integration."""

from __future__ import annotations

import torch
from torch import Tensor

from microclip.outcome import Outcome

PREFIX = "microclip/"


def metrics(outcome: Outcome) -> dict[str, float]:
    """Return what a step did, as numbers. This synchronizes with the device: call it when you log.

    >>> import microclip
    >>> model = torch.nn.Linear(2, 1)
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> outcome = microclip.Clipper(model, 1).backward(lambda x: model(x).mean(), x)
    >>> sorted(metrics(outcome))[:3]
    ['microclip/bound', 'microclip/effective_sample_size', 'microclip/mean_weight']
    """
    if not len(outcome):
        return {}
    found: dict[str, Tensor | int] = {
        "bound": outcome.bound,
        "mean_weight": outcome.mean_weight,
        "effective_sample_size": outcome.effective_sample_size,
        "skipped": outcome.skipped.sum(),
    }
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=outcome.norms.dtype, device=outcome.norms.device)
    quantiles = torch.nanquantile(outcome.norms, levels)
    for name, value in zip(("norm_q10", "norm_q50", "norm_q90"), quantiles, strict=True):
        found[name] = value
    # how much of the micro-batches' total norm is left after clipping
    kept = (outcome.norms * outcome.weights).nansum() / outcome.norms.nansum().clamp(min=1e-300)
    found["update_kept"] = kept
    if outcome.held_back is not None:
        found["held_back"] = outcome.held_back  # examples of this rank below half their weight
    if set(outcome.domains) != {None}:
        for domain, share in outcome.weight_shares.items():
            found[f"weight_share/{domain}"] = share
    return {PREFIX + name: float(value) for name, value in found.items()}
