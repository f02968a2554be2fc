"""The streaming engine: one backward per micro-batch, one accumulator, no gradient kept.

It rests on an identity: sum_j (rho/|g_j|) g_j = rho * sum_j g_j/|g_j|. What depends on all norms
is a common factor, multiplied in at the end. Sums are kept relative to the first micro-batch
(it enters as it is, the others as multiples of its weight), so that one micro-batch alone comes
out bit for bit and no intermediate value leaves the range of the gradients themselves.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from microclip import multitensor
from microclip.engines.gradients import Gradients, set_aside, take
from microclip.engines.losses import LossFn, evaluate
from microclip.engines.tally import Tally
from microclip.microbatches import Microbatch
from microclip.rules import countable


class Stream:
    """Adds up micro-batch gradients as they come."""

    name = "stream"

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        tally: Tally,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.parameters = parameters
        self._tally = tally
        self._scaler = scaler
        self._open: dict[Hashable, _Sum] = {}
        self._closed: Gradients = [None] * len(parameters)

    def fold(self, loss_fn: LossFn, microbatches: Sequence[Microbatch], final: bool) -> None:
        """Add the gradients of these micro-batches; `final`: no others will follow."""
        with set_aside(list(self.parameters.values())):
            for index, microbatch in enumerate(microbatches):
                if final and index and microbatches[index - 1].domain != microbatch.domain:
                    self._close(microbatches[index - 1].domain)
                loss, each = evaluate(loss_fn, microbatch)
                backward(loss, self._scaler)
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
        present = [gradient for gradient in gradients if gradient is not None]
        norm = self._true_norm(present)
        self._tally.add(microbatch, norm, loss, each)
        if self._tally.policy.nonfinite != "propagate":
            _blank_if_nonfinite(present, norm)
        rule = self._tally.policy.rule
        # a rule that does not stream comes here with a single micro-batch, where any factor will do
        factor = rule.factor(countable(norm)) if rule.streams else torch.ones_like(norm)
        total = self._open.setdefault(microbatch.domain, _Sum(len(self.parameters)))
        total.add(gradients, microbatch.size * factor)

    @torch.no_grad()
    def finish(self) -> Gradients:
        """Return sum_j coefficient_j g_j."""
        divisor = self._tally.divisor()
        self._tally.leave_out()
        last = self._open.popitem()
        for domain in list(self._open):
            self._close(domain)
        gradients = last[1].tensors
        multitensor.multiply_(_present(gradients), self._multiplier(last[0]) / divisor)
        closed, self._closed = self._closed, []
        multitensor.multiply_(_present(closed), 1 / divisor)
        _add(gradients, closed, torch.ones_like(divisor))
        return gradients

    def _close(self, domain: Hashable) -> None:
        """Give a domain its common factor, now that its norms are known, and free its sum."""
        _add(self._closed, self._open.pop(domain).tensors, self._multiplier(domain))

    def _multiplier(self, domain: Hashable) -> Tensor:
        """Return weight x size of the domain's first micro-batch that counts (0: none does)."""
        shares = self._tally.judge(domain).weights * self._tally.sizes(domain)
        first = countable(self._tally.norms(domain)).isfinite().int().argmax(0, keepdim=True)
        return shares.gather(0, first).squeeze(0)

    def _true_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return |g_j| as if the loss had not been scaled."""
        if not gradients:
            device = next(iter(self.parameters.values())).device
            return torch.zeros((), device=device, dtype=multitensor.widest(device))
        norm = multitensor.norm(gradients)
        return norm if self._scaler is None else norm / scale_of(self._scaler, norm)


class _Sum:
    """sum_j (share_j / share_1) g_j over one domain, where 1 is the first that counts."""

    def __init__(self, length: int) -> None:
        self.tensors: Gradients = [None] * length
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
        _add(self.tensors, gradients, multiple)


def backward(loss: Tensor, scaler: torch.amp.GradScaler | None) -> None:
    """Differentiate, through the loss scaling if there is one."""
    scaled = loss if scaler is None else scaler.scale(loss)
    scaled.backward()  # type: ignore[no-untyped-call]


def scale_of(scaler: torch.amp.GradScaler, like: Tensor) -> Tensor:
    """Return the loss scale without reading it on the host."""
    return scaler.scale(torch.ones_like(like, dtype=torch.float32)).to(like.dtype)


def _present(gradients: Gradients) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def _add(sums: Gradients, gradients: Gradients, multiple: Tensor) -> None:
    """Add a multiple of the gradients to the sums; what had no sum yet becomes the sum."""
    held, added = [], []
    fresh = []
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        kept = sums[index]
        if kept is None:
            fresh.append(gradient.to(multitensor.accumulation_dtype(gradient)))
            sums[index] = fresh[-1]
        else:
            held.append(kept)
            added.append(gradient)
    multitensor.multiply_(fresh, multiple)
    multitensor.add_(held, added, multiple)


def _blank_if_nonfinite(gradients: list[Tensor], norm: Tensor) -> None:
    """Zero what will be left out: a weight of 0 would not do, since 0 x inf is NaN."""
    if multitensor.on_host(norm) and norm.isfinite():
        return
    for gradient in gradients:
        gradient.masked_fill_(~norm.isfinite(), 0.0)
