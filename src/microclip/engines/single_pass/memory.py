"""Memory of a single pass: the allocator, which gradients to materialize, how large a chunk may be.

Three questions that are read together: how freed memory stays in the process (`keep_freed_memory`),
which weights get one gradient per micro-batch written out instead of keeping their rows
(`choose_materialized`), and how many micro-batches fit into one pass (`Budget`). Nothing here knows
what a contribution looks like.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from microclip.batches import axis_of
from microclip.engines.single_pass.contributions import Groups
from microclip.microbatches import MicrobatchList

# ---- the allocator
#
# glibc returns freed memory to the system, and every step asks for it again: fresh pages that have
# to be zeroed and mapped, which can cost a quarter of a small step. Plain training has the same
# problem, and the same fix makes it faster, too. Accelerators have caching allocators.

_LARGEST_BLOCK = 2**25  # bytes; glibc maps fresh pages for anything larger, whatever the setting
_MARGIN = 2**12  # for the allocator's own header and alignment

LARGEST_TENSOR = _LARGEST_BLOCK - _MARGIN
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # option numbers, from malloc.h
_NEVER = 2**31 - 1  # bytes that may lie idle at the end of the heap
_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


@cache
def keep_freed_memory() -> None:
    """Let this process keep up to 2 GiB of freed memory, unless the user has configured malloc.

    Does nothing except on Linux with glibc.
    """
    if any(name in os.environ for name in _SETTINGS):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK)
    mallopt(_TRIM_THRESHOLD, _NEVER)


# ---- which gradients to materialize
#
# A weight that multiplies rows offers a choice. Keep its rows, and norms come from the products of
# all pairs of a micro-batch's rows: R^2 (p + q) products for R rows and a weight of p x q. Or
# materialize its gradients, which takes no more arithmetic than a plain step does, but writes p q
# numbers for each micro-batch and reads them again.

# products that take as long as writing a number and reading it again
WRITING = 30
WRITING_BESIDE_HALVES = 70  # where no pair of rows is multiplied twice
CALLS = 2**21  # products that take as long as the extra calls for rows, which small gradients save


class Weight(NamedTuple):
    """A weight that multiplied rows, as the forward pass saw it."""

    rows: int  # of an example
    p: int
    q: int
    itemsize: int  # of a materialized number
    kept: int  # bytes, if its rows are kept
    worth: int = WRITING
    calls: int = 0  # the cost of the calls that materializing saves, in products

    def written(self, groups: Groups) -> int:
        """Return the bytes of its materialized gradients."""
        return len(groups) * self.p * self.q * self.itemsize

    def least(self, groups: Groups) -> int:
        """Return the bytes it needs if memory is all that matters."""
        return min(self.kept, self.written(groups)) if self.gain(groups) >= 1 else self.kept

    def gain(self, groups: Groups) -> float:
        """Return how much faster materializing is, per byte; below 1 it is slower."""
        rows = groups.largest * self.rows
        saved = rows**2 * (self.p + self.q) + self.calls / len(groups)
        return saved / (self.worth * max(1, self.p * self.q))


def least_bytes(weights: dict[str, Weight], groups: Groups) -> int:
    """Return the bytes kept for these weights if nothing is materialized for speed alone."""
    return sum([weight.least(groups) for weight in weights.values()])


def choose_materialized(weights: dict[str, Weight], groups: Groups, allowance: float) -> set[str]:
    """Return the weights whose gradients to materialize, choosing the largest gains first.

    Args:
        weights: All weights that are used once, by name.
        groups: The micro-batches.
        allowance: Bytes that may be kept. If even the minimum needs more, only those weights are
            materialized that then take less memory.
    """
    chosen = set()
    total = 0
    candidates = []
    for name, weight in weights.items():
        gain = weight.gain(groups)
        written, least = weight.written(groups), weight.kept
        if gain >= 1:
            least = min(least, written)
            candidates.append((-gain, name, written - least))
        total += least
    for _, name, more in sorted(candidates):
        if not more or total + more <= allowance:
            chosen.add(name)
            total += more
    return chosen


# ---- how many micro-batches fit into a pass

UNSEEN = 1.05  # margin for memory that is not counted
PASSING = 2.5  # times a layer's largest tensor: incoming and outgoing gradients, and their copies
KEPT = 1.5  # times what the forward pass saves: what the backward pass may keep
LITTLE = 2**20  # bytes that never matter
ROOMY = 3  # times what is saved: a limit that leaves this much is no constraint
FIRST_SHARE = 8  # under a limit, an unknown kind of batch starts with an eighth of itself


class Budget:
    """Learns how much memory an example takes, and cuts batches into chunks that fit.

    Args:
        limit: Bytes that a step may hold beside parameters and optimizer; None: what is free on
            the device.
    """

    def __init__(self, limit: int | None) -> None:
        self._given = limit
        self._limits: dict[torch.device, float] = {}
        # measurements, by size class of an example
        self._seen: dict[int, _Need] = {}
        self.with_adoption: set[int] = set()  # numbers of examples for which adopting worked
        self.without_adoption: set[int] = set()  # numbers of examples for which it was wrong

    def is_tight(self, microbatches: MicrobatchList, parameters: dict[str, nn.Parameter]) -> bool:
        """Whether saving memory comes before saving time."""
        if self._given is None:
            return False
        seen = self._seen.get(_size_class(microbatches))
        if seen is None:
            return True
        return ROOMY * seen.saved * _times(microbatches, seen) > self._room(parameters)

    def chunks(
        self, microbatches: MicrobatchList, parameters: dict[str, nn.Parameter]
    ) -> Iterator[MicrobatchList]:
        """Yield the micro-batches in chunks; each is processed before the next one is chosen."""
        rest = microbatches
        while rest:
            fitting = self._count(rest, parameters)
            portions = -(-len(rest) // fitting)  # of equal size, so that memory is reused
            count = -(-len(rest) // portions)
            chunk, rest = rest[:count], rest[count:]
            yield chunk

    def _count(self, microbatches: MicrobatchList, parameters: dict[str, nn.Parameter]) -> int:
        """Return how many of the micro-batches fit into one pass."""
        seen = self._seen.get(_size_class(microbatches))
        if seen is None:
            count = len(microbatches)
            return count if self._given is None else max(1, count // FIRST_SHARE)
        need = seen.peak * _growth(microbatches, seen) * max(microbatches.sizes)
        if not need:  # nothing is saved beyond what was there before
            return len(microbatches)
        return max(1, int(min(len(microbatches), self._room(parameters) / need)))  # may be inf

    @contextmanager
    def learning(
        self, microbatches: MicrobatchList, parameters: dict[str, nn.Parameter]
    ) -> Iterator[MemoryMeter | None]:
        """Measure the block, if batches like this one are new.

        Few examples tell less than many: memory that all of them share is counted for each.
        """
        size_class, examples = _size_class(microbatches), microbatches.examples
        seen = self._seen.get(size_class)
        if seen and examples < 2 * seen.examples:
            yield None
            return
        meter = MemoryMeter([*parameters.values(), *microbatches.leaves])
        yield meter
        needs = [total / examples for total in (meter.saved, meter.peak)]
        self._seen[size_class] = _Need(examples, _elements(microbatches), *needs)

    def to_keep(
        self,
        microbatches: MicrobatchList,
        parameters: dict[str, nn.Parameter],
        least: int,
        meter: MemoryMeter | None,
    ) -> float:
        """Return the bytes that a backward pass may keep for weights where that is faster.

        Somewhat more than the forward pass saved, which is being freed meanwhile; under a limit, no
        more than it leaves beside the minimum.
        """
        if meter:
            return max(LITTLE, KEPT * meter.saved) if self._given is None else 0.0
        seen = self._seen[_size_class(microbatches)]
        times = _times(microbatches, seen)
        left = self._room(parameters) - seen.peak * times
        return min(max(LITTLE, KEPT * seen.saved * times), least + max(0.0, left))

    def _room(self, parameters: dict[str, nn.Parameter]) -> float:
        """Return the bytes available for what can be counted in advance."""
        gradient = sum([parameter.nbytes for parameter in parameters.values()])
        limit = self._limit(next(iter(parameters.values())).device)
        return (limit - gradient) / UNSEEN

    def _limit(self, device: torch.device) -> float:
        if self._given is not None:
            return self._given
        if device not in self._limits:
            self._limits[device] = free_memory(device)
        return self._limits[device]


@dataclass(frozen=True)
class _Need:
    examples: int  # it was measured on
    elements: int  # of an example
    saved: float  # bytes per example, for the backward pass
    peak: float  # bytes per example that are held at once


class MemoryMeter:
    """Counts the bytes that a pass holds; memory that tensors share is counted once.

    Args:
        known: Tensors that were there before and do not count.
    """

    def __init__(self, known: list[Tensor]) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._waiting: dict[int, int] = {}  # how many more times a storage will be unpacked
        self._left = 0  # of what was saved
        self._passing = 0  # the largest tensor of the layer that the backward pass has reached
        self._kept = 0
        self._again = 0  # what a checkpointed segment saved when it ran again
        self.saved = 0
        self.peak = 0.0

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor that the forward pass saves."""
        if tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if address in self._known:
            return tensor
        if address not in self._waiting:
            self.saved += nbytes
            self._left += nbytes
        self._waiting[address] = self._waiting.get(address, 0) + 1
        self._update_peak()
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        """Count a saved tensor that the backward pass has reached and will free."""
        if tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if address in self._waiting:
            self._passing = max(self._passing, nbytes)
            self._update_peak()
            self._waiting[address] -= 1
            self._left -= nbytes * (self._waiting[address] == 0)
        return tensor

    def keep(self, nbytes: int) -> None:
        """Count what is kept of a layer."""
        self._kept += nbytes
        self._update_peak()
        self._passing = 0

    def replay(self, tensors: Iterable[Tensor]) -> None:
        """Count what a checkpointed segment saved when it ran again; the one before is done."""
        held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
                for each in tensors if each.layout is torch.strided}  # fmt: skip
        self._again = sum(nbytes for key, nbytes in held.items() if key not in self._known)
        self._update_peak()

    def _update_peak(self) -> None:
        held = self._left + self._kept + self._again
        self.peak = max(self.peak, held + PASSING * self._passing)


def _elements(microbatches: MicrobatchList) -> int:
    """Return how many numbers an example has."""
    dim = microbatches.batch_dim
    return sum(leaf.numel() // leaf.shape[axis_of(leaf, dim)] for leaf in microbatches.leaves)


def _size_class(microbatches: MicrobatchList) -> int:
    """Return which batches count as alike: those with examples of about the same size.

    Within a class, memory is assumed to grow with the square of the size, as for attention.
    """
    return _elements(microbatches).bit_length()


def _growth(microbatches: MicrobatchList, seen: _Need) -> float:
    """Return how much more an example needs than a measured one."""
    return max(1.0, _elements(microbatches) / seen.elements) ** 2


def _times(microbatches: MicrobatchList, seen: _Need) -> float:
    """Return how much more these examples need than one measured example."""
    return microbatches.examples * _growth(microbatches, seen)


def free_memory(device: torch.device) -> float:
    """Return what a step may use of a device by default; infinite where that is unknown."""
    if device.type == "cpu":
        if "SC_AVPHYS_PAGES" not in os.sysconf_names:
            return float("inf")
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return float("inf")
    return 0.8 * float(module.mem_get_info(device)[0])
