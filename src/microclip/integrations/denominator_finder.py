"""Finds out what a loss is the mean over, by measuring its gradients.

A micro-batch that spans several batches must have the loss of all its examples together. The
batches' losses must therefore be weighted the way the loss itself would weight them: by examples,
by labels that count, or not at all if it is a sum. To find out, some examples are differentiated
together and in two halves; every candidate that does not explain the whole by its halves is ruled
out. The examples of one batch may be too similar to tell, so examples of several batches are mixed
as well. A loss that nothing explains (contrastive losses, load balancing, two means over different
things) is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from microclip.batches import count_examples
from microclip.engines.randomness import DropoutDisabled
from microclip.integrations.denominators import (
    MAX_CLASSES,
    REMEDY,
    Denominator,
    LabelWeights,
    class_labels,
    list_candidates,
    token_labels,
)
from microclip.integrations.example_losses import IGNORE_INDEX
from microclip.integrations.trainer_checks import (
    DryRun,
    LossAndGradient,
    gradients_agree,
    has_stock_compute_loss,
)
from microclip.microbatches import Microbatch

COUPLED = ("aux", "z_loss", "router", "balanc", "contrast")  # in names of whole-batch losses


class DenominatorFinder:
    """Keeps the candidates for what a Trainer's loss is the mean over, and rules them out.

    Args:
        trainer: The Trainer whose loss it is.
        model: The model it trains, unwrapped.
        known: What the loss is the mean over, if known.
    """

    def __init__(self, trainer: Any, model: nn.Module, known: Denominator | None = None) -> None:
        self.trainer, self.model, self._known = trainer, model, known is not None
        self._candidates = None if known is None else [known]
        self._varied: set[str] = set()  # candidates that differed between examples we measured
        self._weights = LabelWeights()
        self._tokens: set[int] = set()  # labels that we considered the loss might ignore
        self._compared = False  # whether any of the examples compared were different
        self._saw_nonzero = False  # next to a loss of 0, a mean may look like a sum
        self._seen = 0

    @property
    def candidates(self) -> list[Denominator]:
        """What the loss may be the mean over; several as long as they all give the same weights."""
        assert self._candidates is not None
        return self._candidates

    def measure_batch(self, inputs: dict[str, Any]) -> None:
        """Measure a batch if it may tell something new."""
        self._seen += 1
        if self._known:
            return
        first = self._candidates is None
        found = list_candidates(inputs, self.model) if first else self.candidates
        self._candidates = found = [*found, *self._without_new_labels(inputs, found)]
        if first or count_examples(inputs) > 1:
            varied = {each.name for each in found if each.counts and _varies(each.counts(inputs))}
            new = varied - self._varied or self._weights.are_untested(inputs)
            if first or not self._seen & (self._seen - 1) or new:
                self._candidates = self._measured(inputs, found)
                self._varied |= varied

    def _without_new_labels(
        self, inputs: dict[str, Any], candidates: list[Denominator]
    ) -> list[Denominator]:
        """Return further candidates, for a loss that ignores a label not seen before."""
        new = token_labels(inputs) - self._tokens if len(self._tokens) <= MAX_CLASSES else set()
        self._tokens |= new
        if len(self._tokens) > MAX_CLASSES:
            return []
        of_labels = [each for each in candidates if each.likely and each.labels == "labels"]
        names = {each.name for each in candidates}
        found = [d.without(label) for d in of_labels for label in sorted(new - {IGNORE_INDEX})]
        return [each for each in found if each.name not in names]

    def weights(self, parts: list[dict[str, Any]], loss: Tensor) -> list[float] | None:
        """Return the weight of each part of a micro-batch, relative to the first nonzero one.

        None: the loss is a sum, so every part counts fully. `loss` is that of the last part.
        """
        empty = [d for d in self.candidates if d.counts and not d.total(parts[-1])]
        if empty and len(self.candidates) > 1 and bool(loss != 0):
            # a mean over nothing is not finite, all others are; 0 means the loss guards against it
            finite = bool(loss.isfinite())
            kept = [d for d in self.candidates if (d in empty) != finite]
            self._candidates = kept or self.candidates
        if not self._is_certain(parts):
            names = " or ".join(d.name for d in self._likely())
            raise NotImplementedError(
                "To let a micro-batch span several batches, microclip must know what the loss is "
                f"the mean over, but these batches do not tell: {names}, with or without class "
                f"weights or other weights. {REMEDY}"
            )
        chosen = self._likely()[0]
        if chosen.counts is None:
            return None
        return _relative_to_first([chosen.total(part) for part in parts])

    def _likely(self) -> list[Denominator]:
        return [d for d in self.candidates if d.likely] or self.candidates

    def _is_certain(self, parts: list[dict[str, Any]]) -> bool:
        """Whether all remaining candidates weight the parts alike."""
        if self._known or len(parts) == 1:
            return True
        if not self._compared and not all(_same_examples(parts[0], part) for part in parts[1:]):
            return False
        means = [d for d in self.candidates if d.counts]
        if means and len(means) < len(self.candidates):
            return False  # a sum or a mean
        found = [_relative_to_first([d.total(part) for part in parts]) for d in means]
        if any(not weights_agree(found[0], other) for other in found[1:]):
            return False
        labels = {label for part in parts for label in class_labels(part)}
        return self._weights.are_equal(labels) if means else self._saw_nonzero

    def compare_parts(self, parts: list[dict[str, Any]]) -> None:
        """Mix examples of several parts, since one part alone may not tell."""
        if self._known or len(parts) == 1:
            return
        due = not self._seen & (self._seen - 1)  # less and less often while nothing is new
        for earlier in reversed(parts[:-1]):
            if not due and self._is_certain(parts):
                return
            for pair in _mixed_batches(earlier, parts[-1]):
                if due or not self._is_certain(parts):
                    self._candidates = self._measured(pair, self.candidates, sort=False)
                    due = False
        if class_labels(parts[0]):
            places = [(part, row) for part in parts for row in range(count_examples(part))]
            by_label = {int(part["labels"][row]): (part, [row]) for part, row in places}
            known = [by_label[label] for label in sorted(by_label) if label != IGNORE_INDEX]
            for one, other in pairwise(known):
                both = _joined(*one, *other)
                if both is not None and not self._is_certain(parts):
                    self._candidates = self._measured(both, self.candidates, sort=False)

    def _measured(
        self, inputs: dict[str, Any], candidates: list[Denominator], sort: bool = True
    ) -> list[Denominator]:
        """Return the candidates that explain a batch by its halves, sorted by label or as it is."""
        size = count_examples(inputs)
        order = _label_order(inputs, size) if sort else list(range(size))
        with _independent_examples(self.model):
            left, repeatable = self._consistent(inputs, candidates, order)
        if left is None and not repeatable:  # the model draws masks or skips layers at random
            modes = [(module, module.training) for module in self.model.modules()]
            self.model.eval()
            try:
                left, _ = self._consistent(inputs, candidates, order)
            finally:
                for module, mode in modes:
                    module.training = mode
        if left is None:
            raise NotImplementedError(
                "The loss of a batch is neither a mean over examples or labels nor a sum of its "
                f"examples' losses, so a micro-batch cannot span several batches. {REMEDY}"
            )
        return left

    def _consistent(
        self, inputs: dict[str, Any], candidates: list[Denominator], order: list[int]
    ) -> tuple[list[Denominator] | None, bool]:
        """Return the candidates that explain the whole by its halves, and if it is repeatable."""
        size = len(order)
        rows: tuple[Sequence[int], ...] = (order, order[: size // 2], order[size // 2 :])
        if size == 1:  # paired with itself, it shows at least whether the loss is a sum
            rows = ([0, 0], [0], [0])
        whole, *halves = (_rows(inputs, each) for each in rows)
        dry = DryRun(self.trainer, self.model)
        loss = dry.stock_loss if has_stock_compute_loss(self.trainer) else dry.trainer_loss
        together = dry.run(partial(loss, whole))
        self._refuse_coupled(dry.extra_losses)
        if not together.is_finite:
            return candidates, True
        parts = [dry.run(partial(loss, half)) for half in halves]
        known: dict[tuple[float, ...], bool] = {}  # many candidates weight the halves alike
        left = []
        for each in candidates:
            totals = [each.total(half) for half in halves]
            weights = (1.0, 1.0) if each.counts is None else _fractions(totals)
            if weights not in known:
                known[weights] = _explains(weights, parts, together, dry.bits)
            if known[weights]:
                left.append(each)
        if left:
            self._weights.add(*halves)
            self._compared = self._compared or not _same_examples(*halves)
            nonzero = all(bool(part.loss != 0) for part in parts)
            self._saw_nonzero = self._saw_nonzero or nonzero
            return left, True
        again = dry.run(partial(_after_other_draws, partial(loss, whole)))
        return None, gradients_agree(again.gradient, together.gradient, dry.bits)

    def _refuse_coupled(self, names: list[str]) -> None:
        for name in names:
            if any(word in name for word in COUPLED):
                raise NotImplementedError(
                    f"The model adds {name!r} to its loss, which depends on all examples of a "
                    f"batch at once, so a micro-batch cannot span several batches. {REMEDY}"
                )


def _explains(
    weights: tuple[float, ...], parts: list[LossAndGradient], whole: LossAndGradient, bits: int
) -> bool:
    terms = [(w, p) for w, p in zip(weights, parts, strict=True) if w]
    if not terms:
        return False
    value = sum(
        (w * p.loss.double() for w, p in terms), whole.loss.new_zeros((), dtype=torch.double)
    )
    size = sum(abs(w * p.loss.double()) for w, p in terms)
    if not (value - whole.loss.double()).abs() <= (1e-2 if bits == 16 else 1e-5) * size:
        return False
    added = [
        None if all(g is None for g in column) else sum(
            w * g for (w, _), g in zip(terms, column, strict=True) if g is not None
        )
        for column in zip(*(p.gradient for _, p in terms), strict=True)
    ]  # fmt: skip
    return gradients_agree(added, whole.gradient, bits, slack=4.0)


def _varies(counts: Tensor) -> bool:
    return bool((counts != counts[0]).any())


def _fractions(counts: list[float]) -> tuple[float, ...]:
    total = sum(counts)
    return tuple(count / total if total else 0.0 for count in counts)


def _relative_to_first(counts: list[float]) -> list[float]:
    first = next((count for count in counts if count), 1.0)
    return [count / first for count in counts]


def weights_agree(one: list[float], other: list[float]) -> bool:
    """Whether two lists of weights are equal up to rounding."""
    return all(abs(a - b) < 1e-6 for a, b in zip(one, other, strict=True))


def _rows(inputs: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    chosen: dict[str, Any] = Microbatch(inputs, rows, None, ()).batch
    return chosen


def _label_order(inputs: dict[str, Any], size: int) -> list[int]:
    """Return an order in which the two halves have different labels, if labels differ."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return list(range(size))
    values = labels.reshape(size, -1).tolist()
    return sorted(range(size), key=lambda row: values[row])


