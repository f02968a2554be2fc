"""Leaving a model as it was found: gradients, buffers, random numbers, training mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from microclip.engines.gradients import set_aside
from microclip.engines.randomness import RandomState
from microclip.engines.two_pass import copies_of_buffers, put_back


@contextmanager
def undisturbed(model: nn.Module, parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """Inside the block anything may be run; afterwards it is as if nothing had been."""
    state = RandomState.now({parameter.device for parameter in parameters.values()})
    buffers = copies_of_buffers(model)
    modes = [(module, module.training) for module in model.modules()]
    try:
        with set_aside(parameters):
            yield
    finally:
        put_back(model, buffers)
        state.restore()
        for module, mode in modes:
            module.training = mode
