"""Disabling dropout and other noise, so that the gradients of two engines can be compared.

Engines draw random numbers in different orders and would get different masks from one seed. So
dropout passes everything through, and noise becomes a constant. Random choices of examples
(permutations, samples) are left alone: with those, engines cannot be compared.
"""

from __future__ import annotations

from typing import Any

import torch
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


# the constants in place of normal and uniform noise
NORMAL, UNIFORM = 0.3, 0.5


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
        if is_composite(func):
            with self:  # intercept what it calls
                return without_dispatch(func)(*args, **kwargs)
        return func(*args, **kwargs)
