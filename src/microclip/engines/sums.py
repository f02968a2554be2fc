"""Adding gradients up before their weights are known.

It rests on an identity: sum_j (rho/|g_j|) g_j = rho * sum_j g_j/|g_j|. What depends on all norms
is a common factor, multiplied in at the end. Sums are kept relative to the first micro-batch
(it enters as it is, the others as multiples of its weight), so that one micro-batch alone comes
out bit for bit and no intermediate value leaves the range of the gradients themselves.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from microclip import multitensor
from microclip.engines.gradients import Gradients, add_multiple
from microclip.engines.tally import Tally
from microclip.rules import countable


class Sum:
    """sum_j (share_j / share_1) g_j over one domain, where 1 is the first that counts."""

    def __init__(self) -> None:
        self.gradients: Gradients = {}
        self._reference: Tensor | None = None

    def multiples(self, shares: Tensor) -> Tensor:
        """Return what to multiply the next gradients with, from their shares: one or a row.

        A share of NaN marks a gradient that is zero (whatever multiplies it) or not finite
        (blanked, or about to make everything NaN): the multiple may be anything.
        """
        first = _first_number(shares)
        if self._reference is not None:
            first = torch.where(self._reference.isnan(), first, self._reference)
        self._reference = first
        return torch.where(first.isnan(), 1.0, (shares / first).nan_to_num(nan=0.0))


class Sums:
    """One sum for each domain, until all its norms are known; then it joins the others'."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._open: dict[Hashable, Sum] = {}
        self._closed: Gradients = {}

    def of(self, domain: Hashable) -> Sum:
        """Return the sum of a domain."""
        return self._open.setdefault(domain, Sum())

    def shares(self, norms: Tensor, sizes: Tensor | int) -> Tensor:
        """Return size x weight of micro-batches, up to a factor that they have in common."""
        rule = self._tally.policy.rule
        # a rule that does not stream comes here with a single micro-batch, where any factor will do
        factor = rule.factor(countable(norms)) if rule.streams else torch.ones_like(norms)
        return sizes * factor

    @torch.no_grad()
    def close(self, domain: Hashable) -> None:
        """Give a domain its common factor, if all its norms are known, and free its sum."""
        if self._tally.waits:
            return
        add_multiple(self._closed, self._open.pop(domain).gradients, self._multiplier(domain))

    @torch.no_grad()
    def finish(self) -> Gradients:
        """Return sum_j coefficient_j g_j."""
        self._tally.leave_out()
        divisor = self._tally.divisor()
        domain, last = self._open.popitem()
        for other in list(self._open):
            self.close(other)
        multitensor.multiply_(list(last.gradients.values()), self._multiplier(domain) / divisor)
        # with one domain nothing is closed before the end, and one multiplication does it all
        add_multiple(last.gradients, self._closed, 1 / divisor)
        return last.gradients

    def _multiplier(self, domain: Hashable) -> Tensor:
        """Return weight x size of the domain's first micro-batch that counts (0: none does)."""
        shares = self._tally.judge(domain).weights * self._tally.sizes(domain)
        norms = countable(self._tally.norms(domain))
        first = norms.isfinite().int().argmax(0, keepdim=True)
        return shares.gather(0, first).squeeze(0)


def _first_number(values: Tensor) -> Tensor:
    """Return the first value that is not NaN, without reading any on the host."""
    if values.dim() == 0:
        return values
    return values.gather(0, (~values.isnan()).int().argmax(0, keepdim=True)).squeeze(0)
