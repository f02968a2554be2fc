"""Micro-batches larger than a batch: their gradient is accumulated over several batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from microclip.batches import count_examples
from microclip.clipper import Clipper
from microclip.engines.gradients import backward
from microclip.integrations.denominator_finder import DenominatorFinder, weights_agree
from microclip.integrations.denominators import REMEDY
from microclip.microbatches import Ids, Microbatch
from microclip.user_warnings import warn

PartLoss = Callable[[Any], Tensor]


class WideMicrobatch:
    """Accumulates batches into one micro-batch, and folds it when it is complete.

    Args:
        size: The number of examples in a micro-batch.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._warned = False
        self.discard()

    def discard(self) -> None:
        """Drop what has not been folded yet."""
        self._examples = 0
        self._ids: tuple[Hashable, ...] = ()
        self._parts: list[dict[str, Any]] = []
        self._weights: list[float] = []  # the factor of each part's loss
        self._is_sum = False
        self._loss: Tensor | float = 0.0

    def add(
        self,
        clipper: Clipper,
        inputs: dict[str, Any],
        ids: Ids | None,
        loss_fn: PartLoss,
        finder: DenominatorFinder,
    ) -> None:
        """Differentiate a batch, and fold every micro-batch that it completes."""
        self._warn_of_batch_norm(clipper.model)
        with self._all_or_nothing(clipper):
            finder.measure_batch(inputs)
        rows = count_examples(inputs)
        names: Sequence[Hashable] = ids.tolist() if isinstance(ids, Tensor) else list(ids or ())
        start = 0
        while start < rows:
            stop = min(rows, start + self.size - self._examples)
            part = Microbatch(inputs, range(start, stop), None, tuple(names[start:stop]))
            with clipper.local(), self._all_or_nothing(clipper):
                self._add_part(clipper, part, loss_fn, finder)
            self._examples += part.size
            self._ids += part.ids
            start = stop
            if self._examples == self.size:
                self.fold(clipper)

    def _add_part(
        self, clipper: Clipper, part: Microbatch, loss_fn: PartLoss, finder: DenominatorFinder
    ) -> None:
        self._parts.append(part.batch)
        finder.compare_parts(self._parts)
        loss = loss_fn(part.batch)
        weights = finder.weights(self._parts, loss.detach())
        self._is_sum = weights is None
        weight = 1.0 if weights is None else weights[-1]
        if weights is not None and not weights_agree(weights[:-1], self._weights):
            raise NotImplementedError(
                "It became clear what the loss is the mean over only in the middle of a "
                "micro-batch that spans several batches, so its first batches were weighted "
                f"wrongly. {REMEDY}"
            )
        self._weights.append(weight)
        if weight:  # if not, no label counts: there is nothing to learn and the loss is not finite
            backward(loss * weight, clipper.grad_scaler)
            self._loss = self._loss + loss.detach() * weight

    @contextmanager
    def _all_or_nothing(self, clipper: Clipper) -> Iterator[None]:
        """After an error, leave no part of an unfinished micro-batch behind."""
        try:
            yield
        except BaseException:
            self.discard()
            for parameter in clipper.model.parameters():
                parameter.grad = None
            raise

    def fold(self, clipper: Clipper) -> None:
        """Fold what has been added; at the end of a step this may be a smaller micro-batch."""
        if not self._examples:
            return
        weight = 1.0 if self._is_sum else sum(self._weights) or 1.0
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
        self.discard()

    def _warn_of_batch_norm(self, model: nn.Module) -> None:
        if self._warned:
            return
        self._warned = True
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm) and module.training:
                warn(
                    f"{name or 'The model'} is a {type(module).__name__}, which normalizes over "
                    "one batch at a time. The gradient of a micro-batch that spans several batches "
                    "therefore differs from that of the same examples in one batch, as always "
                    "with gradient accumulation."
                )
                return
