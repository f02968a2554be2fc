"""Weights that multiply rows: norms and weighted sums of their gradients, without the gradients.

`Rows`: the gradient is a sum of outer products, kept as its factors.
`EmbeddingRows`: the gradient of an embedding table, of which a few rows were looked up.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from microclip import multitensor
from microclip.engines.single_pass import native
from microclip.engines.single_pass.contributions import (
    Contribution,
    Groups,
    Materialized,
    MaterializedParts,
    Shares,
    empty_gradients,
    together,
)
from microclip.engines.single_pass.memory import LARGEST_TENSOR
from microclip.multitensor import widened

MERGING_PAYS = 4  # contributions to one weight
CANCELLED = 1e-3  # of the rows' own squares: anything less is mostly rounding error
HALVING_PAYS = 64  # rows; the product of a matrix with itself is symmetric


class Paired(Contribution):
    """Gradients whose inner products with others are known without materializing either."""

    @abstractmethod
    def inner_products(self, other: Rows | EmbeddingRows | Paired, groups: Groups) -> Tensor:
        """Return the inner product with another contribution, for every micro-batch."""


@dataclass(frozen=True)
class Rows(Contribution):
    """sum_r input_r (x) delta_r, where each example has n rows, in tensors of any strides."""

    inputs: Tensor  # (examples, n, width of the input)
    deltas: Tensor  # (examples, n, width of the output): what the backward pass brought
    inputs_first: bool  # the parameter is (input, output), unlike that of a linear layer

    @property
    def left(self) -> Tensor:
        """Return the rows that make up the parameter's first dimension."""
        return self.inputs if self.inputs_first else self.deltas

    @property
    def right(self) -> Tensor:
        """Return the rows that make up the parameter's second dimension."""
        return self.deltas if self.inputs_first else self.inputs

    @property
    @override
    def shape(self) -> tuple[int, int]:
        return self.left.shape[2], self.right.shape[2]

    @property
    @override
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.deltas.nbytes

    @override
    def squared_norms(self, groups: Groups) -> Tensor:
        """Return |sum_r left_r x right_r|^2 = sum_rs (left_r . left_s)(right_r . right_s).

        NaN where rows cancel each other so completely that float32 has no digits left.
        """
        found = []
        for block in groups:
            left, right = widened(block.rows_of(self.left)), widened(block.rows_of(self.right))
            squares, own = pair_sums(left, right)
            if left.shape[1] > 1:
                squares = squares.masked_fill_(squares < CANCELLED * own, torch.nan)
            found.append(squares)
        return together(found)

    @override
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        """The plain weight gradient, of weighted rows."""
        left, right = widened(self.left), widened(self.right)
        each = shares.as_(right.dtype).of_examples.view(-1, 1, 1)
        if left.shape[2] < right.shape[2]:
            left = left * each
        else:
            right = right * each
        left, right = _matrix(left), _matrix(right)
        if total is not None:
            return torch.addmm(total, left.mT, right, out=total)
        return left.mT @ right

    @override
    def materialize(self, groups: Groups) -> Tensor:
        out = empty_gradients(groups, self.shape, self.right)
        self.materialize_into(groups, out)
        return out

    @override
    def gradient_of(self, groups: Groups, microbatch: int) -> Tensor:
        here = groups.examples_of(microbatch)
        left, right = (widened(side[here]).flatten(0, 1) for side in (self.left, self.right))
        return left.mT @ right

    @override
    def nonzero(self, groups: Groups) -> Tensor:
        """Look at the deltas alone: where all of them are 0, the gradient is 0."""
        return groups.sum(self.deltas.flatten(1).any(1).int()) > 0

    @override
    def materialized(self, groups: Groups) -> Contribution:
        each = math.prod(self.shape) * multitensor.accumulation_dtype(self.right).itemsize
        at_once = max(1, LARGEST_TENSOR // max(1, each))
        if len(groups) <= at_once or len(groups.blocks) > 1 or not multitensor.on_host(self.right):
            return Materialized(self.materialize(groups))
        (block,) = groups
        sides = (torch.split(block.rows_of(rows), at_once) for rows in (self.left, self.right))
        parts = [Rows(left, right, True) for left, right in zip(*sides, strict=True)]
        found = [part.materialize(Groups([1] * len(part.left))) for part in parts]
        return MaterializedParts(tuple(map(Materialized, found)))

    def materialize_into(self, groups: Groups, out: Tensor) -> None:
        """Write the gradients of all micro-batches into `out`."""
        for block in groups:
            left, right = widened(block.rows_of(self.left)), widened(block.rows_of(self.right))
            torch.bmm(left.mT, right, out=block.microbatches_of(out))

    @override
    def without(self, left_out: Shares) -> Rows:
        each = left_out.of_examples.view(-1, 1, 1)
        inputs, deltas = self.inputs.masked_fill(each, 0.0), self.deltas.masked_fill(each, 0.0)
        return Rows(inputs, deltas, self.inputs_first)

    @override
    def kept(self, groups: Groups) -> Rows:
        inputs, deltas = self.inputs.contiguous(), self.deltas.contiguous()
        if inputs is self.inputs and deltas is self.deltas:
            return self
        return Rows(inputs, deltas, self.inputs_first)

    @override
    def columns(
        self, groups: Groups, start: int, stop: int, table_rows: Tensor | None = None
    ) -> Tensor:
        parts = []
        for block in groups:
            left = widened(block.rows_of(self.left)[:, :, start:stop])
            right = widened(block.rows_of(self.right))
            parts.append(torch.bmm(left.mT, right).flatten(1))
        return together(parts)


@dataclass(frozen=True)
class EmbeddingRows(Contribution):
    """Rows of an embedding table: sum_r one_hot(index_r) (x) delta_r."""

    indices: Tensor  # (examples, n)
    deltas: Tensor  # (examples, n, width)
    num_embeddings: int

    @property
    def right(self) -> Tensor:
        """Return the rows that make up the parameter's second dimension."""
        return self.deltas

    @property
    @override
    def shape(self) -> tuple[int, int]:
        return self.num_embeddings, self.deltas.shape[2]

    @property
    @override
    def nbytes(self) -> int:
        return self.indices.nbytes + self.deltas.nbytes

    @override
    def squared_norms(self, groups: Groups) -> Tensor:
        """Add up deltas of the same micro-batch and table row, without building its table."""
        microbatch = groups.per_example(torch.arange(len(groups), device=self.indices.device))
        keys = (microbatch.unsqueeze(1) * self.num_embeddings + self.indices).flatten()
        ordered, order = keys.sort()
        deltas = widened(self.deltas)
        if multitensor.on_host(keys) and not (ordered[1:] == ordered[:-1]).any():
            # no row is looked up twice, as for positions
            return together([multitensor.squared_norms(block.rows_of(deltas)) for block in groups])
        # rows are numbered in the order of their keys, so that nothing is read on the host
        numbers = torch.zeros_like(keys)
        numbers[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
        deltas = deltas.flatten(0, 1)
        number_of = torch.empty_like(keys).scatter_(0, order, numbers)
        sums = torch.zeros_like(deltas).index_add_(0, number_of, deltas)
        squares = multitensor.squared_norms(sums)
        owners = torch.zeros_like(keys).scatter_(0, numbers, ordered // self.num_embeddings)
        return squares.new_zeros(len(groups)).index_add_(0, owners, squares)

    @override
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        deltas = widened(self.deltas)
        each = shares.as_(deltas.dtype).of_examples.view(-1, 1, 1)
        deltas = (deltas * each).flatten(0, 1)
        total = deltas.new_zeros(self.shape) if total is None else total
        return total.index_add_(0, self.indices.flatten(), deltas)

    @override
    def materialize(self, groups: Groups) -> Tensor:
        deltas = widened(self.deltas)
        out = empty_gradients(groups, self.shape, deltas).zero_()
        for block in groups:
            rows = block.rows_of(deltas)
            indices = block.rows_of(self.indices).unsqueeze(2).expand_as(rows)
            block.microbatches_of(out).scatter_add_(1, indices, rows)
        return out

    @override
    def gradient_of(self, groups: Groups, microbatch: int) -> Tensor:
        here = groups.examples_of(microbatch)
        deltas = widened(self.deltas[here]).flatten(0, 1)
        table = deltas.new_zeros(self.shape)
        return table.index_add_(0, self.indices[here].flatten(), deltas)

    @override
    def nonzero(self, groups: Groups) -> Tensor:
        """Look at the deltas alone: where all of them are 0, the gradient is 0."""
        return groups.sum(self.deltas.flatten(1).any(1).int()) > 0

    @override
    def without(self, left_out: Shares) -> EmbeddingRows:
        deltas = self.deltas.masked_fill(left_out.of_examples.view(-1, 1, 1), 0.0)
        return EmbeddingRows(self.indices, deltas, self.num_embeddings)

    @override
    def columns(
        self, groups: Groups, start: int, stop: int, table_rows: Tensor | None = None
    ) -> Tensor:
        parts = []
        for block in groups:
            deltas, numbers = widened(block.rows_of(self.deltas)), block.rows_of(self.indices)
            if table_rows is not None:
                numbers = torch.searchsorted(table_rows, numbers.contiguous())
            here = (numbers >= start) & (numbers < stop)
            numbers = (numbers - start).clamp(0, stop - start - 1)
            deltas = deltas * here.unsqueeze(2)
            table = deltas.new_zeros(len(deltas), stop - start, deltas.shape[2])
            table.scatter_add_(1, numbers.unsqueeze(2).expand_as(deltas), deltas)
            parts.append(table.flatten(1))
        return together(parts)


def inner_products(
    one: Rows | EmbeddingRows | Paired, other: Rows | EmbeddingRows | Paired, groups: Groups
) -> Tensor:
    """Return the inner product of two contributions' gradients, for every micro-batch."""
    if isinstance(one, Paired):
        return one.inner_products(other, groups)
    if isinstance(other, Paired):
        return other.inner_products(one, groups)
    found = []
    for block in groups:
        rights = torch.bmm(
            widened(block.rows_of(one.right)), widened(block.rows_of(other.right)).mT
        )
        if isinstance(one, Rows) and isinstance(other, Rows):
            a, b = block.rows_of(one.left), block.rows_of(other.left)
            lefts = torch.bmm(widened(a), widened(b).mT)
        elif isinstance(one, EmbeddingRows) and isinstance(other, EmbeddingRows):
            a, b = block.rows_of(one.indices), block.rows_of(other.indices)
            lefts = (a.unsqueeze(2) == b.unsqueeze(1)).to(rights.dtype)
        elif isinstance(one, Rows) and isinstance(other, EmbeddingRows):
            lefts = _entries(block.rows_of(one.left), block.rows_of(other.indices))
        else:
            return inner_products(other, one, groups)
        found.append(_sum_of_products(lefts, rights))
    return together(found)


def _matrix(rows: Tensor) -> Tensor:
    """Return the rows of all examples below each other; a copy keeps their memory order."""
    if rows.stride(1) < rows.stride(2):
        return rows.permute(2, 0, 1).flatten(1).mT
    return rows.flatten(0, 1)


def _entries(rows: Tensor, indices: Tensor) -> Tensor:
    """Return, for every row, its entries at all the indices."""
    return widened(rows).gather(2, indices.unsqueeze(1).expand(-1, rows.shape[1], -1))


def pair_sums(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_rs (left_r . left_s)(right_r . right_s) for every micro-batch.

    Also return the part of it where r = s: the squared norms of the rows' own outer products.
    """
    if native.pairs_up(left, right):
        return native.pairs(left, right)
    rows = left.shape[1]
    if rows < HALVING_PAYS:
        both = torch.bmm(left, left.mT).mul_(torch.bmm(right, right.mT))
        return both.sum((1, 2)), _diagonal_sum(both)
    half = rows // 2
    both, rights = (torch.bmm(side, side[:, :half].mT) for side in (left, right))
    both.mul_(rights)
    of_second = both[:, half:].sum((1, 2))  # stands for first x second, which was not computed
    squares, own = pair_sums(left[:, half:], right[:, half:])
    return both.sum((1, 2)) + of_second + squares, _diagonal_sum(both) + own


def _diagonal_sum(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=1, dim2=2).sum(1)


def _sum_of_products(one: Tensor, other: Tensor) -> Tensor:
    """Return the inner products of two batches of matrices; the first is overwritten."""
    return one.mul_(other).sum((1, 2))


def sum_of(tensors: list[Tensor]) -> Tensor:
    """Add tensors up."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def merged(contributions: list[Contribution]) -> list[Contribution]:
    """Concatenate the rows of many contributions, as of recurrent layers: too many to pair up."""
    rows = [each for each in contributions if isinstance(each, Rows)]
    if len(rows) < MERGING_PAYS or len({(r.inputs_first, r.deltas.dtype) for r in rows}) > 1:
        return contributions
    inputs, deltas = (
        torch.cat(side, 1) for side in zip(*[(r.inputs, r.deltas) for r in rows], strict=True)
    )
    others = [each for each in contributions if not isinstance(each, Rows)]
    return [Rows(inputs, deltas, rows[0].inputs_first), *others]


def squared_norms(contributions: list[Contribution], groups: Groups) -> Tensor:
    """Return the squared norms of a parameter's gradients, cross terms included."""
    if len(contributions) == 1:
        return contributions[0].squared_norms(groups)
    paired = [each for each in contributions if isinstance(each, Rows | EmbeddingRows | Paired)]
    if len(paired) < len(contributions):
        total = sum_of([each.materialize(groups) for each in contributions])
        return multitensor.squared_norms(total)
    own = sum_of([each.squared_norms(groups) for each in paired])
    norms = own
    for i, one in enumerate(paired):
        for other in paired[:i]:
            norms = norms + 2 * inner_products(one, other, groups)
    return norms.masked_fill(norms < CANCELLED * own, torch.nan)
