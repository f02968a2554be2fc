"""The arms of a task: ways to train one and the same thing, to be compared with each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Tuned = Literal["learning_rate", "max_grad_norm", "bound"]
Replayed = Literal["gradient_norm", "bound"]

PLAIN = "plain"


@dataclass(frozen=True)
class Arm:
    """One way to train a task.

    Every arm has one number that is chosen on validation data, on seeds of their own: its learning
    rate, or, for clipping with a given bound, that bound at the learning rate of another arm.
    """

    name: str  # within its task, and of folders: lower case, digits and hyphens
    about: str  # for whoever reads the page
    training: Mapping[str, Any] = field(default_factory=dict)  # changes of the task's Training
    recipe: Mapping[str, Any] = field(default_factory=dict)  # changes of its recipe
    tuned: Tuned | None = "learning_rate"
    values: tuple[float, ...] = ()  # the first ones to try; the task's rates unless given
    rate_of: str | None = None  # the arm whose learning rate it has, if it is not tuned itself
    replays: Replayed | None = None  # plain steps as long as this figure of `source`
    shares_of: str | None = None  # losses weighted as this arm weighted its domains
    source: str | None = None  # the arm that is replayed
    looks_inside: bool = False  # look at per-example gradients along the way
    keeps_course: bool = False  # keep the bound and the gradient's norm of every step

    def __post_init__(self) -> None:
        if self.tuned != "learning_rate" and self.rate_of is None:
            raise ValueError(f"The arm {self.name!r} has no learning rate: give it rate_of.")
        if (self.replays is None) != (self.source is None):
            raise ValueError(
                f"The arm {self.name!r} must have both of replays and source, or none."
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """The arms that must be done before this one."""
        return tuple(name for name in (self.rate_of, self.source, self.shares_of) if name)


def clipped(size: int, rule: str = "MinNorm", **changes: Any) -> Arm:
    """Return the arm of a rule at a micro-batch size.

    >>> clipped(4).name, clipped(1, "Unit").name
    ('b4', 'unit-b1')
    """
    name = f"b{size}" if rule == "MinNorm" else f"{rule.lower()}-b{size}"
    about = f"micro-batches of {size}" + ("" if rule == "MinNorm" else f", rule {rule}")
    training = {"microbatch_size": size, "rule": rule, **changes.pop("training", {})}
    return Arm(changes.pop("name", name), changes.pop("about", about), training, **changes)
