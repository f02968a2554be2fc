"""The streaming engine: one backward per micro-batch, one accumulator, no gradient kept.

It rests on an identity: sum_j (rho/|g_j|) g_j = rho * sum_j g_j/|g_j|. What depends on all norms
is a common factor, multiplied in at the end. Sums are kept relative to the first micro-batch
(it enters as it is, the others as multiples of its weight), so that one micro-batch alone comes
out bit for bit and no intermediate value leaves the range of the gradients themselves.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from microclip import multitensor
from microclip.engines.base import Engine
from microclip.engines.gradients import Gradients, add_multiple, set_aside, take
from microclip.engines.losses import LossFn, backward, evaluate, unscale
from microclip.microbatches import Cuts, Microbatch
from microclip.rules import countable


class Stream(Engine):
    """Adds up micro-batch gradients as they come."""

    name = "stream"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open: dict[Hashable, _Sum] = {}
        self._closed: Gradients = {}

    def fold(self, loss_fn: LossFn, microbatches: Cuts, final: bool) -> None:
        """Add the gradients of these micro-batches; `final`: no others will follow."""
        with set_aside(self.parameters):
            for index, microbatch in enumerate(microbatches):
                if final and index and microbatches[index - 1].domain != microbatch.domain:
                    self._close(microbatches[index - 1].domain)
                loss, each = evaluate(loss_fn, microbatch)
                backward(loss, self.scaler)
                self.add(take(self.parameters), microbatch, loss.detach(), each)

    @torch.no_grad()
    def add(
        self,
        gradients: Gradients,
        microbatch: Microbatch,
        loss: Tensor | None = None,
        each: Tensor | None = None,
    ) -> None:
        """Add one micro-batch's gradients, which the engine may overwrite from now on."""
        norm = multitensor.norm(list(gradients.values()), self.device)
        norm = unscale(norm, self.scaler)
        self.tally.add(microbatch, norm, loss, each)
        policy = self.tally.policy
        if policy.nonfinite != "propagate":
            _blank_if_nonfinite(gradients, norm)
        # a rule that does not stream comes here with a single micro-batch, where any factor will do
        streams = policy.rule.streams
        factor = policy.rule.factor(countable(norm)) if streams else torch.ones_like(norm)
        self._open.setdefault(microbatch.domain, _Sum()).add(gradients, microbatch.size * factor)

    @torch.no_grad()
    def finish(self) -> Gradients:
        """Return sum_j coefficient_j g_j."""
        self.tally.leave_out()
        divisor = self.tally.divisor()
        domain, last = self._open.popitem()
        for other in list(self._open):
            self._close(other)
        multitensor.multiply_(list(last.gradients.values()), self._multiplier(domain) / divisor)
        # with one domain nothing is closed before the end, and one multiplication does it all
        add_multiple(last.gradients, self._closed, 1 / divisor)
        return last.gradients

    @torch.no_grad()
    def _close(self, domain: Hashable) -> None:
        """Give a domain its common factor, now that its norms are known, and free its sum."""
        add_multiple(self._closed, self._open.pop(domain).gradients, self._multiplier(domain))

    def _multiplier(self, domain: Hashable) -> Tensor:
        """Return weight x size of the domain's first micro-batch that counts (0: none does)."""
        shares = self.tally.judge(domain).weights * self.tally.sizes(domain)
        first = countable(self.tally.norms(domain)).isfinite().int().argmax(0, keepdim=True)
        return shares.gather(0, first).squeeze(0)


class _Sum:
    """sum_j (share_j / share_1) g_j over one domain, where 1 is the first that counts."""

    def __init__(self) -> None:
        self.gradients: Gradients = {}
        self._reference: Tensor | None = None

    def add(self, gradients: Gradients, share: Tensor) -> None:
        # A share of NaN marks a gradient that is zero (whatever multiplies it) or not finite
        # (blanked, or about to make everything NaN): the multiple may be 0.
        if self._reference is None:
            self._reference = share
            multiple = torch.ones_like(share)
        else:
            self._reference = torch.where(self._reference.isnan(), share, self._reference)
            multiple = (share / self._reference).nan_to_num(nan=0.0)
        add_multiple(self.gradients, gradients, multiple)


def _blank_if_nonfinite(gradients: Gradients, norm: Tensor) -> None:
    """Zero what will be left out: a weight of 0 would not do, since 0 x inf is NaN."""
    if multitensor.on_host(norm) and norm.isfinite():
        return
    for gradient in gradients.values():
        gradient.masked_fill_(~norm.isfinite(), 0.0)
