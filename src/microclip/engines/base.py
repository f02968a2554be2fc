"""What all engines share: their inputs, the two verbs `fold` and `finish`, and their errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from torch import nn
from torch.amp import GradScaler

from microclip.engines.gradients import Gradients, LossFn
from microclip.engines.snapshot import SideEffects
from microclip.engines.step_record import StepRecord
from microclip.microbatches import MicrobatchList


class CannotFuseError(NotImplementedError):
    """The model does something that a single pass cannot split into micro-batches."""


MEAN_LOSS = (
    "The single-pass engine needs one loss per example, but loss_fn returns their mean. Return the "
    'losses themselves, as with reduction="none".'
)


class MeanLossError(CannotFuseError):
    """`loss_fn` returns the mean over its examples, which a single pass cannot split."""


class MismatchError(RuntimeError):
    """A single pass disagrees with the gradient of a micro-batch run on its own."""


class Engine(ABC):
    """Made for one step: takes micro-batches with `fold`, returns the gradient with `finish`."""

    name: ClassVar[str]

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        record: StepRecord,
        scaler: GradScaler | None = None,
        side_effects: SideEffects | None = None,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.record = record
        self.scaler = scaler
        self.side_effects = SideEffects(model) if side_effects is None else side_effects
        self.device = next(iter(parameters.values())).device

    @property
    def expects_check(self) -> bool:
        """Whether this step will be compared with another engine's, and perhaps redone."""
        return False

    @abstractmethod
    def fold(self, loss_fn: LossFn, microbatches: MicrobatchList, final: bool) -> None:
        """Add micro-batches; `final`: no others will follow. `.grad` is left unchanged."""

    @abstractmethod
    def finish(self) -> Gradients:
        """Return sum_j coefficient_j g_j, once all micro-batches have been added."""


class ShardedEngines(Protocol):
    """Makes the engines for a sharded model, which the usual ones cannot train."""

    def make(self, name: str, record: StepRecord, scaler: GradScaler | None) -> Engine:
        """Return the engine for one step; `name` is the engine that the user requested."""
        ...
