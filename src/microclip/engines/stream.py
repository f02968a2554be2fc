"""The streaming engine: one backward pass per micro-batch, one accumulator, no stored gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microclip import multitensor
from microclip.engines.base import Engine
from microclip.engines.gradients import Gradients, add_multiple, set_aside, take, watching_hooks
from microclip.engines.losses import LossFn, OutsideParameterCheck, backward, evaluate, unscale
from microclip.engines.sums import Sums
from microclip.microbatches import Microbatch, MicrobatchList


class Stream(Engine):
    """Adds up the gradients of micro-batches as they come."""

    name = "stream"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sums = Sums(self.record)

    def fold(self, loss_fn: LossFn, microbatches: MicrobatchList, final: bool) -> None:
        """Add the gradients of these micro-batches; `final`: no others will follow."""
        outside = OutsideParameterCheck(self.parameters, self.record.step, len(microbatches), final)
        with set_aside(self.parameters), watching_hooks(self.parameters):
            for index, microbatch in enumerate(microbatches):
                if final and index and microbatches[index - 1].domain != microbatch.domain:
                    self._sums.close(microbatches[index - 1].domain)
                loss, each = evaluate(loss_fn, microbatch)
                outside.check(loss)
                if each is None:
                    self.record.on_loss(loss, microbatch.size)
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
        self.record.add(microbatch, norm, loss, each)
        if self.record.policy.nonfinite != "propagate":
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
    """Zero gradients that will be skipped: a weight of 0 is not enough, since 0 x inf is NaN."""
    if multitensor.on_host(norm) and norm.isfinite():
        return
    for gradient in gradients.values():
        gradient.masked_fill_(~norm.isfinite(), 0.0)
