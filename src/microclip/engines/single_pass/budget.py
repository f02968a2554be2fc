"""How many micro-batches to take at once, so that a single pass stays within a memory budget."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from microclip.microbatches import Cuts, axis_of

UNSEEN = 1.05  # for what is not counted
PASSING = 2.5  # times a layer's largest tensor: gradients that come in and go out, and their copies
KEPT = 1.5  # times what the forward pass saves: what the backward pass may keep
LITTLE = 2**20  # bytes that nobody minds
ROOMY = 3  # times the same: a limit that leaves so much is none
PROBE = 8  # a batch whose needs are unknown starts with an eighth of it, under a given limit


class Budget:
    """Learns what an example takes, and cuts batches into chunks that fit.

    Args:
        limit: Bytes that a step may hold beside parameters and optimizer; None: what the device
            has free.
    """

    def __init__(self, limit: int | None) -> None:
        self._given = limit
        self._limits: dict[torch.device, float] = {}
        # what was measured, by the class of an example's number of elements
        self._seen: dict[int, _Need] = {}
        self.with_adoption: set[int] = set()  # numbers of examples with which guesses went well
        self.without_adoption: set[int] = set()  # numbers of examples that misled the recorder

    def is_tight(self, cuts: Cuts, parameters: dict[str, nn.Parameter]) -> bool:
        """Whether memory goes before time."""
        if self._given is None:
            return False
        seen = self._seen.get(_class(cuts))
        return seen is None or ROOMY * seen.saved * _times(cuts, seen) > self._room(parameters)

    def chunks(self, cuts: Cuts, parameters: dict[str, nn.Parameter]) -> Iterator[Cuts]:
        """Yield the micro-batches in portions; each is visited before the next is asked for."""
        rest = cuts
        while rest:
            fitting = self._count(rest, parameters)
            portions = -(-len(rest) // fitting)  # alike, so that memory is used again
            count = -(-len(rest) // portions)
            chunk, rest = rest[:count], rest[count:]
            yield chunk

    def _count(self, cuts: Cuts, parameters: dict[str, nn.Parameter]) -> int:
        """Return how many of the micro-batches can be visited at once."""
        seen = self._seen.get(_class(cuts))
        if seen is None:
            return len(cuts) if self._given is None else max(1, len(cuts) // PROBE)
        need = seen.peak * _growth(cuts, seen) * max(cuts.sizes)
        if not need:  # nothing is saved but what was there before
            return len(cuts)
        return max(1, min(len(cuts), int(self._room(parameters) / need)))

    @contextmanager
    def learning(self, cuts: Cuts, parameters: dict[str, nn.Parameter]) -> Iterator[Meter | None]:
        """Measure what goes on inside the block, if batches like this one are new.

        A few examples tell less than many: what all of them share counts for each.
        """
        seen, examples = self._seen.get(_class(cuts)), cuts.examples
        if seen and examples < 2 * seen.examples:
            yield None
            return
        meter = Meter([*parameters.values(), *cuts.leaves])
        yield meter
        needs = [total / examples for total in (meter.saved, meter.peak)]
        self._seen[_class(cuts)] = _Need(examples, _elements(cuts), *needs)

    def to_keep(
        self, cuts: Cuts, parameters: dict[str, nn.Parameter], least: int, meter: Meter | None
    ) -> float:
        """Return what a backward pass may keep of weights, if that makes it faster.

        Somewhat more than the forward pass saved, which makes room by then; under a limit no more
        than that leaves beside the least.
        """
        if meter:
            return max(LITTLE, KEPT * meter.saved) if self._given is None else 0.0
        seen = self._seen[_class(cuts)]
        times = _times(cuts, seen)
        left = self._room(parameters) - seen.peak * times
        return min(max(LITTLE, KEPT * seen.saved * times), least + max(0.0, left))

    def _room(self, parameters: dict[str, nn.Parameter]) -> float:
        """Return the bytes for what can be counted beforehand."""
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
    examples: int  # on which it was measured
    elements: int  # of an example
    saved: float  # bytes per example, for the backward pass
    peak: float  # bytes per example that are held at once


class Meter:
    """Counts the bytes that passes hold; memory that tensors share is counted once.

    Args:
        known: Tensors that were there before, which do not count.
    """

    def __init__(self, known: list[Tensor]) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._waiting: dict[int, int] = {}  # how often a storage is still to be asked for
        self._left = 0  # of what was saved
        self._passing = 0  # the largest tensor of the layer that the backward pass is at
        self._kept = 0
        self.saved = 0
        self.peak = 0.0

    def save(self, tensor: Tensor) -> Tensor:
        """Take note of a tensor that the forward pass saves."""
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
        self._look()
        return tensor

    def use(self, tensor: Tensor) -> Tensor:
        """Take note that the backward pass has come to a tensor, which it then lets go."""
        if tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if address in self._waiting:
            self._passing = max(self._passing, nbytes)
            self._look()
            self._waiting[address] -= 1
            self._left -= nbytes * (self._waiting[address] == 0)
        return tensor

    def keep(self, nbytes: int) -> None:
        """Take note of what is kept of a layer."""
        self._kept += nbytes
        self._look()
        self._passing = 0

    def _look(self) -> None:
        self.peak = max(self.peak, self._left + self._kept + PASSING * self._passing)


def _elements(cuts: Cuts) -> int:
    """Return how many numbers an example has."""
    return sum(leaf.numel() // leaf.shape[axis_of(leaf, cuts.batch_dim)] for leaf in cuts.leaves)


def _class(cuts: Cuts) -> int:
    """Return which batches are taken for alike: those with examples of about one size.

    Within a class, needs are taken to grow with the square, as those of attention do.
    """
    return _elements(cuts).bit_length()


def _growth(cuts: Cuts, seen: _Need) -> float:
    """Return how much more an example needs than one of those seen."""
    return max(1.0, _elements(cuts) / seen.elements) ** 2


def _times(cuts: Cuts, seen: _Need) -> float:
    """Return how much more these examples need than one of those seen."""
    return cuts.examples * _growth(cuts, seen)


def free_memory(device: torch.device) -> float:
    """Return what a step may take of a device by default; no limit where it cannot be asked."""
    if device.type == "cpu":
        if "SC_AVPHYS_PAGES" not in os.sysconf_names:
            return float("inf")
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return float("inf")
    return 0.8 * float(module.mem_get_info(device)[0])
