"""How a Clipper's model is spread over ranks: wrapped for DDP, sharded for FSDP, or neither.

One object that finds out and answers for the rest of the Clipper. Finding wrappers is left to
`microclip.wrappers` and `detection`; exchanging norms and gradients to `ddp`, `fsdp` and `ranks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import nn

from microclip.distributed.ddp import Ddp
from microclip.distributed.detection import LossCommunication, OuterWrapper, refuse_late_sharding
from microclip.engines.gradients import Gradients
from microclip.engines.select import Scope
from microclip.wrappers import is_sharded, refuse_unsupported, world_size

if TYPE_CHECKING:
    from microclip.distributed.fsdp import Fsdp
    from microclip.distributed.ranks import Ranks


class Parallelism:
    """What is known about the ranks that train a model together."""

    def __init__(self, model: nn.Module, scope: Scope) -> None:
        self._model = model
        refuse_unsupported(model)
        self.ddp = Ddp.find(model)
        self.fsdp = _find_fsdp(model, scope)
        self.ranks: Ranks | None = None  # those to exchange norms with
        if self.ddp is not None:
            self.ranks = self.ddp.ranks
        elif self.fsdp is not None:
            self.ranks = self.fsdp.norm_exchange
        self.outer_wrapper: OuterWrapper | None = None
        self.communication: LossCommunication | None = None
        self.detect()

    def detect(self) -> None:
        """Check for other ranks, which may have joined after the Clipper was made."""
        if self.outer_wrapper is None and world_size() > 1 and self.fsdp is None:
            self.outer_wrapper = OuterWrapper(self._model)
            self.communication = LossCommunication(self._model)

    def begin(self, step: int) -> None:
        """Start a step; with DDP on every rank, with or without examples."""
        self.detect()
        if self.ddp is not None:
            self.ddp.begin(step)

    def reshard(self) -> None:
        """Before parameters are listed, put those that the optimizer has back in place."""
        if self.fsdp is not None:
            self.fsdp.reshard()
        else:
            refuse_late_sharding(self._model)

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside the block, gradients stay on this rank."""
        with (
            nullcontext() if self.ddp is None else self.ddp.local(),
            nullcontext() if self.outer_wrapper is None else self.outer_wrapper.refused(),
        ):
            yield

    def refuse_own_backward(self) -> None:
        """Refuse gradients of the user's own backward pass if they are sharded."""
        if self.fsdp is not None:
            raise NotImplementedError(
                "fold() after your own backward would take gradients that FSDP has already "
                "averaged over ranks, and only this rank's shards of them. Use "
                "backward(loss_fn, batch) or fold(loss_fn, chunk). `.grad` is unchanged."
            )

    def expect_local(self) -> None:
        """Check that no wrapper has averaged the gradients in `.grad` over ranks."""
        self.detect()
        if self.ddp is not None:
            self.ddp.expect_local()
        if self.outer_wrapper is not None:
            self.outer_wrapper.expect_none()

    def sum(
        self, step: int, gradients: Gradients, parameters: dict[str, nn.Parameter]
    ) -> Gradients:
        """Return the sum over ranks, if they hold whole gradients that are not summed yet."""
        return gradients if self.ddp is None else self.ddp.ranks.sum(step, gradients, parameters)


def _find_fsdp(model: nn.Module, scope: Scope) -> Fsdp | None:
    """Return how a model is sharded; imports FSDP only if it is."""
    found = None
    if is_sharded(model):
        from microclip.distributed.fsdp import Fsdp

        found = Fsdp.find(model, scope)
    if scope == "world" and found is None:
        raise ValueError(
            'scope="world" is for models sharded with fully_shard(): on others, each rank has its '
            "own gradients."
        )
    return found