def _mixed_batches(one: dict[str, Any], other: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield batches whose first half comes from one part and whose second half from the other.

    They are no larger than the smaller part, unless that has a single example.
    """
    sizes = count_examples(one), count_examples(other)
    half = max(1, min(sizes) // 2)
    starts = [(0, sizes[1] - half), (sizes[0] - half, 0)]
    for start, other_start in dict.fromkeys(starts):
        rows, other_rows = range(start, start + half), range(other_start, other_start + half)
        both = _joined(one, rows, other, other_rows)
        if both is not None:
            yield both


def _joined(
    one: dict[str, Any], rows: Sequence[int], other: dict[str, Any], other_rows: Sequence[int]
) -> dict[str, Any] | None:
    """Return examples of two parts as one batch, if they have the same shape."""
    if one.keys() != other.keys():
        return None
    first, second = _rows(one, rows), _rows(other, other_rows)
    for key, value in first.items():
        if isinstance(value, Tensor) and value.dim():
            if value.shape[1:] != second[key].shape[1:]:
                return None
            first[key] = torch.cat([value, second[key]])
    return first


def _same_examples(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    pairs = [(value, other[key]) for key, value in one.items() if isinstance(value, Tensor)]
    return all(torch.equal(a, b) for a, b in pairs)


def _after_other_draws(loss_fn: Callable[[], Tensor]) -> Tensor:
    torch.rand(17)
    random.random()
    np.random.random()
    return loss_fn()


@contextmanager
def _independent_examples(model: nn.Module) -> Iterator[None]:
    """Inside the block, neither dropout nor batch statistics couple the examples of a batch."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    for module in norms:
        module.training = False
    try:
        with DropoutDisabled():
            yield
    finally:
        for module in norms:
            module.training = True
