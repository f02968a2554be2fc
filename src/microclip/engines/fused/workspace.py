"""Memory that is used again and again, within a step and from step to step.

On a CPU every step would otherwise ask the system for fresh pages and give them back at its end,
which can cost more than the arithmetic done in them. Here a block is free as soon as no tensor lies
in it any more: what a layer gave in the forward pass makes room for what is kept of the backward
pass. Accelerators have allocators that do the same by themselves; there this room does nothing.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from microclip import multitensor

SMALLEST = 2**17  # bytes; below, the system's allocator keeps memory by itself
# of this process alone: a child that is forked off, as for loading data, gets a copy
_ALONE: dict[str, Any] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)


class Workspace:
    """Lends memory for as long as the tensors in it live."""

    def __init__(self) -> None:
        keep_what_is_freed()
        self.is_open = True  # else all is left to the system
        self.at_rest = math.inf  # bytes to hold on to between steps, at most
        self._blocks: dict[int, list[_Block]] = {}  # by size
        self._addresses: set[int] = set()
        self._step = 0

    @property
    def nbytes(self) -> int:
        """Return how much memory is held, lent or free."""
        return sum(block.nbytes for block in self._all())

    @property
    def touched(self) -> int:
        """Return how much of it was lent in this step."""
        return sum(block.nbytes for block in self._all() if block.step == self._step)

    def takes(self, count: int, like: Tensor) -> bool:
        """Whether a tensor of this many numbers would lie here."""
        large = count * like.itemsize >= SMALLEST
        return self.is_open and large and multitensor.on_host(like)

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a tensor of this shape that holds anything."""
        count = math.prod(shape)
        if not self.takes(count, like):
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        nbytes = count * like.itemsize
        nbytes += -nbytes % mmap.PAGESIZE
        block = self._found(nbytes) or self._add(_Block(nbytes))
        block.step = self._step
        tensor = torch.frombuffer(block.memory, dtype=like.dtype, count=count)
        return tensor.resize_(shape)  # in place, so that it is nobody's view

    def keep(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a copy where that lets its memory be used again at once."""
        inside = tensor.data_ptr() in self._addresses
        if inside or not self.is_open or not multitensor.on_host(tensor):
            return tensor.contiguous()
        return self.empty(tensor.shape, tensor).copy_(tensor)

    def holds(self, address: int) -> bool:
        """Whether memory that begins here is one of these blocks."""
        return address in self._addresses

    def fits(self, nbytes: int) -> bool:
        """Whether there is room for a tensor without asking the system for more."""
        return self._found(nbytes + -nbytes % mmap.PAGESIZE) is not None

    def rest(self) -> None:
        """End a step: let go of what it did not need, and of what is too much to hold on to."""
        held, kept = 0, []
        for block in self._all():
            if block.step == self._step and held + block.nbytes <= self.at_rest:
                held += block.nbytes
                kept.append(block)
        self.clear()
        for block in kept:
            self._add(block)
        self._step += 1

    def clear(self) -> None:
        """Let all of it go; what is lent lives on with its tensors."""
        self._blocks, self._addresses = {}, set()

    def _found(self, nbytes: int) -> _Block | None:
        """Return the smallest free block that fits and is not more than half wasted."""
        for block in self._blocks.get(nbytes, ()):  # steps are alike, so there nearly always is one
            if sys.getrefcount(block.memory) == block.unused:
                return block
        fitting = (b for b in self._all() if nbytes < b.nbytes <= 2 * nbytes and b.is_free)
        return min(fitting, key=lambda block: block.nbytes, default=None)

    def _add(self, block: _Block) -> _Block:
        self._blocks.setdefault(block.nbytes, []).append(block)
        self._addresses.add(block.address)
        return block

    def _all(self) -> Iterator[_Block]:
        return (block for blocks in self._blocks.values() for block in blocks)


@cache
def keep_what_is_freed() -> None:
    """Free one large block, so that what is freed later on is kept by the process.

    The allocator of glibc takes the largest block freed so far, up to 32 MiB, for a sign of what a
    program needs, and gives memory back to the system only when twice as much lies idle. Before it
    has seen that sign, each step's fresh pages can cost a quarter of it. Elsewhere nothing happens.
    """
    torch.empty(2**25 - 2**14, dtype=torch.uint8)


class _Block:
    """Memory that knows whether a tensor lies in it: each one holds a reference to it."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes, **_ALONE)
        self.nbytes = nbytes
        self.step = 0  # when it was last lent
        self.unused = sys.getrefcount(self.memory)
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()

    @property
    def is_free(self) -> bool:
        return sys.getrefcount(self.memory) == self.unused
