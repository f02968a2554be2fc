"""What a loss is the mean over, found out from its gradients.

A micro-batch of several batches has the loss of all its examples together, so the batches' losses
must be weighted as the loss itself would: by examples, by labels that count, or not at all if it
is a sum. That is measured: some examples are differentiated together and in two parts, and whatever
does not explain the whole by its parts is out. Examples of one batch may be alike in all that
matters, so examples of several batches are looked at together as well. A loss that nothing explains
(contrastive losses, load balancing, two means over different things) is refused.
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

from microclip.engines.stillness import Still
from microclip.integrations.candidates import REMEDY, Denominator, candidates
from microclip.integrations.example_losses import IGNORED
from microclip.integrations.label_weights import FEW, LabelWeights, labels_of, tokens_of
from microclip.integrations.loss_check import Pass, Passes, same_gradient
from microclip.integrations.stock import has_stock_compute_loss
from microclip.microbatches import Microbatch, count_examples

COUPLED = ("aux", "z_loss", "router", "balanc", "contrast")  # in names of losses over whole batches


class Denominators:
    """Keeps what a Trainer's loss may be the mean over, and leaves out what it cannot be.

    Args:
        trainer: Whose loss it is.
        model: What it trains, unwrapped.
        known: What the loss is the mean over, if that is known.
    """

    def __init__(self, trainer: Any, model: nn.Module, known: Denominator | None = None) -> None:
        self.trainer, self.model, self._known = trainer, model, known is not None
        self._left = None if known is None else [known]
        self._varied: set[str] = set()  # what differed between the examples of a measured batch
        self._labels = LabelWeights()
        self._tokens: set[int] = set()  # labels that were considered to be left out by the loss
        self._compared = False  # examples that differ
        self._added = False  # losses other than 0: beside 0, a mean may look like a sum
        self._seen = 0

    @property
    def left(self) -> list[Denominator]:
        """What it may be; more than one as long as they come to the same."""
        assert self._left is not None
        return self._left

    def look_at(self, inputs: dict[str, Any]) -> None:
        """Measure, if a batch may tell something new."""
        self._seen += 1
        if self._known:
            return
        first = self._left is None
        every = candidates(inputs, self.model) if self._left is None else self._left
        self._left = every = [*every, *self._without_new_labels(inputs, every)]
        if first or count_examples(inputs) > 1:
            varied = {each.name for each in every if each.counts and _varies(each.counts(inputs))}
            new = varied - self._varied or self._labels.are_new(inputs)
            if first or not self._seen & (self._seen - 1) or new:
                self._left = self._measured(inputs, every)
                self._varied |= varied

    def _without_new_labels(
        self, inputs: dict[str, Any], every: list[Denominator]
    ) -> list[Denominator]:
        """Return what the loss may be the mean over if it leaves out a label not seen before."""
        new = tokens_of(inputs) - self._tokens if len(self._tokens) <= FEW else set()
        self._tokens |= new
        if len(self._tokens) > FEW:
            return []
        of_labels = [each for each in every if each.likely and each.labels == "labels"]
        names = {each.name for each in every}
        found = [each.without(label) for each in of_labels for label in sorted(new - {IGNORED})]
        return [each for each in found if each.name not in names]

    def weights(self, parts: list[dict[str, Any]], loss: Tensor) -> list[float] | None:
        """Return how much each part of a micro-batch counts, next to the first one that does.

        None: each counts by itself, for the loss is a sum. `loss` is that of the last part.
        """
        nothing = [d for d in self.left if d.counts and not d.total(parts[-1])]
        if nothing and len(self.left) > 1 and bool(loss != 0):
            # a mean over nothing is not finite, and no other is; 0 if somebody took care of that
            finite = bool(loss.isfinite())
            kept = [d for d in self.left if (d in nothing) != finite]
            self._left = kept or self.left
        if not self._is_certain(parts):
            names = " or ".join(d.name for d in self._likely())
            raise NotImplementedError(
                "A micro-batch of several batches needs to know what the loss is the mean over, "
                f"but these batches do not tell: {names}, with or without class weights or other "
                f"weights. {REMEDY}"
            )
        chosen = self._likely()[0]
        if chosen.counts is None:
            return None
        return _next_to_first([chosen.total(part) for part in parts])

    def _likely(self) -> list[Denominator]:
        return [d for d in self.left if d.likely] or self.left

    def _is_certain(self, parts: list[dict[str, Any]]) -> bool:
        """Whether everything that is left weighs the parts alike."""
        if self._known or len(parts) == 1:
            return True
        if not self._compared and not all(_are_same(parts[0], part) for part in parts[1:]):
            return False
        ways = [d for d in self.left if d.counts]
        if ways and len(ways) < len(self.left):
            return False  # a sum or a mean
        found = [_next_to_first([d.total(part) for part in parts]) for d in ways]
        if any(not same(found[0], other) for other in found[1:]):
            return False
        labels = {label for part in parts for label in labels_of(part)}
        return self._labels.tell(labels) if ways else self._added

    def look_across(self, parts: list[dict[str, Any]]) -> None:
        """Let examples of several parts meet, for a part by itself may not tell."""
        if self._known or len(parts) == 1:
            return
        often = not self._seen & (self._seen - 1)  # less and less, as long as nothing is new
        for earlier in reversed(parts[:-1]):
            if not often and self._is_certain(parts):
                return
            for pair in _halves_of(earlier, parts[-1]):
                if often or not self._is_certain(parts):
                    self._left = self._measured(pair, self.left, sort=False)
                    often = False
        if labels_of(parts[0]):
            places = [(part, row) for part in parts for row in range(count_examples(part))]
            by_label = {int(part["labels"][row]): (part, [row]) for part, row in places}
            known = [by_label[label] for label in sorted(by_label) if label != IGNORED]
            for one, other in pairwise(known):
                both = _joined(*one, *other)
                if both is not None and not self._is_certain(parts):
                    self._left = self._measured(both, self.left, sort=False)

    def _measured(
        self, inputs: dict[str, Any], every: list[Denominator], sort: bool = True
    ) -> list[Denominator]:
        """Return what explains a batch by its halves, in the order of labels or as it is."""
        size = count_examples(inputs)
        order = _by_label(inputs, size) if sort else list(range(size))
        with _still(self.model):
            left, same_again = self._fitting(inputs, every, order)
        if left is None and not same_again:  # masks or layers are drawn at random
            modes = [(module, module.training) for module in self.model.modules()]
            self.model.eval()
            try:
                left, _ = self._fitting(inputs, every, order)
            finally:
                for module, mode in modes:
                    module.training = mode
        if left is None:
            raise NotImplementedError(
                "The loss of several examples together is neither a mean over examples or labels "
                "of their losses nor a sum of them, so micro-batches cannot grow over several "
                f"batches. {REMEDY}"
            )
        return left

    def _fitting(
        self, inputs: dict[str, Any], every: list[Denominator], order: list[int]
    ) -> tuple[list[Denominator] | None, bool]:
        """Return what explains the whole by its parts, and whether the whole stays what it is."""
        size = len(order)
        rows: tuple[Sequence[int], ...] = (order, order[: size // 2], order[size // 2 :])
        if size == 1:  # beside itself, at least a sum shows
            rows = ([0, 0], [0], [0])
        whole, *halves = (_rows(inputs, each) for each in rows)
        passes = Passes(self.trainer, self.model)
        loss = passes.stock_loss if has_stock_compute_loss(self.trainer) else passes.loss
        together = passes.of(partial(loss, whole))
        self._refuse_coupled(passes.extra_losses)
        if not together.is_finite:
            return every, True
        parts = [passes.of(partial(loss, half)) for half in halves]
        known: dict[tuple[float, ...], bool] = {}  # many weigh the halves alike
        left = []
        for each in every:
            totals = [each.total(half) for half in halves]
            weights = (1.0, 1.0) if each.counts is None else _shares(totals)
            if weights not in known:
                known[weights] = _explains(weights, parts, together, passes.bits)
            if known[weights]:
                left.append(each)
        if left:
            self._labels.add(*halves)
            self._compared = self._compared or not _are_same(*halves)
            self._added = self._added or all(bool(part.loss != 0) for part in parts)
            return left, True
        again = passes.of(partial(_after_other_draws, partial(loss, whole)))
        return None, same_gradient(again.gradient, together.gradient, passes.bits)

    def _refuse_coupled(self, names: list[str]) -> None:
        for name in names:
            if any(word in name for word in COUPLED):
                raise NotImplementedError(
                    f"The model adds {name!r} to its loss, which looks at all examples at once, so "
                    f"micro-batches cannot grow over several batches. {REMEDY}"
                )


def _explains(weights: tuple[float, ...], parts: list[Pass], whole: Pass, bits: int) -> bool:
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
    return same_gradient(added, whole.gradient, bits, slack=4.0)


def _varies(counts: Tensor) -> bool:
    return bool((counts != counts[0]).any())


def _shares(counts: list[float]) -> tuple[float, ...]:
    total = sum(counts)
    return tuple(count / total if total else 0.0 for count in counts)


def _next_to_first(counts: list[float]) -> list[float]:
    first = next((count for count in counts if count), 1.0)
    return [count / first for count in counts]


def same(one: list[float], other: list[float]) -> bool:
    """Whether two lists of weights are the same but for rounding."""
    return all(abs(a - b) < 1e-6 for a, b in zip(one, other, strict=True))


def _rows(inputs: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    chosen: dict[str, Any] = Microbatch(inputs, rows, None, ()).batch
    return chosen


def _by_label(inputs: dict[str, Any], size: int) -> list[int]:
    """Return an order in which halves have different labels, if there are any."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return list(range(size))
    values = labels.reshape(size, -1).tolist()
    return sorted(range(size), key=lambda row: values[row])


def _halves_of(one: dict[str, Any], other: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield batches of which half comes from each of two parts: no larger than those, if they can.

    Their first half is of one part, their second half of the other.
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
    """Return examples of two parts as a batch, if they have the same shape."""
    if one.keys() != other.keys():
        return None
    first, second = _rows(one, rows), _rows(other, other_rows)
    for key, value in first.items():
        if isinstance(value, Tensor) and value.dim():
            if value.shape[1:] != second[key].shape[1:]:
                return None
            first[key] = torch.cat([value, second[key]])
    return first


def _are_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two parts have the same examples."""
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
def _still(model: nn.Module) -> Iterator[None]:
    """Inside the block examples do not depend on each other by dropout or batch statistics."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    for module in norms:
        module.training = False
    try:
        with Still():
            yield
    finally:
        for module in norms:
            module.training = True
