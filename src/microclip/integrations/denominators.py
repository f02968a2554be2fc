"""What the loss of some inputs could be the mean over.

Examples and labels are likely. Masks, weights, numbers that are not missing, and labels without one
more value than losses usually ignore are less likely: they are listed so that they can be ruled
out, and are believed only if nothing likelier explains the loss. This module only counts; it never
runs a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from microclip.batches import count_examples
from microclip.integrations.example_losses import IGNORE_INDEX, LossKind

REMEDY = (
    "Set per_device_train_batch_size to at least microbatch_size, so that a micro-batch is part of "
    "one batch."
)
UNLABELED_PIXEL = 255  # the label that segmentation losses ignore
OFTEN_IGNORED = (0, -1)  # labels that custom losses often ignore, besides padding
MAX_CLASSES = 64  # more label values than this are a vocabulary, without class weights


@dataclass(frozen=True)
class Denominator:
    """Something that a loss may be the mean over."""

    name: str
    counts: Callable[[dict[str, Any]], Tensor] | None  # per example; None: the loss is a sum
    likely: bool = True  # if not, believed only if nothing likelier explains the loss
    labels: str | None = None  # the column whose labels it counts

    def total(self, inputs: dict[str, Any]) -> float:
        """Return its value for a batch."""
        if self.counts is None:
            return float(count_examples(inputs))
        return float(self.counts(inputs).sum())

    def without(self, label: int) -> Denominator:
        """Return the same for a loss that ignores one more label."""
        name, counts = f"{self.name}, without {label}", cast("partial[Tensor]", self.counts)
        key, ignored = counts.args
        fewer = partial(counts.func, key, (*ignored, label), **counts.keywords)
        return Denominator(name, fewer, False, key)


def list_candidates(inputs: dict[str, Any], model: nn.Module) -> list[Denominator]:
    """Return what a loss of these inputs may be the mean over, likely ones first."""
    size = count_examples(inputs)
    config = getattr(model, "config", None)
    padding = getattr(config, "pad_token_id", None)
    ignored = dict.fromkeys((*OFTEN_IGNORED, *([padding] if isinstance(padding, int) else [])))
    found = [Denominator("examples", _ones)]
    unlikely: list[Denominator] = []
    for key, value in inputs.items():
        if not isinstance(value, Tensor) or value.dim() < 1 or len(value) != size:
            continue
        if value.is_floating_point():
            unlikely += _of_floats(key, value)
        elif "label" in key or "target" in key:
            labels = _of_labels(key, value)
            found += labels
            if value.dim() > 1:
                counted = [each for each in labels if each.labels]
                unlikely += [each.without(label) for each in counted for label in ignored]
        elif key.endswith("input_ids"):
            if padding is not None and value.dim() > 1:
                unlikely.append(_other_than(key, (padding,), likely=False))
        elif value.dim() == 1 or bool((value <= 1).all()):  # a mask, or a count per example
            unlikely.append(_other_than(key, (0,), likely=False))
            if value.dim() == 1:
                unlikely.append(Denominator(f"the sum of {key}", partial(_sum, key), False))
    if "start_positions" in inputs and "end_positions" in inputs and "input_ids" in inputs:
        found.append(Denominator("answers inside the text", _answers_inside))
    return [*found, *unlikely, Denominator("nothing (a sum)", None)]


def known_denominator(kind: LossKind, inputs: dict[str, Any]) -> Denominator:
    """Return what a known kind of loss is the mean over."""
    name = "what the model's loss counts"
    if kind.counts(inputs["labels"]) is None:
        return Denominator(name, None)
    return Denominator(name, lambda inputs: cast("Tensor", kind.counts(inputs["labels"])))


def one_per_example() -> Denominator:
    """Return what a loss that counts all examples alike is the mean over."""
    return Denominator("examples", _ones)


def _of_labels(key: str, value: Tensor) -> Iterable[Denominator]:
    found = [_other_than(key, (IGNORE_INDEX,))]
    if value.dim() > 1:
        found.append(Denominator(f"all {key}", partial(_all, key)))
    if value.dim() == 2:
        found.append(_other_than(key, (IGNORE_INDEX,), first=1))
    if value.dim() > 2:
        found.append(_other_than(key, (UNLABELED_PIXEL,)))
    return found


def _of_floats(key: str, value: Tensor) -> Iterable[Denominator]:
    if "label" in key or "target" in key or bool(value.isnan().any()):
        yield Denominator(f"{key} that are not NaN", partial(_not_nan, key), False)
    if value.dim() < 3:
        yield Denominator(f"the sum of {key}", partial(_sum, key), False)
    if value.dim() == 1 or "weight" in key or "mask" in key:
        yield Denominator(f"{key} other than 0", partial(_count, key, (0,)), False)


def _other_than(
    key: str, ignored: tuple[int, ...], *, first: int = 0, likely: bool = True
) -> Denominator:
    name = f"{key} other than {ignored[0]}" + (", after the first" if first else "")
    return Denominator(name, partial(_count, key, ignored, first=first), likely, key)


def _ones(inputs: dict[str, Any]) -> Tensor:
    return torch.ones(count_examples(inputs))


def _count(key: str, ignored: tuple[int, ...], inputs: dict[str, Any], first: int = 0) -> Tensor:
    values = inputs[key][:, first:] if first else inputs[key]
    counted = values != ignored[0]
    for label in ignored[1:]:
        counted = counted & (values != label)
    counts: Tensor = counted.reshape(len(values), -1).sum(1)
    return counts


def _all(key: str, inputs: dict[str, Any]) -> Tensor:
    values: Tensor = inputs[key]
    return torch.full((len(values),), float(values[0].numel()))


def _sum(key: str, inputs: dict[str, Any]) -> Tensor:
    values: Tensor = inputs[key]
    values = values.reshape(len(values), -1)
    return values.float().sum(1) if values.is_floating_point() else values.sum(1)


def _not_nan(key: str, inputs: dict[str, Any]) -> Tensor:
    values: Tensor = inputs[key]
    return (~values.isnan()).reshape(len(values), -1).sum(1)


def _answers_inside(inputs: dict[str, Any]) -> Tensor:
    length = inputs["input_ids"].shape[1]
    starts, ends = inputs["start_positions"] < length, inputs["end_positions"] < length
    if bool((starts != ends).any()):
        raise NotImplementedError(
            "Some answers start inside the text and end outside it, so the loss has two means over "
            f"different examples, and a micro-batch cannot span several batches. {REMEDY}"
        )
    counts: Tensor = starts.reshape(len(starts), -1).sum(1)
    return counts


class LabelWeights:
    """Tells which labels have been shown to have the same weight in the loss.

    As long as all labels are the same, a loss with class weights looks like a mean over examples.
    If weighting two parts of a batch by their numbers of labels explains its loss, then the labels
    of both parts have the same weight on average: one linear equation. Labels have the same weight
    if every solution of the equations says so.
    """

    def __init__(self) -> None:
        self._columns: dict[int, int] = {}
        self._equations: list[dict[int, float]] = []

    def add(self, one: dict[str, Any], other: dict[str, Any]) -> None:
        """Record that the labels of two parts have the same weight on average."""
        equation: dict[int, float] = {}
        for sign, part in ((1.0, one), (-1.0, other)):
            counts = Counter(class_labels(part))
            for label, count in counts.items():
                fraction = sign * count / sum(counts.values())
                equation[label] = equation.get(label, 0.0) + fraction
        for label in equation:
            self._columns.setdefault(label, len(self._columns))
        if any(abs(value) > 1e-9 for value in equation.values()):
            self._equations.append(equation)

    def are_untested(self, inputs: dict[str, Any]) -> bool:
        """Whether a batch has labels whose weights may still differ."""
        return not self.are_equal(set(class_labels(inputs)))

    def are_equal(self, labels: set[int]) -> bool:
        """Whether these labels must all have the same weight."""
        if len(labels) < 2:
            return True
        if not labels <= set(self._columns):
            return False
        matrix = np.zeros((len(self._equations), len(self._columns)))
        for row, equation in enumerate(self._equations):
            for label, value in equation.items():
                matrix[row, self._columns[label]] = value
        _, singular_values, vectors = np.linalg.svd(matrix)
        rank = int((singular_values > 1e-9).sum())
        null_space = vectors[rank:, [self._columns[label] for label in labels]]
        return bool((np.ptp(null_space, axis=1) < 1e-6).all())


def class_labels(inputs: dict[str, Any]) -> list[int]:
    """Return the labels that count, if there is one per example."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() != 1:
        return []
    return [label for label in labels.tolist() if label != IGNORE_INDEX]


def token_labels(inputs: dict[str, Any]) -> set[int]:
    """Return the distinct labels of tokens or pixels, if there are only a few."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() < 2:
        return set()
    found = set(labels.flatten().tolist())
    return found if len(found) <= MAX_CLASSES else set()
