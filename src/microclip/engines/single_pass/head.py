"""The head of `microclip.losses`: its gradients come from logits that are computed again.

The gradient of the head's weight is a sum of outer products, like that of any linear layer, but one
of the factors would have B x T x V numbers. So only the inputs are kept, and the other factor is
computed again for a part of the vocabulary at a time: once for the norms, once for the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from microclip import multitensor
from microclip.engines.base import CannotFuseError
from microclip.engines.single_pass.contributions import (
    Block,
    Contribution,
    Groups,
    Materialized,
    Shares,
    empty_gradients,
    together,
)
from microclip.engines.single_pass.owners import Opaque, Owned, refuse_unowned_gradients
from microclip.engines.single_pass.recorder import Recorder
from microclip.engines.single_pass.rows import CANCELLED, EmbeddingRows, Paired, Rows
from microclip.engines.single_pass.torch_functions import Handler, apply
from microclip.losses import ELEMENTS, Head


@dataclass(frozen=True)
class HeadRows(Paired):
    """sum_r delta_r (x) input_r, with deltas that are computed when they are needed."""

    inputs: Tensor  # (examples, n, width)
    labels: Tensor  # (examples, n)
    totals: Tensor  # (examples, n): logarithms of what the softmax divides by
    scales: Tensor  # (examples, n): what the backward pass brought; 0 for ignored labels
    weight: Tensor
    bias: Tensor | None
    head: Head

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    @property
    @override
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._kept)

    def rows_of(self, block: Block) -> HeadRows:
        """Return the rows of some micro-batches, as if each micro-batch were an example."""
        return self._with([block.rows_of(each) for each in self._kept])

    def microbatches(self, start: int, stop: int) -> HeadRows:
        """Return the rows of some micro-batches, if each is an example."""
        return self._with([each[start:stop] for each in self._kept])

    @property
    def _kept(self) -> tuple[Tensor, ...]:
        return self.inputs, self.labels, self.totals, self.scales

    def _with(self, kept: list[Tensor]) -> HeadRows:
        inputs, labels, totals, scales = kept
        return HeadRows(inputs, labels, totals, scales, self.weight, self.bias, self.head)

    def deltas(self, start: int, stop: int) -> Tensor:
        """Return (examples, n, words) for words `start` to `stop`."""
        bias = None if self.bias is None else self.bias[start:stop]
        logits = self.head.logits(self.inputs, self.weight[start:stop], bias)
        return self.head.deltas(
            logits, self.totals, self.labels, self.scales, len(self.weight), start
        )

    def entries(self, indices: Tensor) -> Tensor:
        """Return (examples, n, k): the deltas of k words of each example."""
        bias = None if self.bias is None else self.bias[indices].unsqueeze(1)
        logits = self.head.logits(self.inputs, self.weight[indices], bias)
        hits = (self.labels.unsqueeze(2) == indices.unsqueeze(1)).byte()
        words = len(self.weight)
        return self.head.deltas(logits, self.totals, self.labels, self.scales, words, hits=hits)

    def parts(self, per_word: int) -> Iterator[tuple[int, int]]:
        """Yield parts of the vocabulary that need so many numbers for each word."""
        words = len(self.weight)
        step = max(1, ELEMENTS // max(1, per_word))
        return ((start, min(start + step, words)) for start in range(0, words, step))

    @property
    def rows(self) -> int:
        """Return the number of all rows."""
        return self.inputs.shape[0] * self.inputs.shape[1]

    @override
    def squared_norms(self, groups: Groups) -> Tensor:
        return together([self.rows_of(block)._squares() for block in groups])

    def _squares(self) -> Tensor:
        """Return the squared norms, a few examples at a time."""
        count, n, width = self.inputs.shape
        pairs = n <= width
        step = max(1, ELEMENTS // max(1, n * n)) if pairs else count
        found = []
        for start in range(0, count, step):
            some = self.microbatches(start, start + step)
            found.append(some._by_pairs() if pairs else some._by_words())
        return together(found)

    def _by_pairs(self) -> Tensor:
        """Return sum_rs (delta_r . delta_s)(input_r . input_s)."""
        inputs = multitensor.widened(self.inputs)
        both: Tensor | None = None
        for part in self.parts(self.rows):
            deltas = self.deltas(*part)
            product = torch.bmm(deltas, deltas.mT)
            both = product if both is None else both.add_(product)
        assert both is not None
        both.mul_(torch.bmm(inputs, inputs.mT))
        squares, own = both.sum((1, 2)), both.diagonal(dim1=1, dim2=2).sum(1)
        return squares.masked_fill(squares < CANCELLED * own, torch.nan)

    def _by_words(self) -> Tensor:
        """Return the squared norms of the gradients, some words at a time."""
        count, _, width = self.inputs.shape
        inputs = multitensor.widened(self.inputs)
        total: Tensor | None = None
        for part in self.parts(self.rows + count * width):
            squares = multitensor.squared_norms(torch.bmm(self.deltas(*part).mT, inputs))
            total = squares if total is None else total + squares
        assert total is not None
        return total

    @override
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        each = shares.as_(self.scales.dtype).of_examples.unsqueeze(1)
        shared = replace(self, scales=self.scales * each)
        inputs = multitensor.widened(self.inputs).flatten(0, 1)
        if total is None:
            total = inputs.new_zeros(self.shape)
        for start, stop in self.parts(self.rows):
            deltas = shared.deltas(start, stop).flatten(0, 1)
            total[start:stop].addmm_(deltas.mT, inputs)
        return total

    @override
    def materialize(self, groups: Groups) -> Tensor:
        out = empty_gradients(groups, self.shape, self.inputs)
        for block in groups:
            rows, here = self.rows_of(block), block.microbatches_of(out)
            inputs = multitensor.widened(rows.inputs)
            for start, stop in rows.parts(rows.rows):
                here[:, start:stop] = torch.bmm(rows.deltas(start, stop).mT, inputs)
        return out

    @override
    def gradient_of(self, groups: Groups, microbatch: int) -> Tensor:
        here = groups.examples_of(microbatch)
        some = self.microbatches(here.start, here.stop)
        return some.materialize(Groups([here.stop - here.start]))[0]

    @override
    def nonzero(self, groups: Groups) -> Tensor:
        return groups.sum(self.scales.any(1).int()) > 0

    @override
    def without(self, left_out: Shares) -> HeadRows:
        rows = left_out.of_examples.unsqueeze(1)
        inputs = self.inputs.masked_fill(rows.unsqueeze(2), 0.0)
        totals, scales = (each.masked_fill(rows, 0.0) for each in (self.totals, self.scales))
        return replace(self, inputs=inputs, totals=totals, scales=scales)

    @override
    def kept(self, groups: Groups) -> HeadRows:
        return replace(self, inputs=self.inputs.contiguous())

    @override
    def columns(
        self, groups: Groups, start: int, stop: int, table_rows: Tensor | None = None
    ) -> Tensor:
        found = []
        for block in groups:
            rows = self.rows_of(block)
            inputs = multitensor.widened(rows.inputs)
            found.append(torch.bmm(rows.deltas(start, stop).mT, inputs).flatten(1))
        return together(found)

    @override
    def inner_products(self, other: Rows | EmbeddingRows | Paired, groups: Groups) -> Tensor:
        found = []
        for block in groups:
            mine = self.rows_of(block)
            inputs = multitensor.widened(mine.inputs)
            if isinstance(other, EmbeddingRows):
                lefts = mine.entries(block.rows_of(other.indices))
                rights = multitensor.widened(block.rows_of(other.deltas))
            else:
                lefts, rights = mine._paired(other, block)
            found.append((lefts * torch.bmm(inputs, rights.mT)).sum((1, 2)))
        return together(found)

    def _paired(self, other: Rows | Paired, block: Block) -> tuple[Tensor, Tensor]:
        """Return the products of all pairs of deltas, and the inputs of the other."""
        head = other.rows_of(block) if isinstance(other, HeadRows) else None
        lefts: Tensor | None = None
        for start, stop in self.parts(self.rows):
            if head is not None:
                theirs = head.deltas(start, stop)
            else:
                assert isinstance(other, Rows)
                theirs = multitensor.widened(block.rows_of(other.left)[:, :, start:stop])
            product = torch.bmm(self.deltas(start, stop), theirs.mT)
            lefts = product if lefts is None else lefts.add_(product)
        assert lefts is not None
        if head is not None:
            return lefts, multitensor.widened(head.inputs)
        assert isinstance(other, Rows)
        return lefts, multitensor.widened(block.rows_of(other.right))

    def bias_gradients(self, groups: Groups) -> Contribution:
        """Return the gradients of the bias."""
        out = empty_gradients(groups, self.shape[:1], self.inputs)
        for block in groups:
            rows, here = self.rows_of(block), block.microbatches_of(out)
            for start, stop in rows.parts(rows.rows):
                here[:, start:stop] = rows.deltas(start, stop).sum(1)
        return Materialized(out)


class _RecordedLosses(torch.autograd.Function):
    """Like the losses themselves, without gradients of the head."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        head: Head,
        note: Handler,
    ) -> Tensor:
        dtype = head.product_dtype(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            h, w = hidden.to(dtype), weight.to(dtype)
            b = None if bias is None else bias.to(dtype)
            losses, totals, slope = head.forward(h, w, b, labels, ctx.needs_input_grad[1])
        ctx.save_for_backward(h, w, b, labels, totals, slope)
        ctx.note, ctx.dtype = note, hidden.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        hidden, weight, bias, labels, totals, slope = ctx.saved_tensors
        ctx.note(hidden, weight, bias, labels, totals, d)
        by_hidden = None if slope is None else slope.mul(d.unsqueeze(1)).to(ctx.dtype)
        return None, by_hidden, None, None, None, None, None


def token_losses(
    recorder: Recorder,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """microclip.losses.token_losses, of a head that is trained."""
    head = Head(**options)
    head.check(hidden, weight, labels, bias)
    w, b = recorder.name(weight), recorder.name(bias)
    if recorder.is_recorded(hidden) or recorder.any_depends([weight, bias]):
        raise CannotFuseError(
            "The single-pass engine cannot follow a chunked cross-entropy whose head depends on "
            f"the examples, or whose inputs do not, with parameter {w or b!r}."
        )
    state = recorder.owned(hidden, w or b)
    of_labels = recorder.state(labels)
    if isinstance(of_labels, Opaque) or not _match(state, of_labels, hidden):
        raise CannotFuseError(
            "The single-pass engine cannot tell whether the labels of a chunked cross-entropy "
            f"belong to the examples that parameter {w or b!r} meets."
        )
    recorder.expect(w, b)
    shape = labels.shape

    def note(
        h: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, totals: Tensor, d: Tensor
    ) -> None:
        scales = (d * (labels != head.ignore_index)).to(totals.dtype).view(shape)
        refuse_unowned_gradients(scales, state.axis, state.owners, w or b)

        def rows(tensor: Tensor) -> Tensor:
            return recorder.rows(tensor.view(*shape, 1), state).squeeze(-1)

        inputs = recorder.rows(h.view(*shape, h.shape[-1]), state)
        numbers = rows(labels), rows(totals), rows(scales)
        found = HeadRows(inputs, *numbers, weight, bias, head)
        if b is not None:
            recorder.on_contribution(b, found.bias_gradients(recorder.groups))
        if w is not None:
            recorder.on_contribution(w, found)

    with recorder.untracked():
        losses = apply(
            _RecordedLosses,
            recorder.anchor,
            hidden.reshape(-1, hidden.shape[-1]),
            weight.detach(),
            None if bias is None else bias.detach(),
            labels.reshape(-1),
            head,
            recorder.final_only(note),
        ).view(shape)
    return recorder.own(losses, state)


def _match(state: Owned, labels: Any, hidden: Tensor) -> bool:
    """Whether rows and labels have the same owners; labels that are constant belong to anyone."""
    if state.axis is None or state.axis == hidden.dim() - 1:
        return False
    if labels is None:
        return True
    if not isinstance(labels, Owned) or labels.axis != state.axis:
        return False
    return state.owners.joined(labels.owners) is not None
