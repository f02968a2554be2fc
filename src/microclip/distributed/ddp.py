"""DistributedDataParallel: its gradients are kept from being averaged before they are clipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from microclip.distributed.ranks import Ranks


class Ddp:
    """What a Clipper asks of a wrapped model."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper
        device = next(wrapper.module.parameters()).device
        self.ranks = Ranks(wrapper.process_group, device)

    @classmethod
    def find(cls, model: nn.Module) -> Ddp | None:
        """Return it for a model that is wrapped, perhaps compiled as well; None for others."""
        inner = getattr(model, "_forward_module", model)  # what Lightning's Fabric wraps once more
        inner = getattr(inner, "_orig_mod", inner)
        return cls(inner) if isinstance(inner, DistributedDataParallel) else None

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside the block, gradients stay on their rank."""
        wrapper = self._wrapper
        before = wrapper.require_backward_grad_sync, wrapper.static_graph
        wrapper.require_backward_grad_sync = False  # all that its own no_sync() does
        wrapper.static_graph = False  # else the first backward pass would reduce nevertheless
        wrapper.require_forward_param_sync = False  # ranks without examples would not take part
        try:
            yield
        finally:
            wrapper.require_backward_grad_sync, wrapper.static_graph = before
            wrapper.require_forward_param_sync = True  # whoever comes next, gets the same buffers

    @property
    def is_local(self) -> bool:
        """Whether we are inside such a block, or one of the user's own."""
        return not self._wrapper.require_backward_grad_sync

    @torch.no_grad()
    def align_buffers(self) -> None:
        """Give every rank the first one's buffers, as the wrapper does at the start of a step."""
        ignored = self._wrapper.parameters_to_ignore
        named = self._wrapper.module.named_buffers()
        buffers = [buffer for name, buffer in named if name not in ignored]
        if buffers and self._wrapper.broadcast_buffers:
            self.ranks.copy_from_first(buffers)
