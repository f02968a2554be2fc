"""The streaming engine: one backward pass per micro-batch, one accumulator, no stored gradients.

`Sums` adds gradients up before their weights are known. It relies on an identity:
sum_j (rho/|g_j|) g_j = rho * sum_j g_j/|g_j|. What depends on all norms is a common factor,
multiplied in at the end. Sums are kept relative to a reference, the first micro-batch whose factor
is not 0 (it enters unscaled, the others as multiples of its weight), so that a single micro-batch
comes out bit for bit and no intermediate value leaves the range of the gradients. A reference near
the ends of that range is scaled by a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from microclip import multitensor
from microclip.engines.base import Engine
from microclip.engines.gradients import (
    Gradients,
    LossFn,
    OutsideParameterCheck,
    add_multiple,
    backward,
    evaluate,
    set_aside,
    take,
    unscale,
    watching_hooks,
)
from microclip.engines.step_record import StepRecord
from microclip.microbatches import Microbatch, MicrobatchList
from microclip.rules import check_agreement, countable, factors

ORDINARY = (1e-20, 1e20)  # norms whose sums neither overflow nor lose digits


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
        multiple = sum_.multiples(self._sums.shares(norm, microbatch.effective_size), norm)
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


class Sum:
    """sum_j (share_j / share_1) g_j over one domain, where 1 is the reference."""

    def __init__(self) -> None:
        self.gradients: Gradients = {}
        self._reference: Tensor | None = None  # its share; NaN or None: there is none yet
        self.scale = 1.0  # the factor of the reference

    def multiples(self, shares: Tensor, norms: Tensor) -> Tensor:
        """Return the factors of the next gradients, from their shares: a scalar or a vector.

        A share of NaN marks a gradient that is zero (any factor will do) or not finite (blanked,
        or about to make everything NaN): the factor may be anything but 0. Before there is a
        reference, shares are NaN or 0.
        """
        if shares.dim() == 0 and multitensor.on_host(shares):
            return self._multiple(shares, norms)
        first = _reference_among(shares)
        if self._reference is not None:
            first = torch.where(self._reference.isnan(), first, self._reference)
        if self._reference is None and multitensor.on_host(shares):
            self.scale = _scale(_reference_among(torch.where(shares > 0, norms, torch.nan)).item())
        self._reference = first
        before = torch.where(shares == 0, 0.0, 1.0)
        found = torch.where(first.isnan(), before, (shares / first).nan_to_num(nan=0.0))
        return found if self.scale == 1 else found * self.scale

    def _multiple(self, share: Tensor, norm: Tensor) -> Tensor:
        """Return the factor for one share on the host, with plain numbers, which is faster."""
        value = share.item()
        if math.isnan(value):
            return (
                torch.zeros_like(share) if self._reference is not None else torch.ones_like(share)
            )
        if self._reference is None and value:
            self._reference = share
            self.scale = _scale(norm.item())
        if self._reference is None:
            return share
        return share / self._reference if self.scale == 1 else share / self._reference * self.scale


class Sums:
    """One sum per domain until all its norms are known; then it is added to the others."""

    def __init__(self, record: StepRecord) -> None:
        self._record = record
        self._streams = record.policy.rule.streams
        self._open: dict[Hashable, Sum] = {}
        self._closed: Gradients = {}

    def of(self, domain: Hashable) -> Sum:
        """Return the sum of a domain."""
        return self._open.setdefault(domain, Sum())

    def shares(self, norms: Tensor, sizes: Tensor | float) -> Tensor:
        """Return size x weight of micro-batches, up to a common factor."""
        return sizes * self._factors(norms)

    def _factors(self, norms: Tensor) -> Tensor:
        if self._streams:
            return factors(self._record.policy.rule, norms)
        # a rule that does not stream gets here only with a single micro-batch: any factor will do
        return torch.where(countable(norms).isnan(), torch.nan, 1.0)

    @torch.no_grad()
    def close(self, domain: Hashable) -> None:
        """Apply the common factor of a domain, if all its norms are known, and free its sum."""
        if self._record.waits:
            return
        multiplier = self._multiplier(domain)
        self._note_norm(domain, multiplier)
        add_multiple(self._closed, self._open.pop(domain).gradients, multiplier)

    @torch.no_grad()
    def finish(self) -> Gradients:
        """Return sum_j coefficient_j g_j."""
        self._record.leave_out()
        divisor = self._record.divisor()
        domain, last = next(reversed(self._open.items()))
        multiplier = self._multiplier(domain)
        self._note_norm(domain, multiplier)
        del self._open[domain]
        for other in list(self._open):
            self.close(other)
        multitensor.multiply_(list(last.gradients.values()), multiplier / divisor)
        # with one domain nothing was closed before, and one multiplication is all there is
        add_multiple(last.gradients, self._closed, 1 / divisor)
        return last.gradients

    def _note_norm(self, domain: Hashable, multiplier: Tensor) -> None:
        """Note the norm of a domain's sum, if somebody wants to know."""
        gradients = list(self._open[domain].gradients.values())
        if self._record.wants_domain_norms and gradients:
            norm = multitensor.norm(gradients, gradients[0].device)
            self._record.domain_norms[domain] = norm * multiplier.to(norm)

    def _multiplier(self, domain: Hashable) -> Tensor:
        """Return weight x size of the domain's reference (0: nothing counts)."""
        weights, norms = self._record.weigh(domain).weights, self._record.norms(domain)
        sizes = self._record.sizes(domain)  # 0 if all examples of a micro-batch are held back
        if self._streams:
            check_agreement(self._record.policy.rule, countable(norms, sizes), weights)
        reference = _first(self.shares(norms, sizes))
        return (weights * sizes).gather(0, reference).squeeze(0) / self._open[domain].scale


def _scale(norm: float) -> float:
    """Return a power of two that brings a norm into the middle of the range of float32."""
    if not 0 < norm < math.inf or ORDINARY[0] < norm < ORDINARY[1]:
        return 1.0
    return 2.0 ** -round(math.log2(norm))


def _reference_among(shares: Tensor) -> Tensor:
    """Return the first share that can serve as the reference; NaN if there is none."""
    if shares.dim() == 0:
        return torch.where(shares == 0, torch.nan, shares)
    found = shares.gather(0, _first(shares)).squeeze(0)
    return torch.where(found == 0, torch.nan, found)


def _first(shares: Tensor) -> Tensor:
    """Return the index of the first share that is neither NaN nor 0, without reading any."""
    return (~shares.isnan() & (shares != 0)).int().argmax(0, keepdim=True)
