"""Saving and restoring random states, so that dropout draws the same masks in two passes."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The state of torch's global generators, on the host and on the model's devices."""

    host: Tensor
    devices: dict[torch.device, Tensor]

    @classmethod
    def now(cls, devices: set[torch.device]) -> RandomState:
        """Read the current state."""
        accelerators = {device for device in devices if device.type != "cpu"}
        states = {d: torch.get_device_module(d).get_rng_state(d) for d in accelerators}
        return cls(torch.get_rng_state(), states)

    def equals(self, other: RandomState) -> bool:
        """Whether no random number was drawn in between."""
        mine, theirs = (self.host, *self.devices.values()), (other.host, *other.devices.values())
        return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def restore(self) -> None:
        """Return to this state."""
        torch.set_rng_state(self.host)
        for device, state in self.devices.items():
            torch.get_device_module(device).set_rng_state(state, device)


@dataclass(frozen=True)
class Randomness:
    """The states of the global generators of torch, Python and numpy."""

    tensors: RandomState
    python: Any
    numpy: Any

    @classmethod
    def now(cls, devices: set[torch.device]) -> Randomness:
        """Read the current state."""
        numpy = sys.modules.get("numpy")
        state = None if numpy is None else numpy.random.get_state(legacy=False)
        return cls(RandomState.now(devices), random.getstate(), state)

    def moved(self, devices: set[torch.device]) -> bool:
        """Whether any random number was drawn since."""
        now = Randomness.now(devices)
        if not now.tensors.equals(self.tensors) or now.python != self.python:
            return True
        if self.numpy is None or now.numpy is None:
            return False
        mine, theirs = self.numpy["state"], now.numpy["state"]
        return any(
            bool((a != b).any()) if hasattr(a, "any") else a != b
            for a, b in zip(mine.values(), theirs.values(), strict=True)
        )

    def restore(self) -> None:
        """Return to this state."""
        self.tensors.restore()
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
