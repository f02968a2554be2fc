"""What `loss_fn` says the model predicted, matched with the examples that make up the step.

Engines call `loss_fn` more often than once per example: in trials, checks and second passes, on
other rows and in another order. So each call's predictions wait with the losses that it returned,
and count once the record takes these very losses. Knows nothing of logits, ledgers or engines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class StepPredictions:
    """The predictions of the step in progress, in the order of its record."""

    # without a __dict__, so that engines that undo what loss_fn changed do not undo this
    __slots__ = ("_calls", "_classes", "_noted", "_parts")

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, int]] = []  # since loss_fn was called, or since a fold
        # losses (None: any), and what came with them
        self._calls: list[tuple[Tensor | None, Tensor, int]] = []
        self._parts: list[tuple[int, Tensor | None]] = []  # sizes and predictions that count
        self._classes = 0

    def start(self) -> None:
        """Begin a step, or begin it again."""
        self._calls, self._parts, self._classes = [], [], 0

    def note(self, rows: Tensor, classes: int) -> None:
        """Take the predictions for the batch that `loss_fn` is called with: a column for each."""
        self._noted.append((rows, classes))

    def watched(self, loss_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that also keeps what `loss_fn` notes."""

        def call(batch: Any) -> Any:
            self._noted.clear()
            losses = loss_fn(batch)
            if self._noted and isinstance(losses, Tensor):
                rows, classes = self._only()
                if losses.shape != rows.shape[1:]:
                    raise ValueError(
                        "Predictions are recorded next to the losses of examples, so loss_fn must "
                        f"return one loss for each of the {rows.shape[1]} predictions, but it "
                        f'returned a tensor of shape {tuple(losses.shape)}. Use reduction="none".'
                    )
                self._calls.append((losses.detach(), rows, classes))
            return losses

        call.__wrapped__ = loss_fn  # type: ignore[attr-defined]
        return call

    def fold_own(self, size: int, losses: Tensor | None) -> None:
        """Keep what was noted for a gradient of the user's own backward pass."""
        if not self._noted:
            return
        rows, classes = self._only()
        if rows.shape[1] != size or losses is None or losses.shape != (size,):
            shape = None if losses is None else tuple(losses.shape)
            raise ValueError(
                f"record_predictions() was called for {rows.shape[1]} examples, but fold() has "
                f"{size}, and a loss of shape {shape}. Call it once before each fold(), and pass "
                "fold() one loss per example: fold(loss=losses, ids=ids)."
            )
        self._calls = [(None, rows, classes)]

    def accept(self, losses: Tensor | None, size: int) -> None:
        """Let predictions count, if these losses of examples came with any."""
        calls, self._calls = self._calls, []
        if not calls:
            self._parts.append((size, None))
            return
        # nothing else is at this address, since the losses of all calls are kept
        for known, rows, classes in calls:
            if losses is not None and (known is None or _is_same(known, losses)):
                self._parts.append((size, rows))
                self._classes = max(self._classes, classes)
                return
        raise ValueError(
            "loss_fn returns its losses in an order other than that of its batch, so predictions "
            "cannot be matched with them. Leave record_predictions() out, or return the loss of "
            "example i at place i."
        )

    def take(self) -> tuple[Tensor | None, int]:
        """Return the predictions of the whole step, NaN where there are none; None: none at all."""
        known = [rows for _, rows in self._parts if rows is not None]
        if not known:
            return None, 0
        parts = [
            known[0].new_full((4, size), torch.nan) if rows is None else rows.to(known[0].device)
            for size, rows in self._parts
        ]
        return torch.cat(parts, 1), self._classes

    def _only(self) -> tuple[Tensor, int]:
        """Return what was noted, if it was noted once."""
        noted = list(self._noted)
        self._noted.clear()
        if len(noted) > 1:
            raise ValueError(
                f"record_predictions() was called {len(noted)} times for one batch. Call it once, "
                "with the logits that the labels are for."
            )
        return noted[0]


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of the same values."""
    return one.shape == other.shape and one.data_ptr() == other.data_ptr()
