"""Running a batch of Lightning's loop micro-batch by micro-batch, in the strategy's own steps.

While a callback holds them, `training_step` and `backward` of the strategy are these. Lightning
asks for the loss, clears `.grad` at the start of a window, asks for the gradient, and lets the
optimizer step when the window ends. All micro-batches but the last are therefore differentiated
while it asks for the loss, the last one when it asks for the gradient: after every hook around
`backward`, so that what they change is clipped, and before the loss scaler looks at `.grad`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from microclip import time_first
from microclip.clipper import Clipper
from microclip.engines.gradients import set_aside, trainable
from microclip.integrations.lightning_outputs import Logs, Outputs
from microclip.microbatches import Ids, count_examples, cut
from microclip.outcome import Outcome


@dataclass(frozen=True)
class Piece:
    """A micro-batch."""

    batch: Any
    size: int
    ids: tuple[Hashable, ...] | None
    domain: Hashable


@dataclass(frozen=True)
class Batches:
    """How batches are looked at and cut; the fields are arguments of `MicrobatchClip`."""

    microbatch_size: int | None
    batch_dim: int | None
    size: Callable[[Any], int] | None
    ids: Callable[[Any], Ids] | None
    domain: Callable[[Any], Any] | None

    def pieces(self, batch: Any, first_position: int) -> list[Piece]:
        """Return the micro-batches of a batch."""
        ids = None if self.ids is None else self.ids(batch)
        labels = _labels(None if self.domain is None else self.domain(batch))
        if self.size is not None:
            domain = _only(labels) if isinstance(labels, list) else labels
            names = ids.tolist() if isinstance(ids, Tensor) else ids
            return [Piece(batch, self.size(batch), None if names is None else tuple(names), domain)]
        count = count_examples(batch, self.batch_dim or 0)
        domains = labels if isinstance(labels, list) else [labels] * count
        if self.microbatch_size is None:
            _only(domains)
        found = cut(
            batch,
            self.microbatch_size,
            ids=ids,
            domains=None if labels is None else domains,
            first_position=first_position,
            batch_dim=self.batch_dim or 0,
        )
        if len(found) == 1:
            return [Piece(batch, count, found[0].ids, found[0].domain)]
        return [Piece(each.batch, each.size, each.ids, each.domain) for each in found]


class Steps:
    """Holds a strategy's `training_step` and `backward` until it is told to let go."""

    def __init__(self, trainer: pl.Trainer, clipper: Clipper, batches: Batches) -> None:
        self.clipper = clipper
        self.folded = 0  # micro-batches of the window that is open
        self.unseen: Outcome | None = None  # of a window that ended with this batch
        self._trainer, self._batches = trainer, batches
        self._examples = 0
        self._pending: tuple[Tensor, Piece] | None = None  # run, but not differentiated
        self._parameters: dict[str, nn.Parameter] = {}  # of this window
        self._batch = -1
        self._watched = batches.batch_dim is not None
        self._warned: set[str] = set()
        strategy = trainer.strategy
        self._before = {name: vars(strategy).get(name) for name in ("training_step", "backward")}
        self._step, self._differentiate = strategy.training_step, strategy.backward
        strategy.training_step = self.training_step  # type: ignore[method-assign]
        strategy.backward = self.backward  # type: ignore[method-assign,assignment]

    def release(self) -> None:
        """Give the strategy its own steps back, and drop what no optimizer step will use."""
        for name, value in self._before.items():
            if value is None:
                vars(self._trainer.strategy).pop(name, None)
            else:
                setattr(self._trainer.strategy, name, value)
        self._drop()

    def training_step(self, batch: Any, *rest: Any) -> Any:
        """Run a batch; what is returned is of all its micro-batches, None if all were skipped."""
        if getattr(self._trainer.fit_loop, "_skip_backward", False):  # averaging BatchNorm only
            return self._step(batch, *rest)
        self._begin()
        pieces = self._pieces(batch)
        self._check_count(len(pieces))
        module = self._trainer.lightning_module
        logs, outputs = Logs(module) if len(pieces) > 1 else None, Outputs()
        with self.clipper.local():
            for piece in pieces:
                self._fold_pending()
                with self._watching(piece), logs.of(piece.size) if logs else nullcontext():
                    output = self._step(piece.batch, *rest)
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if output is None:
                    continue
                if not isinstance(loss, Tensor):
                    return output  # Lightning says what is wrong
                self._pending = loss, piece
                if logs:
                    outputs.add(output, piece.size)
        if logs:
            logs.write()
            output = outputs.joined() if len(outputs) else None
        return self._skipped() if output is None else output

    def backward(
        self, loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Tensor:  # the strategy's signature; the loss is the one that is pending
        """Differentiate what is left of a batch; at the end of a window clip."""
        with self.clipper.local():
            self._fold_pending(optimizer, *args, **kwargs)
        if self._ends():
            self._finish()
        return loss.detach()

    def _begin(self) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        again = self._batch == loop.total_batch_idx
        self._batch = loop.total_batch_idx
        self._pending = None
        times = self._trainer.accumulate_grad_batches
        if loop.batch_idx % times == 0:
            if self.folded:
                self._warn(
                    f"A window of accumulation ended without an optimizer step, so the "
                    f"{self.folded} micro-batches folded in it are dropped, as Lightning drops "
                    "their gradients."
                )
            self._drop()
        elif again:
            name = type(self._trainer.optimizers[0]).__name__
            raise NotImplementedError(
                f"{name} asks for the gradient of the window's last batch a second time, but those "
                f"of the batches before it (accumulate_grad_batches={times}) are gone. Use larger "
                "batches, accumulate_grad_batches=1 and MicrobatchClip(microbatch_size=...)."
            )

    def _pieces(self, batch: Any) -> list[Piece]:
        try:
            return self._batches.pieces(batch, self._examples)
        except (TypeError, ValueError) as error:
            error.add_note(
                "microclip: MicrobatchClip(batch_dim=1) takes batches with time first, and "
                "MicrobatchClip(size=...) any batch that need not be cut."
            )
            raise

    def _fold_pending(self, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        if self._pending is None:
            return
        (loss, piece), self._pending = self._pending, None
        optimizer = self._trainer.optimizers[0] if optimizer is None else optimizer
        # what is in .grad is of the window before, or of parameters that no optimizer clears
        if not self.folded:
            self._parameters = trainable(self.clipper.model)
        with set_aside(self._parameters):
            self._differentiate(loss, optimizer, *args, **kwargs)
            self.clipper.fold(
                size=piece.size, loss=loss.detach(), ids=piece.ids, domain=piece.domain
            )
        self.folded += 1
        self._examples += piece.size

    def _ends(self) -> bool:
        """Whether Lightning lets the optimizer step after this batch."""
        trainer = self._trainer
        number = trainer.fit_loop.epoch_loop.batch_idx + 1
        full = number % trainer.accumulate_grad_batches == 0
        return full or trainer.is_last_batch or number == trainer.num_training_batches

    def _finish(self) -> None:
        self.unseen = self.clipper.finish()
        self.folded = self._examples = 0

    def _check_count(self, pieces: int) -> None:
        trainer = self._trainer
        if pieces == trainer.accumulate_grad_batches == trainer.world_size == 1:
            if self._batches.microbatch_size is not None and trainer.is_last_batch:
                return  # the ragged end of an epoch
            self._warn(
                "A step has one micro-batch, so nothing is clipped. Say "
                "MicrobatchClip(microbatch_size=...) with less than the size of a batch, or "
                "Trainer(accumulate_grad_batches=...)."
            )

    def _skipped(self) -> Tensor | None:
        """Use what was folded before if a window ends with a batch that has no loss."""
        if not self.folded or not self._ends():
            return None
        if self.clipper.grad_scaler is None:
            self._finish()
            return None  # Lightning calls the optimizer nevertheless
        # with scaled losses it would not; a loss makes it, and backward() finds nothing left to do
        return torch.tensor(torch.nan, device=self._trainer.strategy.root_device)

    def _watching(self, piece: Piece) -> Any:
        if self._watched:
            return nullcontext()
        self._watched = True
        return time_first.watching(self._trainer.lightning_module, {piece.size}, self._warn)

    def _warn(self, message: str) -> None:
        if message[:20] not in self._warned:
            self._warned.add(message[:20])
            warnings.warn(message, UserWarning, stacklevel=2)

    def _drop(self) -> None:
        self.clipper.discard()
        self.folded = self._examples = 0
        self._pending = None


def _labels(domain: Any) -> Any:
    """Return one label, or a list with one for each example; tensors and arrays are no labels."""
    return domain.tolist() if hasattr(domain, "tolist") else domain


def _only(domains: list[Any]) -> Any:
    found = set(domains)
    if len(found) > 1:
        names = ", ".join(sorted(map(repr, found)))
        raise ValueError(
            f"A batch is one micro-batch, which has one domain, but domain found {names} in it. "
            "Say MicrobatchClip(microbatch_size=...), which sorts a batch by domain."
        )
    return found.pop()
