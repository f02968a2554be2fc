"""Whether per-example gradients exist, and whether a single pass gives them: tried on a few."""

from __future__ import annotations

from typing import Any

import torch

from microclip import multitensor
from microclip.engines.base import CannotFuseError
from microclip.engines.losses import LossFn
from microclip.engines.randomness import RandomState
from microclip.engines.stillness import Still
from microclip.microbatches import count_examples, cut
from microclip.probing.totals import BLOCK_BYTES, Totals, in_single_passes
from microclip.probing.visit import Parameters, losses_of, one_by_one

TRIED = 3  # examples
TOLERANCE, TOLERANCE_IN_HALF = 0.01, 0.05  # of the largest inner product
MIXING = 0.02  # of the largest loss; less than that is rounding


def reason_against_single_pass(parameters: Parameters, loss_fn: LossFn, batch: Any) -> str | None:
    """Try a few examples both ways; None: a single pass gives the same, as it should.

    Dropout is held still. A loss that changes with the neighbours of its example has no
    per-example gradient at all, and is refused here.
    """
    few = cut(batch, min(TRIED, count_examples(batch)))[0]
    devices = {parameter.device for parameter in parameters.values()}
    before = RandomState.now(devices)
    apart, together = (Totals(parameters, (few.size,)) for _ in range(2))
    with Still():
        _refuse_mixing(loss_fn, few.batch, few.size, before, devices)
        try:
            in_single_passes(parameters, loss_fn, [few.batch], together, 0.0)
        except CannotFuseError as refusal:
            return str(refusal)
        finally:
            clear(parameters)
        for rows in one_by_one(parameters, loss_fn, [few.batch], BLOCK_BYTES):
            apart.add_rows(rows)
    still = RandomState.now(devices).equals(before)
    scale = apart.matrix.diagonal().max().clamp(min=torch.finfo(torch.float32).tiny)
    error = ((apart.matrix - together.matrix).abs().max() / scale).item()
    half = any(parameter.dtype in multitensor.HALF for parameter in parameters.values())
    if still and error > (TOLERANCE_IN_HALF if half else TOLERANCE):
        return f"A single pass gives inner products that are wrong by {error:.1e} of the largest."
    return None


def _refuse_mixing(
    loss_fn: LossFn, batch: Any, size: int, before: RandomState, devices: set[torch.device]
) -> None:
    """Refuse losses that depend on the other examples of the batch."""
    with torch.enable_grad():
        together = losses_of(loss_fn, batch, size).detach()
        apart = torch.cat([losses_of(loss_fn, part.batch, 1).detach() for part in cut(batch, 1)])
    if not RandomState.now(devices).equals(before):
        before.restore()
        return  # noise of the model's own, which is not the same twice
    difference = (together - apart).abs().max() / apart.abs().max().clamp(min=1e-12)
    if difference > MIXING:
        raise ValueError(
            f"The loss of an example changes with its neighbours in the batch (from "
            f"{apart.tolist()} alone to {together.tolist()} together), so it has no gradient of "
            "its own, and no micro-batch's gradient is the mean of its examples'. BatchNorm, "
            "in-batch negatives and losses normalised over the batch do this; probe without them."
        )


def clear(parameters: Parameters) -> None:
    """Drop what a pass left behind half way."""
    for parameter in parameters.values():
        parameter.grad = None
