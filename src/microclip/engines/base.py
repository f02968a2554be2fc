"""What all engines have in common: what they work on, and the two verbs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import nn
from torch.amp import GradScaler

from microclip.engines.gradients import Gradients
from microclip.engines.losses import LossFn
from microclip.engines.snapshot import Memory
from microclip.engines.tally import Tally
from microclip.microbatches import Cuts


class CannotFuseError(NotImplementedError):
    """The model does something that a single pass cannot take apart into micro-batches."""


MEAN_LOSS = (
    "The single-pass engine needs one loss per example, but loss_fn gives their mean. Return the "
    'losses themselves, as reduction="none" does.'
)


class MeanLossError(CannotFuseError):
    """`loss_fn` gives the mean of its examples' losses, of which nothing can be taken apart."""


class MismatchError(RuntimeError):
    """A single pass disagrees with the gradient of a micro-batch run alone."""


class Engine(ABC):
    """Made for one step; takes micro-batches with `fold` and gives the gradient with `finish`."""

    name: ClassVar[str]

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        tally: Tally,
        scaler: GradScaler | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.tally = tally
        self.scaler = scaler
        self.memory = Memory(model) if memory is None else memory
        self.device = next(iter(parameters.values())).device

    @abstractmethod
    def fold(self, loss_fn: LossFn, microbatches: Cuts, final: bool) -> None:
        """Take in micro-batches; `final`: no others will follow. `.grad` is left as it was."""

    @abstractmethod
    def finish(self) -> Gradients:
        """Return sum_j coefficient_j g_j, once all micro-batches have been taken in."""
