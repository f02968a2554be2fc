"""Holding randomness still: dropout lets everything through, so that two engines can be compared.

Engines ask for random numbers in different orders, and would draw different masks from one seed.
Noise is the same number everywhere. What chooses examples by chance (permutations, samples) is
left as it is: of that nothing could be said.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from microclip.engines.single_pass.record import is_composite, without_dispatch

DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
}


# what noise is while it is held still, of a normal and of a uniform distribution
NORMAL, UNIFORM = 0.3, 0.5


def _made(fill: float, like: bool) -> Any:
    """Return what makes a tensor of one number in place of a random one."""

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
    torch.rand: _made(UNIFORM, like=False),
    torch.randn: _made(NORMAL, like=False),
    torch.rand_like: _made(UNIFORM, like=True),
    torch.randn_like: _made(NORMAL, like=True),
    torch.Tensor.normal_: _normal,
    torch.Tensor.uniform_: _uniform,
    torch.bernoulli: _bernoulli,
}


class Still(TorchFunctionMode):
    """Inside the block, dropout does nothing, and noise is a constant."""

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
            with self:  # look inside
                return without_dispatch(func)(*args, **kwargs)
        return func(*args, **kwargs)
