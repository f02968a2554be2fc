"""A recipe: what is trained, on what, and how it is judged. Knows nothing of how it is trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn
from torch.utils.data import default_collate

from microclip_lab.training.batch_rng import Draws
from microclip_lab.training.config import Training

Example = TypeVar("Example")
Record = TypeVar("Record")


@dataclass(frozen=True)
class Data(Generic[Example]):
    """What a recipe trains on and is judged by.

    Anything with a length that gives an example for a row number will do: a list, a torch Dataset,
    something that reads files when asked.
    """

    training: Sequence[Example]
    validation: Sequence[Example]  # what checkpoints and learning rates are chosen by
    test: Sequence[Example]  # looked at once, when training has ended
    ids: Sequence[int | str] | None = None  # of the training examples; their rows unless given
    domains: Sequence[str] | None = None  # of the training examples, if they have any
    facts: Mapping[str, Any] = field(default_factory=dict)  # for the page: sizes, shares of noise


class Recipe(ABC, Generic[Example, Record]):
    """Subclass it as a dataclass: its fields are options of the command line, the docstrings help.

    A record is what `judge` has to say of one example; records of all processes are brought
    together, and `summary` makes figures of them.
    """

    name: ClassVar[str]
    headline: ClassVar[str]  # the figure of `summary` that checkpoints are chosen by
    lower_is_better: ClassVar[bool] = False

    @classmethod
    def presets(cls) -> Mapping[str, tuple[Recipe[Any, Any], Training]]:
        """Return ready-made choices by name; "default" is what runs if none is named."""
        return {"default": (cls(), Training())}

    @abstractmethod
    def load(self, seed: int) -> Data[Example]:
        """Return the data; what is drawn (splits, wrong labels) depends on the seed alone."""

    @abstractmethod
    def build(self, data: Data[Example]) -> nn.Module:
        """Return the model; torch's generator has been seeded."""

    def collate(self, examples: Sequence[Example], draws: Draws | None) -> Any:
        """Return a batch: tensors with the examples along their first dimension, in any nesting.

        With `draws` it is for training, and may be augmented; without, for being judged.
        """
        return default_collate(list(examples))

    @abstractmethod
    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """Return one loss per example. Call the model itself: on several processes it is wrapped,
        and its parts do not know of the others.
        """

    @abstractmethod
    def judge(self, model: nn.Module, batch: Any) -> Sequence[Record]:
        """Return what is to be said of each example, gradients off: small and picklable."""

    @abstractmethod
    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Return figures, `headline` among them, of all records."""

    def describe(self, data: Data[Example], row: int) -> Mapping[str, Any]:
        """Return how the page shows a training example: image, audio or text, label, truth."""
        return {}
