"""The algebra of parameter uses: micro-batch norms and weighted sums of their gradients.

A *use* is one place where a parameter took part in the forward pass, seen after the backward pass.
`Formed`: one gradient per micro-batch, written out; for what is small, and for long rows.
`Rows`: a weight that multiplied rows; the gradient is a sum of outer products, kept as its factors.
`Lines`: an embedding table, of which a few lines were looked up.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from microclip import multitensor
from microclip.engines.fused import native
from microclip.engines.fused.allocator import LARGEST_TENSOR
from microclip.engines.fused.groups import Groups, Shares, together

HALVING_PAYS = 64  # rows; the product of a matrix with itself is symmetric


class Use(ABC):
    """The gradients of all micro-batches with respect to one parameter, in some form."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return that of the parameter."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the memory it holds on to."""

    @abstractmethod
    def squared_norms(self, groups: Groups) -> Tensor:
        """Return the squared norm of every micro-batch's gradient."""

    @abstractmethod
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        """Return total + sum_j share_j g_j, in place where there is a total."""

    @abstractmethod
    def form(self, groups: Groups) -> Tensor:
        """Return the gradients of all micro-batches, written out."""

    def written_out(self, groups: Groups) -> Use:
        """Return the same as gradients that are written out."""
        return Formed(self.form(groups))

    @abstractmethod
    def without(self, left_out: Shares) -> Use:
        """Blank what will be left out: a share of 0 would not do, since 0 x NaN is NaN."""

    def kept(self, groups: Groups) -> Use:
        """Return the same in the form that it is kept in."""
        return self


@dataclass(frozen=True)
class Formed(Use):
    """The gradients of all micro-batches: (micro-batches, *shape of the parameter)."""

    gradients: Tensor

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.gradients.shape[1:]

    @property
    @override
    def nbytes(self) -> int:
        return self.gradients.nbytes

    @override
    def squared_norms(self, groups: Groups) -> Tensor:
        return multitensor.squared_norms(self.gradients)

    @override
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        lying = multitensor.as_it_lies(self.gradients)
        flat = _wide(lying.flatten(1))
        sum_ = (shares.as_(flat.dtype).of_microbatches @ flat).view(lying.shape[1:])
        sum_ = multitensor.put_back(sum_, self.gradients)
        return sum_.contiguous() if total is None else total.view_as(sum_).add_(sum_)

    @override
    def form(self, groups: Groups) -> Tensor:
        return self.gradients

    @override
    def without(self, left_out: Shares) -> Formed:
        mask = left_out.of_microbatches.view(-1, *(1,) * (self.gradients.dim() - 1))
        return Formed(self.gradients.masked_fill(mask, 0.0))


@dataclass(frozen=True)
class Pieces(Use):
    """The same in pieces, each small enough for memory that is used again."""

    parts: tuple[Formed, ...]

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape

    @property
    @override
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @override
    def squared_norms(self, groups: Groups) -> Tensor:
        return torch.cat([part.squared_norms(groups) for part in self.parts])

    @override
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        for part, each in zip(self.parts, self._of(shares), strict=True):
            total = part.add_to(total, each)
        assert total is not None
        return total

    @override
    def form(self, groups: Groups) -> Tensor:
        return torch.cat([part.gradients for part in self.parts])

    @override
    def without(self, left_out: Shares) -> Pieces:
        shares = self._of(left_out)
        return Pieces(tuple(part.without(s) for part, s in zip(self.parts, shares, strict=True)))

    def _of(self, shares: Shares) -> list[Shares]:
        """Return the shares of each; by micro-batch is all that they ask for."""
        each = torch.split(shares.of_microbatches, [len(part.gradients) for part in self.parts])
        return [Shares(of_microbatches, shares.of_examples) for of_microbatches in each]


class Joined:
    """Many small written-out gradients side by side, as one: biases, scales and the like."""

    LARGEST = 2**13  # elements of a parameter

    def __init__(self, parts: dict[str, Formed]) -> None:
        self._shapes = {name: part.shape for name, part in parts.items()}
        self._all = Formed(torch.cat([_flat(part.gradients) for part in parts.values()], 1))

    @classmethod
    def takes(cls, use: Formed, device: torch.device) -> bool:
        """Whether a parameter's only use is small enough, and where the others are."""
        gradients = use.gradients
        small = gradients.numel() <= cls.LARGEST * gradients.shape[0]
        return small and not gradients.is_complex() and gradients.device == device

    def squared_norms(self, groups: Groups) -> Tensor:
        """Return those of all the gradients together."""
        return self._all.squared_norms(groups)

    def leave_out(self, left_out: Shares) -> None:
        """Blank micro-batches."""
        self._all = self._all.without(left_out)

    def add_to(self, totals: dict[str, Tensor], shares: Shares) -> None:
        """Add sum_j share_j g_j to the totals."""
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        parts = torch.split(self._all.add_to(None, shares), sizes)
        for (name, shape), part in zip(self._shapes.items(), parts, strict=True):
            if len(shape) != 1:
                part = part.view(shape)
            totals[name] = totals[name].add_(part) if name in totals else part.clone()


