"""How many micro-batches to take at once, so that a single pass stays within a memory budget."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from microclip.engines.fused.workspace import Workspace
from microclip.microbatches import Cuts

UNSEEN = 1.1  # for what is not counted
RESERVE = 1.25  # for what the workspace lends only for a moment
PROBE = 8  # a batch whose needs are unknown starts with an eighth of it, under a tight budget


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
        size = max(cuts.sizes)
        seen = self._seen.get(_class(cuts))
        if seen is None:
            return len(cuts) if self._given is None else max(1, len(cuts) // PROBE)
        need = (seen.saved - seen.lent + seen.kept + seen.passing) * _growth(cuts, seen)
        if not need:  # nothing is saved but what was there before
            return len(cuts)
        return max(1, min(len(cuts), int(self._room(parameters) / (need * size))))

    @contextmanager
    def learning(
        self, cuts: Cuts, parameters: dict[str, nn.Parameter], workspace: Workspace
    ) -> Iterator[Meter | None]:
        """Measure what goes on inside the block, if batches like this one are new.

        A few examples tell less than many: what all of them share counts for each.
        """
        seen, examples = self._seen.get(_class(cuts)), cuts.examples
        if seen and examples < 2 * seen.examples:
            yield None
            return
        meter = Meter([*parameters.values(), *cuts.leaves], workspace)
        yield meter
        kept = workspace.touched or meter.kept
        totals = (meter.saved, meter.lent, kept, 2 * meter.largest)
        needs = [total / examples for total in totals]
        self._seen[_class(cuts)] = _Need(examples, _elements(cuts), *needs)

    def to_keep(
        self, cuts: Cuts, parameters: dict[str, nn.Parameter], meter: Meter | None
    ) -> float:
        """Return what a backward pass may keep, if that makes it faster.

        As much as the forward pass saved, and half of what it put into the workspace, which makes
        room by then; under a limit only what that leaves.
        """
        if meter:
            return meter.saved + meter.lent / 2 if self._given is None else 0.0
        seen = self._seen[_class(cuts)]
        saved = seen.saved * cuts.examples * _growth(cuts, seen)
        if self._given is None:
            return saved + seen.lent / 2 * cuts.examples * _growth(cuts, seen)
        passing = seen.passing * cuts.examples * _growth(cuts, seen)
        return min(saved, self._room(parameters) - saved - passing)

    def at_rest(self, cuts: Cuts) -> float:
        """Return what the workspace may hold: what is kept, and what the forward pass puts there.

        A plain step would hold what the forward pass saves as well, so this at most doubles it.
        """
        seen = self._seen[_class(cuts)]
        return RESERVE * (seen.saved + seen.lent) * cuts.examples * _growth(cuts, seen)

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
    lent: float  # those of them that the workspace lent
    kept: float  # what the workspace needs, or what is kept without one
    passing: float  # what comes and goes: gradients of the largest tensor, before and after a layer


class Meter:
    """Counts the bytes that a forward pass saves; memory that tensors share is counted once.

    Args:
        known: Tensors that were there before, which do not count.
        workspace: Where some of them may lie.
    """

    def __init__(self, known: list[Tensor], workspace: Workspace) -> None:
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._workspace = workspace
        self.saved = self.lent = self.kept = self.largest = 0

    def count(self, tensor: Tensor) -> Tensor:
        """Count a tensor's memory, if it is new."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.saved += storage.nbytes()
            self.largest = max(self.largest, storage.nbytes())
            self.lent += storage.nbytes() * self._workspace.holds(storage.data_ptr())
        return tensor


def _elements(cuts: Cuts) -> int:
    """Return how many numbers an example has."""
    return sum(leaf.numel() // leaf.shape[0] for leaf in cuts.leaves)


def _class(cuts: Cuts) -> int:
    """Return which batches are taken for alike: those with examples of about one size.

    Within a class, needs are taken to grow with the square, as those of attention do.
    """
    return _elements(cuts).bit_length()


def _growth(cuts: Cuts, seen: _Need) -> float:
    """Return how much more an example needs than one of those seen."""
    return max(1.0, _elements(cuts) / seen.elements) ** 2


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
