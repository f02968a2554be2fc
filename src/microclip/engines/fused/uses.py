"""The algebra of parameter uses: micro-batch norms and weighted sums of their gradients.

A *use* is one place where a parameter took part in the forward pass, seen after the backward pass.
`Rows`: a weight that multiplies rows; the gradient is a sum of outer products left_r x right_r.
`Formed`: one gradient per micro-batch, written out; for what is small, and for long rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from microclip import multitensor
from microclip.engines.fused.groups import Groups


@dataclass(frozen=True)
class Formed:
    """The gradients of all micro-batches: (micro-batches, *shape of the parameter)."""

    gradients: Tensor

    @property
    def nbytes(self) -> int:
        """Return the memory it holds on to."""
        return self.gradients.nbytes

    def squared_norms(self, groups: Groups) -> Tensor:
        """Return the squared norm of every micro-batch's gradient."""
        return multitensor.squared_norms(self.gradients)

    def weighted(self, groups: Groups, coefficients: Tensor) -> Tensor:
        """Return sum_j coefficient_j g_j."""
        flat = self.gradients.flatten(1)
        total = coefficients.to(flat.dtype) @ flat
        return total.view(self.gradients.shape[1:])

    def form(self, groups: Groups) -> Tensor:
        """Return the gradients of all micro-batches."""
        return self.gradients

    def without(self, groups: Groups, left_out: Tensor) -> Formed:
        """Blank what will be left out: a coefficient of 0 would not do, since 0 x NaN is NaN."""
        shape = (-1, *(1,) * (self.gradients.dim() - 1))
        return Formed(self.gradients.masked_fill(left_out.view(shape), 0.0))


@dataclass(frozen=True)
class Rows:
    """sum_r left_r (x) right_r; the rows of an example are neighbours, examples in order.

    Where `left` holds whole numbers, it stands for one-hot rows: the lines of an embedding table.
    """

    left: Tensor  # (rows, p), or (rows,) of indices into p lines
    right: Tensor  # (rows, q)
    shape: tuple[int, int]  # p, q

    @property
    def nbytes(self) -> int:
        """Return the memory it holds on to."""
        return self.left.nbytes + self.right.nbytes

    @cached_property
    def one_hot(self) -> bool:
        """Whether `left` holds indices."""
        return self.left.dim() == 1

    def rows_per_example(self, groups: Groups) -> int:
        """Return how many rows each example has."""
        return self.right.shape[0] // groups.examples

    def forming_is_cheaper(self, groups: Groups) -> bool:
        """Whether to write the gradients out instead of multiplying all pairs of rows.

        Pairs take rows^2 (p + q) products more than a plain step; written-out gradients take none
        more, but p q numbers are written and read again, each worth about 64 products in time.
        """
        p, q = self.shape
        rows = max(groups.sizes) * self.rows_per_example(groups)
        return not self.one_hot and rows**2 * (p + q) >= 64 * p * q

    def squared_norms(self, groups: Groups) -> Tensor:
        """Return |sum_r left_r x right_r|^2 = sum_rs (left_r . left_s)(right_r . right_s)."""
        return self.products(self, groups)

    def products(self, other: Rows, groups: Groups) -> Tensor:
        """Return the inner product of two uses' gradients, for every micro-batch."""
        n, m = self.rows_per_example(groups), other.rows_per_example(groups)
        found = []
        for block in groups:
            lefts = _inner(_wide(block.of(self.left, n)), _wide(block.of(other.left, m)))
            rights = torch.bmm(_wide(block.of(self.right, n)), _wide(block.of(other.right, m)).mT)
            found.append((lefts * rights).sum((1, 2), dtype=multitensor.widest(rights.device)))
        return torch.cat(found)

    def weighted(self, groups: Groups, coefficients: Tensor) -> Tensor:
        """Return sum_j coefficient_j g_j: the plain weight gradient of weighted rows."""
        left, right = _wide(self.left), _wide(self.right)
        each = groups.per_example(coefficients.to(right.dtype))
        each = each.repeat_interleave(self.rows_per_example(groups)).unsqueeze(1)
        if self.one_hot:
            return right.new_zeros(self.shape).index_add_(0, left, right * each)
        if self.shape[0] < self.shape[1]:
            return (left * each).mT @ right
        return left.mT @ (right * each)

    def without(self, groups: Groups, left_out: Tensor) -> Rows:
        """Blank what will be left out, on both sides."""
        each = groups.per_example(left_out)
        each = each.repeat_interleave(self.rows_per_example(groups)).unsqueeze(1)
        left = self.left if self.one_hot else self.left.masked_fill(each, 0.0)
        return Rows(left, self.right.masked_fill(each, 0.0), self.shape)

    def form(self, groups: Groups) -> Tensor:
        """Return the gradients of all micro-batches, written out."""
        n = self.rows_per_example(groups)
        parts = []
        for block in groups:
            left, right = _wide(block.of(self.left, n)), _wide(block.of(self.right, n))
            if self.one_hot:
                part = right.new_zeros(block.count, *self.shape)
                part.scatter_add_(1, left.unsqueeze(2).expand_as(right), right)
            else:
                part = torch.bmm(left.mT, right)
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _inner(left: Tensor, other: Tensor) -> Tensor:
    """Return all inner products between two sets of left rows, one-hot (indices) or not."""
    if left.dim() == 2 and other.dim() == 2:
        return left.unsqueeze(2) == other.unsqueeze(1)
    if left.dim() == 2:  # pick the entries that the ones select
        return other.gather(2, left.unsqueeze(1).expand(-1, other.shape[1], -1)).mT
    if other.dim() == 2:
        return left.gather(2, other.unsqueeze(1).expand(-1, left.shape[1], -1))
    return torch.bmm(left, other.mT)


def _wide(tensor: Tensor) -> Tensor:
    """Return rows in a precision that products can be added up in."""
    return tensor.to(multitensor.accumulation_dtype(tensor))


Use = Rows | Formed


def squared_norms(uses: list[Use], groups: Groups) -> Tensor:
    """Return the squared norms of a parameter's gradients over all uses, with cross terms."""
    if len(uses) == 1:
        return uses[0].squared_norms(groups)
    rows = [use for use in uses if isinstance(use, Rows)]
    if len(rows) < len(uses):
        return Formed(sum_of([use.form(groups) for use in uses])).squared_norms(groups)
    total = sum_of([use.squared_norms(groups) for use in rows])
    for i, one in enumerate(rows):
        for other in rows[:i]:
            total = total + 2 * one.products(other, groups)
    return total


def sum_of(tensors: list[Tensor]) -> Tensor:
    """Add tensors up."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
