"""Micro-batches larger than what the model sees at once: they grow over several batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from microclip.clipper import Clipper
from microclip.engines.losses import backward
from microclip.integrations.candidates import REMEDY
from microclip.integrations.denominators import Denominators, same
from microclip.microbatches import Ids, Microbatch, count_examples

PartLoss = Callable[[Any], Tensor]


class GrowingMicrobatch:
    """Adds batches up to one micro-batch, and folds it when it is complete.

    Args:
        size: How many examples it is to have.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._warned = False
        self.drop()

    def drop(self) -> None:
        """Forget what has not been folded."""
        self._examples = 0
        self._ids: tuple[Hashable, ...] = ()
        self._parts: list[dict[str, Any]] = []
        self._weights: list[float] = []  # that their losses were multiplied with
        self._summed = False
        self._loss: Tensor | float = 0.0

    def add(
        self,
        clipper: Clipper,
        inputs: dict[str, Any],
        ids: Ids | None,
        loss_fn: PartLoss,
        means: Denominators,
    ) -> None:
        """Differentiate a batch; whatever is complete is folded on the way."""
        self._warn_of_batch_norm(clipper.model)
        with self._all_or_nothing(clipper):
            means.look_at(inputs)
        rows = count_examples(inputs)
        names: Sequence[Hashable] = ids.tolist() if isinstance(ids, Tensor) else list(ids or ())
        start = 0
        while start < rows:
            stop = min(rows, start + self.size - self._examples)
            part = Microbatch(inputs, range(start, stop), None, tuple(names[start:stop]))
            with clipper.local(), self._all_or_nothing(clipper):
                self._add_part(clipper, part, loss_fn, means)
            self._examples += part.size
            self._ids += part.ids
            start = stop
            if self._examples == self.size:
                self.fold(clipper)

    def _add_part(
        self, clipper: Clipper, part: Microbatch, loss_fn: PartLoss, means: Denominators
    ) -> None:
        self._parts.append(part.batch)
        means.look_across(self._parts)
        loss = loss_fn(part.batch)
        weights = means.weights(self._parts, loss.detach())
        self._summed = weights is None
        weight = 1.0 if weights is None else weights[-1]
        if weights is not None and not same(weights[:-1], self._weights):
            raise NotImplementedError(
                "What the loss is the mean over turned out only now, in the middle of a "
                f"micro-batch of several batches. {REMEDY}"
            )
        self._weights.append(weight)
        if weight:  # else no label counts: there is nothing to learn, and the loss is not finite
            backward(loss * weight, clipper.grad_scaler)
            self._loss = self._loss + loss.detach() * weight

    @contextmanager
    def _all_or_nothing(self, clipper: Clipper) -> Iterator[None]:
        """Leave no part of a micro-batch behind that could not be completed."""
        try:
            yield
        except BaseException:
            self.drop()
            for parameter in clipper.model.parameters():
                parameter.grad = None
            raise

    def fold(self, clipper: Clipper) -> None:
        """Fold what has grown; at the end of a step that may be a smaller micro-batch."""
        if not self._examples:
            return
        weight = 1.0 if self._summed else sum(self._weights) or 1.0
        parameters = [p for p in clipper.model.parameters() if p.requires_grad]
        if all(parameter.grad is None for parameter in parameters):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(weight)
        loss = torch.as_tensor(self._loss / weight)
        with clipper.local(), self._all_or_nothing(clipper):
            clipper.fold(size=self._examples, loss=loss, ids=self._ids or None)
        self.drop()

    def _warn_of_batch_norm(self, model: nn.Module) -> None:
        if self._warned:
            return
        self._warned = True
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm) and module.training:
                warnings.warn(
                    f"{name or 'The model'} is a {type(module).__name__}, which normalises over "
                    "what the model sees at once. A micro-batch of several batches is therefore "
                    "not what it would be in one: as always when gradients are accumulated.",
                    RuntimeWarning,
                    stacklevel=4,
                )
                return
