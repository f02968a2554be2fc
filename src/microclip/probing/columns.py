"""One parameter's per-example gradients, side by side as columns, a block of them at a time.

Rows are examples, columns are elements of the parameter. Products of such blocks are all that a
Gram matrix needs, so nothing larger than a block is ever written out. Where there are few rows per
example, as in an MLP, the products of inputs and of output gradients do it without any block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from microclip.engines.single_pass.convolution import Patches
from microclip.engines.single_pass.formed import Formed, Use
from microclip.engines.single_pass.groups import Groups
from microclip.engines.single_pass.uses import Lines, Rows, sum_of
from microclip.multitensor import widened, widest

Uses = list[Use]


def products(one: Uses, other: Uses, block_bytes: int) -> Tensor:
    """Return <g_i, g_k> over one parameter, for i among one's examples and k among the other's."""
    if len(one) == len(other) == 1:
        a, b = one[0], other[0]
        if isinstance(a, Rows) and isinstance(b, Rows) and _pairing_pays(a, b):
            return _pairs(a, b, block_bytes)
    same = one is other
    total: Tensor | None = None
    for block in _blocks(one, other, block_bytes):
        mine = block.of(one)
        product = mine @ (mine if same else block.of(other)).mT
        # within a block float32 is exact enough; over a whole model it would drift
        product = product.to(widest(product.device))
        total = product if total is None else total + product
    assert total is not None
    return total


class _Block:
    """Some lines of the parameter's first dimension; `kept` renumbers the lines of a table."""

    def __init__(self, start: int, stop: int, kept: Tensor | None) -> None:
        self.start, self.stop, self.kept = start, stop, kept

    def of(self, uses: Uses) -> Tensor:
        """Return (examples, columns of this block), added up over all uses of the parameter."""
        return sum_of([self._of(use) for use in uses])

    def _of(self, use: Use) -> Tensor:
        if isinstance(use, Rows):
            left, right = widened(use.left[:, :, self.start : self.stop]), widened(use.right)
            return torch.bmm(left.mT, right).flatten(1)
        if isinstance(use, Lines):
            return self._of_lines(use)
        if isinstance(use, Patches):
            shape = (self.stop - self.start, *use.shape[1:])
            part = Patches(
                use.x, use.d[:, self.start : self.stop], replace(use.geometry, shape=shape)
            )
            return widened(part.form(Groups([1] * len(use.x))).flatten(1))
        assert isinstance(use, Formed)
        gradients = use.gradients
        if gradients.is_complex():
            gradients = torch.view_as_real(gradients)
        lines = gradients if use.shape else gradients.unsqueeze(1)
        return widened(lines[:, self.start : self.stop].flatten(1))

    def _of_lines(self, use: Lines) -> Tensor:
        deltas = widened(use.deltas)
        numbers = (
            use.indices
            if self.kept is None
            else torch.searchsorted(self.kept, use.indices.contiguous())
        )
        here = (numbers >= self.start) & (numbers < self.stop)
        numbers = (numbers - self.start).clamp(0, self.stop - self.start - 1)
        deltas = deltas * here.unsqueeze(2)
        table = deltas.new_zeros(len(deltas), self.stop - self.start, deltas.shape[2])
        return table.scatter_add_(1, numbers.unsqueeze(2).expand_as(deltas), deltas).flatten(1)


def _blocks(one: Uses, other: Uses, block_bytes: int) -> Iterator[_Block]:
    """Yield blocks that take up no more than so many bytes, or one line of the parameter."""
    shape = one[0].shape
    lines, width = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    tables = [use for use in (*one, *other) if isinstance(use, Lines)]
    kept = None
    if len(tables) == len(one) + len(other):  # of a table, only the lines that were looked up
        kept = _distinct(torch.cat([use.indices.flatten() for use in tables]))
        lines = len(kept)
    each = max(_examples(one), _examples(other)) * width * 8  # float64, or complex numbers
    step = max(1, block_bytes // each)
    for start in range(0, lines, step):
        yield _Block(start, min(start + step, lines), kept)


def _pairing_pays(one: Rows, other: Rows) -> bool:
    """Whether all pairs of rows are fewer products than written-out gradients."""
    p, q = one.shape
    return one.left.shape[1] * other.left.shape[1] * (p + q) <= p * q


def _pairs(one: Rows, other: Rows, block_bytes: int) -> Tensor:
    """Return sum_st (left_is . left_kt)(right_is . right_kt)."""
    count = other.left.shape[0] * other.left.shape[1]
    left, right = widened(other.left).flatten(0, 1), widened(other.right).flatten(0, 1)
    each = one.left.shape[1] * count * 2 * left.element_size()
    step = max(1, block_bytes // each)
    found = []
    for start in range(0, len(one.left), step):
        a, b = (widened(side[start : start + step]) for side in (one.left, one.right))
        pairs = (a.flatten(0, 1) @ left.mT).mul_(b.flatten(0, 1) @ right.mT)
        pairs = pairs.view(len(a), a.shape[1], len(other.left), -1)
        found.append(pairs.sum((1, 3), dtype=widest(pairs.device)))
    return torch.cat(found)


def _examples(uses: Uses) -> int:
    use = uses[0]
    if isinstance(use, Formed):
        return len(use.gradients)
    if isinstance(use, Patches):
        return len(use.x)
    assert isinstance(use, Rows | Lines)
    return len(use.deltas)


def _distinct(values: Tensor) -> Tensor:
    """Return each value once, in ascending order."""
    ordered = values.sort().values
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return ordered[new]
