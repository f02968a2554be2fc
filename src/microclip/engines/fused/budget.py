"""How many micro-batches to take at once, so that a single pass stays within a memory budget."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from microclip.engines.fused.workspace import Workspace
from microclip.microbatches import Cuts, tensors_of

PASSING = 1.5  # what comes and goes within a pass is not counted, only guessed
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
            count = self._count(rest, parameters)
            chunk, rest = rest.split(count)
            yield chunk

    def _count(self, cuts: Cuts, parameters: dict[str, nn.Parameter]) -> int:
        size = max(microbatch.size for microbatch in cuts)
        seen = self._seen.get(_class(cuts))
        if seen is None:
            return len(cuts) if self._given is None else max(1, len(cuts) // PROBE)
        need = (
            PASSING
            * (seen.saved - seen.lent + seen.kept)
            * max(1.0, _elements(cuts) / seen.elements) ** 2
        )
        gradient = sum(p.numel() * p.element_size() for p in parameters.values())
        room = self._limit(next(iter(parameters.values())).device) - gradient
        return max(1, min(len(cuts), int(room / (need * size))))

    @contextmanager
    def learning(
        self, cuts: Cuts, parameters: dict[str, nn.Parameter], workspace: Workspace
    ) -> Iterator[Meter | None]:
        """Measure what goes on inside the block, if batches like this one are new."""
        if _class(cuts) in self._seen:
            yield None
            return
        meter = Meter(parameters, workspace)
        yield meter
        kept = workspace.nbytes or meter.kept
        totals = [total / _examples(cuts) for total in (meter.saved, meter.lent, kept)]
        self._seen[_class(cuts)] = _Need(_elements(cuts), *totals)

    def allowance(self, cuts: Cuts) -> float:
        """Return what may be kept until the end of a step, and from one step to the next.

        As much as the forward pass saves, which a plain step would hold as well, and as much again
        as it has put into the workspace, which can be used once more by then.
        """
        seen = self._seen.get(_class(cuts))
        return (seen.saved + seen.lent) * _examples(cuts) if seen else 0.0

    def _limit(self, device: torch.device) -> float:
        if self._given is not None:
            return self._given
        if device not in self._limits:
            self._limits[device] = free_memory(device)
        return self._limits[device]


@dataclass(frozen=True)
class _Need:
    elements: int  # of an example
    saved: float  # bytes per example, for the backward pass
    lent: float  # those of them that the workspace lent
    kept: float  # bytes per example: what the workspace needs, or what is kept without one


class Meter:
    """Counts the bytes that a forward pass saves; memory that tensors share is counted once."""

    def __init__(self, parameters: dict[str, nn.Parameter], workspace: Workspace) -> None:
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in parameters.values()}
        self._workspace = workspace
        self.saved = self.lent = self.kept = 0

    @property
    def allowance(self) -> int:
        """Return what may be kept, as `Budget.allowance` does."""
        return self.saved + self.lent

    def count(self, tensor: Tensor) -> Tensor:
        """Count a tensor's memory, if it is new."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.saved += storage.nbytes()
            self.lent += storage.nbytes() * self._workspace.holds(storage.data_ptr())
        return tensor


def _elements(cuts: Cuts) -> int:
    """Return how many numbers an example has."""
    return sum(leaf[0].numel() for _, leaf in tensors_of(cuts[0].batch))


def _class(cuts: Cuts) -> int:
    """Return which batches are taken for alike: those with examples of about one size.

    Within a class, needs are taken to grow with the square, as those of attention do.
    """
    return _elements(cuts).bit_length()


def _examples(cuts: Cuts) -> int:
    return sum(microbatch.size for microbatch in cuts)


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
