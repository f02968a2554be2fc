"""The streaming engine: one backward per micro-batch, one accumulator, no gradient kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microclip import multitensor
from microclip.engines.base import Engine
from microclip.engines.gradients import Gradients, add_multiple, set_aside, take, watching_hooks
from microclip.engines.losses import LossFn, Outsiders, backward, evaluate, unscale
from microclip.engines.sums import Sums
from microclip.microbatches import Cuts, Microbatch


class Stream(Engine):
    """Adds up micro-batch gradients as they come."""

    name = "stream"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sums = Sums(self.tally)

    def fold(self, loss_fn: LossFn, microbatches: Cuts, final: bool) -> None:
        """Add the gradients of these micro-batches; `final`: no others will follow."""
        outsiders = Outsiders(self.parameters, self.tally.step, len(microbatches), final)
        with set_aside(self.parameters), watching_hooks(self.parameters):
            for index, microbatch in enumerate(microbatches):
                if final and index and microbatches[index - 1].domain != microbatch.domain:
                    self._sums.close(microbatches[index - 1].domain)
                loss, each = evaluate(loss_fn, microbatch)
                outsiders.check(loss)
                if each is None:
                    self.tally.on_loss(loss, microbatch.size)
                backward(loss, self.scaler)
                self.add(take(self.parameters), microbatch, loss.detach(), each)

    @torch.no_grad()
    def add(
        self,
        gradients: Gradients,
        microbatch: Microbatch,
        loss: Tensor | None = None,
        each: Tensor | None = None,
        is_lent: bool = False,
    ) -> None:
        """Add one micro-batch's gradients; the engine may keep them unless they are lent."""
        norm = unscale(self.norm(gradients), self.scaler)
        self.tally.add(microbatch, norm, loss, each)
        if self.tally.policy.nonfinite != "propagate":
            _blank_if_nonfinite(gradients, norm)
        sum_ = self._sums.of(microbatch.domain)
        multiple = sum_.multiples(self._sums.shares(norm, microbatch.size), norm)
        add_multiple(sum_.gradients, gradients, multiple, keeps=not is_lent)

    def norm(self, gradients: Gradients) -> Tensor:
        """Return the norm over all parameters."""
        return multitensor.norm(list(gradients.values()), self.device)

    def finish(self) -> Gradients:
        """Return sum_j coefficient_j g_j."""
        return self._sums.finish()


def _blank_if_nonfinite(gradients: Gradients, norm: Tensor) -> None:
    """Zero what will be left out: a weight of 0 would not do, since 0 x inf is NaN."""
    if multitensor.on_host(norm) and norm.isfinite():
        return
    for gradient in gradients.values():
        gradient.masked_fill_(~norm.isfinite(), 0.0)
