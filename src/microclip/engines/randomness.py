"""Random numbers: saving and restoring generator states, and disabling dropout and other noise.

Two passes over a micro-batch must draw the same masks, so states are restored in between. Two
engines draw random numbers in different orders and would get different masks from one seed, so
while they are compared dropout passes everything through, and noise becomes a constant. Random
choices of examples (permutations, samples) are left alone: with those, engines cannot be compared.
"""

from __future__ import annotations

import pickle
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from microclip.engines.single_pass.torch_functions import is_composite, without_dispatch

DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
}

# run checkpointed segments again
BACKWARD = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}

# the constants in place of normal and uniform noise
NORMAL, UNIFORM = 0.3, 0.5


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


def numpy_class(*path: str) -> Any:
    """Return a numpy class, or () for isinstance if numpy is not imported."""
    found: Any = sys.modules.get("numpy")
    for name in path:
        found = getattr(found, name, ())
    return found


def generator_state(value: Any) -> Any:
    """Return the state of a random generator in comparable form; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate()
    if isinstance(value, numpy_class("random", "Generator")):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, numpy_class("random", "RandomState")):
        return pickle.dumps(value.get_state(legacy=False))
    return None


def set_generator_state(generator: Any, state: Any) -> None:
    """Restore the state of a random generator."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(state, dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, numpy_class("random", "Generator")):
        generator.bit_generator.state = pickle.loads(state)
    else:
        generator.set_state(pickle.loads(state))


def _constant(fill: float, like: bool) -> Any:
    """Return a function that makes a constant tensor in place of a random one."""

    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("generator", None)
        return (torch.zeros_like if like else torch.zeros)(*args, **kwargs).add(fill)

    return make


def _normal(tensor: Any, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Any:
    return tensor.fill_(mean + NORMAL * std)


def _uniform(tensor: Any, *bounds: float, generator: Any = None, **named: float) -> Any:
    low, high = (*bounds, *(0.0, 1.0)[len(bounds) :])
    return tensor.fill_((named.get("from", low) + named.get("to", high)) * UNIFORM)


def _bernoulli(tensor: Any, p: Any = None, *, generator: Any = None, **options: Any) -> Any:
    if p is not None or options:
        return NotImplemented
    return (tensor >= 0.5).to(tensor.dtype)


NOISE: dict[Any, Any] = {
    torch.rand: _constant(UNIFORM, like=False),
    torch.randn: _constant(NORMAL, like=False),
    torch.rand_like: _constant(UNIFORM, like=True),
    torch.randn_like: _constant(NORMAL, like=True),
    torch.Tensor.normal_: _normal,
    torch.Tensor.uniform_: _uniform,
    torch.bernoulli: _bernoulli,
}


class DropoutDisabled(TorchFunctionMode):
    """Inside the block, dropout does nothing and noise is constant."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPOUTS:
            return kwargs["input"] if "input" in kwargs else args[0]
        if func in NOISE:
            found = NOISE[func](*args, **kwargs)
            if found is not NotImplemented:
                return found
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        if is_composite(func) or func in BACKWARD:
            with self:  # intercept what it calls
                return without_dispatch(func)(*args, **kwargs)
        return func(*args, **kwargs)
