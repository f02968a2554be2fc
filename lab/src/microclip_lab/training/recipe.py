"""A recipe: what is trained, on which data, and how it is evaluated. Knows nothing of the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn
from torch.utils.data import default_collate

from microclip_lab.training.batch_rng import BatchRng
from microclip_lab.training.config import Training

Example = TypeVar("Example")
Record = TypeVar("Record")


@dataclass(frozen=True)
class Data(Generic[Example]):
    """The data of a recipe.

    Anything with a length that returns an example for a row number will do: a list, a torch
    Dataset, something that reads files on demand.
    """

    training: Sequence[Example]
    validation: Sequence[Example]  # selects checkpoints and learning rates
    test: Sequence[Example]  # evaluated once, at the end of training
    ids: Sequence[int | str] | None = None  # of the training examples; default: their rows
    domains: Sequence[str] | None = None  # of the training examples, if they have any
    facts: Mapping[str, Any] = field(default_factory=dict)  # for the page: sizes, shares of noise


class Recipe(ABC, Generic[Example, Record]):
    """Subclass it as a dataclass: fields become command-line options, their docstrings the help.

    A record is what `judge` returns for one example. The records of all processes are gathered, and
    `summary` turns them into figures.
    """

    name: ClassVar[str]
    headline: ClassVar[str]  # the figure of `summary` that selects checkpoints
    lower_is_better: ClassVar[bool] = False

    @classmethod
    def presets(cls) -> Mapping[str, tuple[Recipe[Any, Any], Training]]:
        """Return settings by name; "default" is used if no preset is named."""
        return {"default": (cls(), Training())}

    @abstractmethod
    def load(self, seed: int) -> Data[Example]:
        """Return the data; random choices (splits, wrong labels) depend on the seed alone."""

    @abstractmethod
    def build(self, data: Data[Example]) -> nn.Module:
        """Return the model; torch's global generator has been seeded."""

    def collate(self, examples: Sequence[Example], rng: BatchRng | None) -> Any:
        """Return a batch: tensors with examples along the first dimension, nested in any way.

        With `rng`, the batch is for training and may be augmented; without, for evaluation.
        """
        return default_collate(list(examples))

    @abstractmethod
    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """Return one loss per example. Call the model itself, not its submodules: on several
        processes it is wrapped, and only the wrapper synchronizes.
        """

    @abstractmethod
    def judge(self, model: nn.Module, batch: Any) -> Sequence[Record]:
        """Return one small, picklable record per example; gradients are off."""

    @abstractmethod
    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Return figures computed from all records; `headline` must be among them."""

    def describe(self, data: Data[Example], row: int) -> Mapping[str, Any]:
        """Return what the page shows of a training example: image, audio or text, label, truth."""
        return {}
