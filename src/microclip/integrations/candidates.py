"""What a loss of some inputs may be the mean over.

Examples and labels are likely. Masks, weights, numbers that are there and labels other than those
that losses commonly leave out are less so: they are listed to be ruled out, and are believed only
where nothing likelier explains the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from microclip.integrations.example_losses import IGNORED, Kind
from microclip.microbatches import count_examples

REMEDY = (
    "Let per_device_train_batch_size be at least microbatch_size, so that a micro-batch is a part "
    "of what the model sees at once."
)
UNUSED_PIXEL = 255  # a label that segmentation leaves out
LEFT_OUT = (0, -1)  # labels that losses of one's own leave out, beside padding


@dataclass(frozen=True)
class Denominator:
    """Something that a loss may be the mean over."""

    name: str
    counts: Callable[[dict[str, Any]], Tensor] | None  # per example; None: the loss is a sum
    likely: bool = True  # else it is believed only where nothing likelier explains the loss
    labels: str | None = None  # the column whose labels it counts

    def total(self, inputs: dict[str, Any]) -> float:
        """Return how much there is of it."""
        if self.counts is None:
            return float(count_examples(inputs))
        return float(self.counts(inputs).sum())

    def without(self, label: int) -> Denominator:
        """Return the same for a loss that leaves out another label."""
        name, counts = f"{self.name}, without {label}", cast("partial[Tensor]", self.counts)
        key, left_out = counts.args
        fewer = partial(counts.func, key, (*left_out, label), **counts.keywords)
        return Denominator(name, fewer, False, key)


def candidates(inputs: dict[str, Any], model: nn.Module) -> list[Denominator]:
    """Return what a loss of these inputs may be the mean over, likely ones first."""
    size = count_examples(inputs)
    config = getattr(model, "config", None)
    padding = getattr(config, "pad_token_id", None)
    left_out = dict.fromkeys((*LEFT_OUT, *([padding] if isinstance(padding, int) else [])))
    found = [Denominator("examples", _ones)]
    unlikely: list[Denominator] = []
    for key, value in inputs.items():
        if not isinstance(value, Tensor) or value.dim() < 1 or len(value) != size:
            continue
        if value.is_floating_point():
            unlikely += _of_numbers(key, value)
        elif "label" in key or "target" in key:
            labels = _of_labels(key, value)
            found += labels
            if value.dim() > 1:
                counted = [each for each in labels if each.labels]
                unlikely += [each.without(label) for each in counted for label in left_out]
        elif key.endswith("input_ids"):
            if padding is not None and value.dim() > 1:
                unlikely.append(_other_than(key, (padding,), likely=False))
        elif value.dim() == 1 or bool((value <= 1).all()):  # a mask, or a number of something
            unlikely.append(_other_than(key, (0,), likely=False))
            if value.dim() == 1:
                unlikely.append(Denominator(f"the sum of {key}", partial(_summed, key), False))
    if "start_positions" in inputs and "end_positions" in inputs and "input_ids" in inputs:
        found.append(Denominator("answers inside the text", _answers))
    return [*found, *unlikely, Denominator("nothing (a sum)", None)]


def _of_labels(key: str, value: Tensor) -> Iterable[Denominator]:
    found = [_other_than(key, (IGNORED,))]
    if value.dim() > 1:
        found.append(Denominator(f"all {key}", partial(_all, key)))
    if value.dim() == 2:
        found.append(_other_than(key, (IGNORED,), first=1))
    if value.dim() > 2:
        found.append(_other_than(key, (UNUSED_PIXEL,)))
    return found


def _of_numbers(key: str, value: Tensor) -> Iterable[Denominator]:
    if "label" in key or "target" in key or bool(value.isnan().any()):
        yield Denominator(f"{key} that are numbers", partial(_numbers, key), False)
    if value.dim() < 3:
        yield Denominator(f"the sum of {key}", partial(_summed, key), False)
    if value.dim() == 1 or "weight" in key or "mask" in key:
        yield Denominator(f"{key} other than 0", partial(_count, key, (0,)), False)


def _other_than(
    key: str, left_out: tuple[int, ...], *, first: int = 0, likely: bool = True
) -> Denominator:
    name = f"{key} other than {left_out[0]}" + (", after the first" if first else "")
    return Denominator(name, partial(_count, key, left_out, first=first), likely, key)


def _ones(inputs: dict[str, Any]) -> Tensor:
    return torch.ones(count_examples(inputs))


def _count(key: str, left_out: tuple[int, ...], inputs: dict[str, Any], first: int = 0) -> Tensor:
    values = inputs[key][:, first:] if first else inputs[key]
    counted = values != left_out[0]
    for label in left_out[1:]:
        counted = counted & (values != label)
    counts: Tensor = counted.reshape(len(values), -1).sum(1)
    return counts


def _all(key: str, inputs: dict[str, Any]) -> Tensor:
    values: Tensor = inputs[key]
    return torch.full((len(values),), float(values[0].numel()))


def _summed(key: str, inputs: dict[str, Any]) -> Tensor:
    values: Tensor = inputs[key]
    values = values.reshape(len(values), -1)
    return values.float().sum(1) if values.is_floating_point() else values.sum(1)


def _numbers(key: str, inputs: dict[str, Any]) -> Tensor:
    values: Tensor = inputs[key]
    return (~values.isnan()).reshape(len(values), -1).sum(1)


def _answers(inputs: dict[str, Any]) -> Tensor:
    length = inputs["input_ids"].shape[1]
    starts, ends = inputs["start_positions"] < length, inputs["end_positions"] < length
    if bool((starts != ends).any()):
        raise NotImplementedError(
            "Some answers begin inside the text and end outside of it, and the loss has two means "
            f"over different examples: micro-batches cannot grow over several batches. {REMEDY}"
        )
    counts: Tensor = starts.reshape(len(starts), -1).sum(1)
    return counts


def of_kind(kind: Kind, inputs: dict[str, Any]) -> Denominator:
    """Return what a known loss is the mean over."""
    name = "what the model's loss counts"
    if kind.counts(inputs["labels"]) is None:
        return Denominator(name, None)
    return Denominator(name, lambda inputs: cast("Tensor", kind.counts(inputs["labels"])))
