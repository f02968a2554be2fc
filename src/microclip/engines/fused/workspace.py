"""Memory that is kept from step to step, for what a single pass must hold on to.

On a CPU every step would otherwise ask the system for fresh pages and give them back at its end,
which can cost more than the arithmetic done in them. Accelerators have allocators that keep memory
by themselves; there this room does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from microclip import multitensor


@dataclass(frozen=True, eq=False)
class _Loan:
    block: Tensor  # of bytes
    tensor: Tensor  # which lies in it


_Kind = tuple[tuple[int, ...], torch.dtype]


class Workspace:
    """Lends memory during a step and takes it all back at the end."""

    def __init__(self) -> None:
        self.at_rest = math.inf  # bytes to hold on to between steps, at most
        self._free: dict[_Kind, list[_Loan]] = {}
        self._lent: list[tuple[_Kind, _Loan]] = []

    @property
    def nbytes(self) -> int:
        """Return how much memory is held, lent or free."""
        lent = sum(loan.block.nbytes for _, loan in self._lent)
        return lent + sum(loan.block.nbytes for _, loan in self._resting())

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a tensor of this shape that holds anything, until `take_back`."""
        if not multitensor.on_host(like):
            return like.new_empty(shape)
        kind = (tuple(shape), like.dtype)
        same = self._free.get(kind)  # steps are alike, so there nearly always is one
        loan = same.pop() if same else self._loan(kind)
        self._lent.append((kind, loan))
        return loan.tensor

    def keep(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a copy where that lets its memory be used again at once."""
        if not multitensor.on_host(tensor):
            return tensor.contiguous()
        return self.empty(tensor.shape, tensor).copy_(tensor)

    def take_back(self) -> None:
        """End a step: what it did not need is let go, the rest is ready for the next."""
        self._free, held = {}, 0
        for kind, loan in self._lent:
            held += loan.block.nbytes
            if held <= self.at_rest:
                self._free.setdefault(kind, []).append(loan)
        self._lent = []

    def clear(self) -> None:
        """Let all of it go."""
        self._free, self._lent = {}, []

    def _loan(self, kind: _Kind) -> _Loan:
        """Return a tensor in the smallest free block that fits and is not more than half wasted."""
        shape, dtype = kind
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        fitting = [
            (loan.block.nbytes, loans, loan)
            for loans, loan in self._resting()
            if nbytes <= loan.block.nbytes <= 2 * nbytes + 64
        ]
        if fitting:
            _, loans, loan = min(fitting, key=lambda found: found[0])
            loans.remove(loan)
            block = loan.block
        else:
            block = torch.empty(max(nbytes, 1) + -nbytes % 64, dtype=torch.uint8)
        return _Loan(block, block.view(dtype)[:count].view(shape))

    def _resting(self) -> Iterator[tuple[list[_Loan], _Loan]]:
        return ((loans, loan) for loans in self._free.values() for loan in loans)
