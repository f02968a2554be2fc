"""What can be asked of the records: each quantity is one number per seed. Data only; see `effects`.

All are oriented as they are named. A seed's runs share data, first weights and the order of
examples, so quantities of one seed compare like with like, and intervals are over seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from microclip_lab.reproduction.arms import PLAIN

Cosine = Literal["dragger_benign", "benign_benign", "dragger_dragger"]
Orientation = Literal["dragger_over_benign", "benign_over_dragger"]


@dataclass(frozen=True)
class Gain:
    """How much better an arm is than another one: points of accuracy, or of error rate saved.

    Of several arms, the one with the best mean validation figure over the evaluation seeds is
    taken: which one it is, test data must not decide.
    """

    task: str
    arms: tuple[str, ...]
    against: str = PLAIN
    figures: tuple[str, ...] = ()  # the mean of these; the task's own figure unless given


@dataclass(frozen=True)
class Rise:
    """By how much a figure is higher in an arm than in another one, in points."""

    task: str
    arm: str
    figure: str
    against: str = PLAIN


@dataclass(frozen=True)
class CosineGap:
    """A mean cosine minus another one, over the moments of an arm's runs but the first."""

    task: str
    one: Cosine
    other: Cosine
    arm: str = PLAIN


@dataclass(frozen=True)
class CosineLevel:
    """A mean cosine, over the moments of an arm's runs but the first."""

    task: str
    which: Cosine
    arm: str = PLAIN


@dataclass(frozen=True)
class Speed:
    """Binary logarithm of how many times fewer steps an arm needs than another one.

    Counted until the worse of both runs' best validation figures is first reached, so that both
    do reach it. 1: half the steps; 0: as many; -1: twice as many.
    """

    task: str
    arm: str
    against: str = PLAIN


@dataclass(frozen=True)
class Slope:
    """How a ratio of norms changes with b: slope of its logarithm over that of b.

    At the last moment of training ("step"), or where the loss of benign examples is that of the
    arm that ended with the highest one ("loss"), between moments by interpolation.
    """

    task: str
    arms: tuple[str, ...]  # of ascending b; plain training stands for b = B
    orientation: Orientation
    matched: Literal["step", "loss"]


Quantity = Gain | Rise | CosineGap | CosineLevel | Speed | Slope
