"""Replaying random numbers, so that dropout draws the same masks in two passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The state of torch's generators, on the host and on the model's devices.

    Python's and numpy's generators are not part of it: `loss_fn` should draw from torch.
    """

    host: Tensor
    devices: dict[torch.device, Tensor]

    @classmethod
    def now(cls, devices: set[torch.device]) -> RandomState:
        """Read the present state."""
        accelerators = {device for device in devices if device.type != "cpu"}
        states = {d: torch.get_device_module(d).get_rng_state(d) for d in accelerators}
        return cls(torch.get_rng_state(), states)

    def equals(self, other: RandomState) -> bool:
        """Whether no random number was drawn between the two."""
        mine, theirs = (self.host, *self.devices.values()), (other.host, *other.devices.values())
        return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def restore(self) -> None:
        """Make this the present state again."""
        torch.set_rng_state(self.host)
        for device, state in self.devices.items():
            torch.get_device_module(device).set_rng_state(state, device)
