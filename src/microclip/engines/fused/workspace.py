"""Memory that is kept from step to step, for what a single pass must hold on to.

On a CPU every step would otherwise ask the system for fresh pages and give them back at its end,
which can cost more than the arithmetic done in them. Accelerators have allocators that keep memory
by themselves; there this room does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from microclip import multitensor


class Workspace:
    """Lends memory during a step and takes it all back at the end."""

    def __init__(self) -> None:
        self.at_rest = math.inf  # bytes to hold on to between steps, at most
        self._free: list[Tensor] = []
        self._lent: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Return how much memory is held, lent or free."""
        return sum(block.nbytes for block in (*self._free, *self._lent))

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a tensor of this shape that holds anything, until `take_back`."""
        if not multitensor.on_host(like):
            return like.new_empty(shape)
        count = math.prod(shape)
        block = self._block(count * like.element_size())
        return block.view(like.dtype)[:count].view(*shape)

    def keep(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a copy where that lets its memory be used again at once."""
        if not multitensor.on_host(tensor):
            return tensor.contiguous()
        return self.empty(tensor.shape, tensor).copy_(tensor)

    def take_back(self) -> None:
        """End a step: what it did not need is let go, the rest is ready for the next."""
        self._free, held = [], 0
        for block in self._lent:
            held += block.nbytes
            if held <= self.at_rest:
                self._free.append(block)
        self._lent = []

    def clear(self) -> None:
        """Let all of it go."""
        self._free, self._lent = [], []

    def _block(self, nbytes: int) -> Tensor:
        """Return the smallest free block that fits and does not waste more than half of itself."""
        fitting = [i for i, b in enumerate(self._free) if nbytes <= b.nbytes <= 2 * nbytes + 64]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda i: self._free[i].nbytes))
        else:
            block = torch.empty(max(nbytes, 1) + -nbytes % 64, dtype=torch.uint8)
        self._lent.append(block)
        return block
