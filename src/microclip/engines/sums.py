"""Adding gradients up before their weights are known.

It rests on an identity: sum_j (rho/|g_j|) g_j = rho * sum_j g_j/|g_j|. What depends on all norms
is a common factor, multiplied in at the end. Sums are kept relative to a reference, the first
micro-batch whose factor is not 0 (it enters as it is, the others as multiples of its weight), so
that one micro-batch alone comes out bit for bit and no intermediate value leaves the range of the
gradients themselves. A reference near the ends of that range enters times a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from microclip import multitensor
from microclip.engines.gradients import Gradients, add_multiple
from microclip.engines.tally import Tally
from microclip.rules import check_agreement, countable, factors

ORDINARY = (1e-20, 1e20)  # norms whose sums neither overflow nor lose digits


class Sum:
    """sum_j (share_j / share_1) g_j over one domain, where 1 is the reference."""

    def __init__(self) -> None:
        self.gradients: Gradients = {}
        self._reference: Tensor | None = None  # its share; NaN, or None: there is none yet
        self.scale = 1.0  # what the reference enters with

    def multiples(self, shares: Tensor, norms: Tensor) -> Tensor:
        """Return what to multiply the next gradients with, from their shares: one or a row.

        A share of NaN marks a gradient that is zero (whatever multiplies it) or not finite
        (blanked, or about to make everything NaN): the multiple may be anything but 0. Before there
        is a reference, shares are NaN or 0.
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
        """Return the multiple for one share on the host: the same by numbers, which is faster."""
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
    """One sum for each domain, until all its norms are known; then it joins the others'."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._streams = tally.policy.rule.streams
        self._open: dict[Hashable, Sum] = {}
        self._closed: Gradients = {}

    def of(self, domain: Hashable) -> Sum:
        """Return the sum of a domain."""
        return self._open.setdefault(domain, Sum())

    def shares(self, norms: Tensor, sizes: Tensor | int) -> Tensor:
        """Return size x weight of micro-batches, up to a factor that they have in common."""
        return sizes * self._factors(norms)

    def _factors(self, norms: Tensor) -> Tensor:
        if self._streams:
            return factors(self._tally.policy.rule, norms)
        # a rule that does not stream comes here with a single micro-batch, where any factor will do
        return torch.where(countable(norms).isnan(), torch.nan, 1.0)

    @torch.no_grad()
    def close(self, domain: Hashable) -> None:
        """Give a domain its common factor, if all its norms are known, and free its sum."""
        if self._tally.waits:
            return
        multiplier = self._multiplier(domain)
        add_multiple(self._closed, self._open.pop(domain).gradients, multiplier)

    @torch.no_grad()
    def finish(self) -> Gradients:
        """Return sum_j coefficient_j g_j."""
        self._tally.leave_out()
        divisor = self._tally.divisor()
        domain, last = next(reversed(self._open.items()))
        multiplier = self._multiplier(domain)
        del self._open[domain]
        for other in list(self._open):
            self.close(other)
        multitensor.multiply_(list(last.gradients.values()), multiplier / divisor)
        # with one domain nothing is closed before the end, and one multiplication does it all
        add_multiple(last.gradients, self._closed, 1 / divisor)
        return last.gradients

    def _multiplier(self, domain: Hashable) -> Tensor:
        """Return weight x size of the domain's reference (0: nothing counts)."""
        weights, norms = self._tally.judge(domain).weights, self._tally.norms(domain)
        if self._streams:
            check_agreement(self._tally.policy.rule, norms, weights)
        shares = weights * self._tally.sizes(domain)
        return shares.gather(0, _first(self._factors(norms))).squeeze(0) / self._open[domain].scale


def _scale(norm: float) -> float:
    """Return a power of two that brings a norm into the middle of the range of float32."""
    if not 0 < norm < math.inf or ORDINARY[0] < norm < ORDINARY[1]:
        return 1.0
    return 2.0 ** -round(math.log2(norm))


def _reference_among(shares: Tensor) -> Tensor:
    """Return the first share that others can be measured by; NaN if there is none."""
    if shares.dim() == 0:
        return torch.where(shares == 0, torch.nan, shares)
    found = shares.gather(0, _first(shares)).squeeze(0)
    return torch.where(found == 0, torch.nan, found)


def _first(shares: Tensor) -> Tensor:
    """Return the place of the first share that is neither NaN nor 0, reading none on the host."""
    return (~shares.isnan() & (shares != 0)).int().argmax(0, keepdim=True)