@dataclass(frozen=True)
class Rows(Use):
    """sum_r input_r (x) delta_r, where each example has n rows, in tensors of any strides."""

    inputs: Tensor  # (examples, n, width of the input)
    deltas: Tensor  # (examples, n, width of the output): what the backward pass brought
    inputs_first: bool  # the parameter is (input, output), unlike that of a linear layer

    @property
    def left(self) -> Tensor:
        """Return the rows that make the parameter's first dimension."""
        return self.inputs if self.inputs_first else self.deltas

    @property
    def right(self) -> Tensor:
        """Return the rows that make the parameter's second dimension."""
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
        """Return |sum_r left_r x right_r|^2 = sum_rs (left_r . left_s)(right_r . right_s)."""
        return together(
            [
                _own_pairs(_wide(block.rows_of(self.left)), _wide(block.rows_of(self.right)))
                for block in groups
            ]
        )

    @override
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        """The plain weight gradient, of weighted rows."""
        left, right = _wide(self.left), _wide(self.right)
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
    def form(self, groups: Groups) -> Tensor:
        out = room_for(groups, self.shape, self.right)
        self.form_into(groups, out)
        return out

    @override
    def written_out(self, groups: Groups) -> Use:
        each = math.prod(self.shape) * multitensor.accumulation_dtype(self.right).itemsize
        at_once = max(1, LARGEST_TENSOR // max(1, each))
        if len(groups) <= at_once or len(groups.blocks) > 1 or not multitensor.on_host(self.right):
            return Formed(self.form(groups))
        (block,) = groups
        sides = (torch.split(block.rows_of(rows), at_once) for rows in (self.left, self.right))
        parts = [Rows(left, right, True) for left, right in zip(*sides, strict=True)]
        return Pieces(tuple(Formed(part.form(Groups([1] * len(part.left)))) for part in parts))

    def form_into(self, groups: Groups, out: Tensor) -> None:
        """Write the gradients of all micro-batches out."""
        for block in groups:
            left, right = _wide(block.rows_of(self.left)), _wide(block.rows_of(self.right))
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


@dataclass(frozen=True)
class Lines(Use):
    """One row for a line of a table: sum_r one_hot(index_r) (x) delta_r."""

    indices: Tensor  # (examples, n)
    deltas: Tensor  # (examples, n, width)
    lines: int

    @property
    def right(self) -> Tensor:
        """Return the rows that make the parameter's second dimension."""
        return self.deltas

    @property
    @override
    def shape(self) -> tuple[int, int]:
        return self.lines, self.deltas.shape[2]

    @property
    @override
    def nbytes(self) -> int:
        return self.indices.nbytes + self.deltas.nbytes

    @override
    def squared_norms(self, groups: Groups) -> Tensor:
        """Add up the rows that meet in one line of one micro-batch, without making its table."""
        microbatch = groups.per_example(torch.arange(len(groups), device=self.indices.device))
        keys = (microbatch.unsqueeze(1) * self.lines + self.indices).flatten()
        ordered, order = keys.sort()
        deltas = _wide(self.deltas)
        if multitensor.on_host(keys) and not (ordered[1:] == ordered[:-1]).any():
            # none meet, as positions never do
            return together([multitensor.squared_norms(block.rows_of(deltas)) for block in groups])
        # lines are numbered in the order of their keys, so that nothing is read on the host
        numbers = torch.zeros_like(keys)
        numbers[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
        deltas = deltas.flatten(0, 1)
        number_of = torch.empty_like(keys).scatter_(0, order, numbers)
        sums = torch.zeros_like(deltas).index_add_(0, number_of, deltas)
        squares = multitensor.squared_norms(sums)
        owners = torch.zeros_like(keys).scatter_(0, numbers, ordered // self.lines)
        return squares.new_zeros(len(groups)).index_add_(0, owners, squares)

    @override
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        deltas = _wide(self.deltas)
        each = shares.as_(deltas.dtype).of_examples.view(-1, 1, 1)
        deltas = (deltas * each).flatten(0, 1)
        total = deltas.new_zeros(self.shape) if total is None else total
        return total.index_add_(0, self.indices.flatten(), deltas)

    @override
    def form(self, groups: Groups) -> Tensor:
        deltas = _wide(self.deltas)
        out = room_for(groups, self.shape, deltas).zero_()
        for block in groups:
            rows = block.rows_of(deltas)
            indices = block.rows_of(self.indices).unsqueeze(2).expand_as(rows)
            block.microbatches_of(out).scatter_add_(1, indices, rows)
        return out

    @override
    def without(self, left_out: Shares) -> Lines:
        deltas = self.deltas.masked_fill(left_out.of_examples.view(-1, 1, 1), 0.0)
        return Lines(self.indices, deltas, self.lines)


def room_for(groups: Groups, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return memory for one gradient per micro-batch, in a precision to add up in."""
    dtype = multitensor.accumulation_dtype(like)
    return torch.empty((len(groups), *shape), dtype=dtype, device=like.device)


def inner_products(one: Rows | Lines, other: Rows | Lines, groups: Groups) -> Tensor:
    """Return the inner product of two uses' gradients, for every micro-batch."""
    found = []
    for block in groups:
        rights = torch.bmm(_wide(block.rows_of(one.right)), _wide(block.rows_of(other.right)).mT)
        if isinstance(one, Rows) and isinstance(other, Rows):
            a, b = block.rows_of(one.left), block.rows_of(other.left)
            lefts = torch.bmm(_wide(a), _wide(b).mT)
        elif isinstance(one, Lines) and isinstance(other, Lines):
            a, b = block.rows_of(one.indices), block.rows_of(other.indices)
            lefts = (a.unsqueeze(2) == b.unsqueeze(1)).to(rights.dtype)
        elif isinstance(one, Rows) and isinstance(other, Lines):
            lefts = _entries(block.rows_of(one.left), block.rows_of(other.indices))
        else:
            return inner_products(other, one, groups)
        found.append(_sum_of_products(lefts, rights))
    return together(found)


def _flat(gradients: Tensor) -> Tensor:
    """Return one row per micro-batch."""
    return gradients if gradients.dim() == 2 else gradients.flatten(1)


def _matrix(rows: Tensor) -> Tensor:
    """Return the rows of all examples below each other; a copy keeps the order they lie in."""
    if rows.stride(1) < rows.stride(2):
        return rows.permute(2, 0, 1).flatten(1).mT
    return rows.flatten(0, 1)


def _entries(rows: Tensor, indices: Tensor) -> Tensor:
    """Return, for every row, its entries at all the indices."""
    return _wide(rows).gather(2, indices.unsqueeze(1).expand(-1, rows.shape[1], -1))


def _own_pairs(left: Tensor, right: Tensor) -> Tensor:
    """Return sum_rs (left_r . left_s)(right_r . right_s) for every micro-batch."""
    if native.pairs_up(left, right):
        return native.pairs(left, right)
    rows = left.shape[1]
    if rows < HALVING_PAYS:
        return _sum_of_products(torch.bmm(left, left.mT), torch.bmm(right, right.mT))
    half = rows // 2
    lefts, rights = (torch.bmm(side, side[:, :half].mT) for side in (left, right))
    of_first = _sum_of_products(lefts, rights)
    twice = lefts[:, half:].sum((1, 2))  # the second half's with the first, which were overwritten
    return of_first + twice + _own_pairs(left[:, half:], right[:, half:])


def _sum_of_products(one: Tensor, other: Tensor) -> Tensor:
    """Return the inner products of two rows of matrices, of which the first is overwritten."""
    return one.mul_(other).sum((1, 2))


def _wide(tensor: Tensor) -> Tensor:
    """Return rows in a precision that products can be added up in."""
    return tensor.float() if tensor.dtype in multitensor.HALF else tensor


def sum_of(tensors: list[Tensor]) -> Tensor:
    """Add tensors up."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def squared_norms(uses: list[Use], groups: Groups) -> Tensor:
    """Return the squared norms of a parameter's gradients over all uses, with cross terms."""
    if len(uses) == 1:
        return uses[0].squared_norms(groups)
    paired = [use for use in uses if isinstance(use, Rows | Lines)]
    if len(paired) < len(uses):
        total = sum_of([use.form(groups) for use in uses])
        return multitensor.squared_norms(total)
    norms = sum_of([use.squared_norms(groups) for use in paired])
    for i, one in enumerate(paired):
        for other in paired[:i]:
            norms = norms + 2 * inner_products(one, other, groups)
    return norms
