"""How Lightning's loop runs a batch micro-batch by micro-batch.

`ClippedSteps` replaces the strategy's `training_step` and `backward` while the callback is active.
Lightning computes the loss, clears `.grad` if a window of accumulation starts, runs backward, and
steps the optimizer if the window ends. All micro-batches but the last are therefore differentiated
while Lightning computes the loss, and the last one in `backward`: after every hook around
`backward`, so that we clip what they leave, and before the loss scaler looks at `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from microclip.batches import count_examples
from microclip.checks import watch_for_time_first
from microclip.clipper import Clipper
from microclip.engines.gradients import set_aside, trainable
from microclip.engines.snapshot import undisturbed
from microclip.example_step import ExampleIds
from microclip.integrations.lightning_outputs import MicrobatchLogs, MicrobatchOutputs
from microclip.microbatches import Ids, MicrobatchList, cut
from microclip.outcome import Outcome
from microclip.rules import ExampleRule
from microclip.user_warnings import warn


@dataclass(frozen=True)
class Piece:
    """One micro-batch of a batch."""

    batch: Any
    size: int
    ids: tuple[Hashable, ...] | None
    domain: Hashable


@dataclass(frozen=True)
class BatchCutter:
    """Cuts batches into micro-batches; the fields are arguments of `MicrobatchClip`."""

    microbatch_size: int | None
    batch_dim: int | None
    size: Callable[[Any], int] | None
    ids: Callable[[Any], Ids] | None
    domain: Callable[[Any], Any] | None

    def pieces(self, batch: Any, first_position: int, whole: bool = False) -> list[Piece]:
        """Return the micro-batches of a batch; `whole`: one, or one for each domain."""
        ids = None if self.ids is None else self.ids(batch)
        labels = _to_labels(None if self.domain is None else self.domain(batch))
        if self.size is not None:
            domain = _single_domain(labels) if isinstance(labels, list) else labels
            names = ids.tolist() if isinstance(ids, Tensor) else ids
            return [Piece(batch, self.size(batch), None if names is None else tuple(names), domain)]
        count = count_examples(batch, self.batch_dim or 0)
        domains = labels if isinstance(labels, list) else [labels] * count
        if self.microbatch_size is None and not whole:
            _single_domain(domains)
        found = cut(
            batch,
            None if whole else self.microbatch_size,
            ids=ids,
            domains=None if labels is None else domains,
            first_position=first_position,
            batch_dim=self.batch_dim or 0,
        )
        if len(found) == 1:
            return [Piece(batch, count, found[0].ids, found[0].domain)]
        return [Piece(each.batch, each.size, each.ids, each.domain) for each in found]


@dataclass(frozen=True)
class Pending:
    """A micro-batch after its forward pass, before its backward pass."""

    loss: Tensor  # to differentiate
    shown: Tensor  # to the clipper: the same, or one loss per example
    piece: Piece


class ClippedSteps:
    """Replaces a strategy's `training_step` and `backward` until `release` puts them back."""

    def __init__(self, trainer: pl.Trainer, clipper: Clipper, cutter: BatchCutter) -> None:
        self.clipper = clipper
        self.folded = 0  # micro-batches folded in the current window
        self.unlogged: Outcome | None = None  # set when a window ends, until it is logged
        self._trainer, self._cutter = trainer, cutter
        self._examples = 0
        self._pending: Pending | None = None
        rule = clipper.policy.rule
        self._rule = rule if isinstance(rule, ExampleRule) else None
        self._ids = None if self._rule is None else ExampleIds(self._rule)
        # whether training_step returns one loss per example, so that batches need not be cut
        self._returns_losses: bool | None = None
        self._parameters: dict[str, nn.Parameter] = {}  # trainable in this window
        self._batch = -1
        self._layout_checked = cutter.batch_dim is not None
        self._warned: set[str] = set()
        strategy = trainer.strategy
        self._before = {name: vars(strategy).get(name) for name in ("training_step", "backward")}
        self._step, self._differentiate = strategy.training_step, strategy.backward
        strategy.training_step = self.training_step  # type: ignore[method-assign]
        strategy.backward = self.backward  # type: ignore[method-assign,assignment]

    def release(self) -> None:
        """Restore the strategy's own methods and drop an unfinished window."""
        for name, value in self._before.items():
            if value is None:
                vars(self._trainer.strategy).pop(name, None)
            else:
                setattr(self._trainer.strategy, name, value)
        self._discard_window()

    def training_step(self, batch: Any, *rest: Any) -> Any:
        """Run a batch and return its merged output; None if every micro-batch was skipped."""
        if getattr(self._trainer.fit_loop, "_skip_backward", False):  # averaging BatchNorm only
            return self._step(batch, *rest)
        self._start_batch()
        pieces = self._pieces(batch, rest)
        module = self._trainer.lightning_module
        logs = MicrobatchLogs(module) if len(pieces) > 1 else None
        outputs = MicrobatchOutputs()
        with self.clipper.local():
            for piece in pieces:
                self._fold_pending()
                capture = logs.capture(piece.size) if logs else nullcontext()
                with self._checking_layout(piece), capture:
                    output = self._step(piece.batch, *rest)
                loss = _loss_of(output)
                if output is None:
                    continue
                if not isinstance(loss, Tensor):
                    return output  # Lightning raises its own error for this
                self._pending = Pending(self._weighted(loss, piece), loss.detach(), piece)
                if self._pending.loss is not loss:
                    output = _with_loss(output, self._pending.loss)
                self._warn_if_single(len(pieces), loss)
                if logs:
                    outputs.add(output, piece.size)
        if logs:
            logs.write()
            output = outputs.merged() if len(outputs) else None
        return self._finish_without_loss() if output is None else output

    def backward(
        self, loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Tensor:  # the strategy's signature; we differentiate the pending loss instead
        """Differentiate the batch's last micro-batch; clip if the window ends."""
        with self.clipper.local():
            self._fold_pending(optimizer, *args, **kwargs)
        if self._window_ends():
            self._finish()
        return loss.detach()

    def _start_batch(self) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        repeated = self._batch == loop.total_batch_idx
        self._batch = loop.total_batch_idx
        self._pending = None
        times = self._trainer.accumulate_grad_batches
        if loop.batch_idx % times == 0:
            if self.folded:
                self._warn(
                    f"An accumulation window ended without an optimizer step, so the {self.folded} "
                    "micro-batches folded in it are dropped, just as Lightning drops their "
                    "gradients."
                )
            self._discard_window()
        elif repeated:
            name = type(self._trainer.optimizers[0]).__name__
            raise NotImplementedError(
                f"{name} evaluates the last batch of an accumulation window a second time, but "
                f"the gradients of the batches before it (accumulate_grad_batches={times}) are "
                "gone by then. Use larger batches with accumulate_grad_batches=1 and "
                "MicrobatchClip(microbatch_size=...)."
            )

    def _pieces(self, batch: Any, rest: tuple[Any, ...]) -> list[Piece]:
        """Return the parts of a batch that are run and differentiated at once."""
        self._check_ids(batch)
        if self._rule is None or not self._rule.is_one_pass:
            return self._cut(batch)
        if self._cutter.microbatch_size is None:
            return self._cut(batch, whole=True)
        pieces = self._cut(batch)
        if self._returns_losses is None and len(pieces) > 1:
            self._returns_losses = self._try(pieces[0], rest)
        return self._cut(batch, whole=True) if self._returns_losses else pieces

    def _cut(self, batch: Any, whole: bool = False) -> list[Piece]:
        try:
            return self._cutter.pieces(batch, self._examples, whole)
        except (TypeError, ValueError) as error:
            error.add_note(
                "microclip: use MicrobatchClip(batch_dim=1) for time-first batches, or "
                "MicrobatchClip(size=...) for batches that need not be cut."
            )
            raise

    def _check_ids(self, batch: Any) -> None:
        """In the first two steps, refuse ids that start over in every batch."""
        if self._ids is None or self._cutter.ids is None or self.clipper.step > 1:
            return
        ids = self._cutter.ids(batch)
        names = tuple(ids.tolist() if isinstance(ids, Tensor) else ids)
        whole = MicrobatchList(batch, [range(len(names))], [None], [names])
        self._ids.keys(whole, ids, self.clipper.step)

    def _try(self, piece: Piece, rest: tuple[Any, ...]) -> bool | None:
        """Return whether training_step returns one loss per example, without leaving a trace."""
        module = self._trainer.lightning_module
        parameters = trainable(self.clipper.model)
        with (
            self.clipper.local(),
            undisturbed(self.clipper.model, parameters),
            MicrobatchLogs(module).capture(piece.size),
            torch.no_grad(),
        ):
            loss = _loss_of(self._step(piece.batch, *rest))
        return _is_per_example(loss, piece) if isinstance(loss, Tensor) else None

    def _weighted(self, loss: Tensor, piece: Piece) -> Tensor:
        """Return the loss to differentiate."""
        if self._rule is None:
            return loss
        if _is_per_example(loss, piece):
            return self.clipper.weighted_loss(loss, ids=piece.ids)
        if self._cutter.microbatch_size is None or self._returns_losses:
            raise ValueError(
                f"{type(self._rule).__name__} weights examples, but training_step returned a loss "
                f"of shape {tuple(loss.shape)} for {piece.size} of them. Return one loss per "
                'example, as with reduction="none". If that is impossible, pass '
                "MicrobatchClip(microbatch_size=1) (slow) or more, and micro-batches are weighted, "
                "by the mean weight of their examples."
            )
        return loss

    def _fold_pending(self, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        piece = pending.piece
        optimizer = self._trainer.optimizers[0] if optimizer is None else optimizer
        # .grad still holds the previous window, or belongs to parameters no optimizer clears
        if not self.folded:
            self._parameters = trainable(self.clipper.model)
        with set_aside(self._parameters):
            self._differentiate(pending.loss, optimizer, *args, **kwargs)
            self.clipper.fold(
                size=piece.size, loss=pending.shown, ids=piece.ids, domain=piece.domain
            )
        self.folded += 1
        self._examples += piece.size

    def _window_ends(self) -> bool:
        """Whether Lightning steps the optimizer after this batch."""
        trainer = self._trainer
        number = trainer.fit_loop.epoch_loop.batch_idx + 1
        full = number % trainer.accumulate_grad_batches == 0
        return full or trainer.is_last_batch or number == trainer.num_training_batches

    def _finish(self) -> None:
        self.unlogged = self.clipper.finish()
        self.folded = self._examples = 0

    def _warn_if_single(self, pieces: int, loss: Tensor) -> None:
        trainer, rule = self._trainer, self._rule
        if rule is not None and rule.is_one_pass and loss.dim():
            return  # examples are weighted, not micro-batches
        if pieces == trainer.accumulate_grad_batches == trainer.world_size == 1:
            if self._cutter.microbatch_size is not None and trainer.is_last_batch:
                return  # the short batch at the end of an epoch
            self._warn(
                "A step has only one micro-batch, so nothing is clipped. Pass "
                "MicrobatchClip(microbatch_size=...) a size below the batch size, or use "
                "Trainer(accumulate_grad_batches=...)."
            )

    def _finish_without_loss(self) -> Tensor | None:
        """If the window ends with a skipped batch, make the step from what was folded before."""
        if not self.folded or not self._window_ends():
            return None
        if self.clipper.grad_scaler is None:
            self._finish()
            return None  # Lightning still calls the optimizer
        # With a loss scaler it would not. Any loss makes it; backward() has nothing left to fold.
        return torch.tensor(torch.nan, device=self._trainer.strategy.root_device)

    def _checking_layout(self, piece: Piece) -> Any:
        if self._layout_checked:
            return nullcontext()
        self._layout_checked = True
        return watch_for_time_first(self._trainer.lightning_module, {piece.size}, self._warn)

    def _warn(self, message: str) -> None:
        if message[:20] not in self._warned:
            self._warned.add(message[:20])
            warn(message, UserWarning)

    def _discard_window(self) -> None:
        self.clipper.discard()
        self.folded = self._examples = 0
        self._pending = None


def _loss_of(output: Any) -> Any:
    """Return the loss in what training_step returned."""
    return output.get("loss") if isinstance(output, Mapping) else output


def _with_loss(output: Any, loss: Tensor) -> Any:
    """Return what training_step returned, with another loss."""
    return {**output, "loss": loss} if isinstance(output, Mapping) else loss


def _is_per_example(loss: Tensor, piece: Piece) -> bool:
    return loss.shape == (piece.size,)


def _to_labels(domain: Any) -> Any:
    """Return one label, or a list with one per example; tensors and arrays become numbers."""
    return domain.tolist() if hasattr(domain, "tolist") else domain


def _single_domain(domains: list[Any]) -> Any:
    found = set(domains)
    if len(found) > 1:
        names = ", ".join(sorted(map(repr, found)))
        raise ValueError(
            f"Each batch is one micro-batch, which must have one domain, but domain() returned "
            f"{names} for this one. Pass MicrobatchClip(microbatch_size=...), which sorts a batch "
            "by domain before cutting it."
        )
    return found.pop()
