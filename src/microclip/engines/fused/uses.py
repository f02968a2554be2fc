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
        """Whether the gradients themselves take less arithmetic than products of all row pairs."""
        p, q = self.shape
        rows = max(groups.sizes) * self.rows_per_example(groups)
        return not self.one_hot and rows * (p + q) >= p * q

    def squared_norms(self, groups: Groups) -> Tensor:
        """Return |sum_r left_r x right_r|^2 = sum_rs (left_r . left_s)(right_r . right_s)."""
        return self.products(self, groups)

    def products(self, other: Rows, groups: Groups) -> Tensor:
        """Return the inner product of two uses' gradients, for every micro-batch."""
        n, m = self.rows_per_example(groups), other.rows_per_example(groups)
        found = []
        for block in groups:
            lefts = _inner(block.of(self.left, n), block.of(other.left, m), self, other)
            rights = torch.bmm(block.of(self.right, n), block.of(other.right, m).mT)
            found.append((lefts * rights).sum((1, 2), dtype=multitensor.widest(rights.device)))
        return torch.cat(found)

    def weighted(self, groups: Groups, coefficients: Tensor) -> Tensor:
        """Return sum_j coefficient_j g_j: the plain weight gradient of weighted rows."""
        each = groups.per_example(coefficients.to(self.right.dtype))
        each = each.repeat_interleave(self.rows_per_example(groups)).unsqueeze(1)
        if self.one_hot:
            total = self.right.new_zeros(self.shape)
            return total.index_add_(0, self.left, self.right * each)
        if self.shape[0] < self.shape[1]:
            return (self.left * each).mT @ self.right
        return self.left.mT @ (self.right * each)

    def form(self, groups: Groups) -> Tensor:
        """Return the gradients of all micro-batches, written out."""
        n = self.rows_per_example(groups)
        parts = []
        for block in groups:
            left, right = block.of(self.left, n), block.of(self.right, n)
            if self.one_hot:
                part = right.new_zeros(block.count, *self.shape)
                part.scatter_add_(1, left.unsqueeze(2).expand_as(right), right)
            else:
                part = torch.bmm(left.mT, right)
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _inner(left: Tensor, other: Tensor, a: Rows, b: Rows) -> Tensor:
    """Return all inner products between two sets of left rows, one-hot or not."""
    if a.one_hot and b.one_hot:
        return (left.unsqueeze(2) == other.unsqueeze(1)).to(a.right.dtype)
    if a.one_hot:  # pick the entries that the ones select
        return other.gather(2, left.unsqueeze(1).expand(-1, other.shape[1], -1)).mT
    if b.one_hot:
        return left.gather(2, other.unsqueeze(1).expand(-1, left.shape[1], -1))
    return torch.bmm(left, other.mT)


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
