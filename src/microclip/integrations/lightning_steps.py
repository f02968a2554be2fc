"""How Lightning's loop runs a batch micro-batch by micro-batch.

`ClippedSteps` replaces the strategy's `training_step` and `backward` while the callback is active.
Lightning computes the loss, clears `.grad` if a window of accumulation starts, runs backward, and
steps the optimizer if the window ends. All micro-batches but the last are therefore differentiated
while Lightning computes the loss, and the last one in `backward`: after every hook around
`backward`, so that we clip what they leave, and before the loss scaler looks at `.grad`.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from microclip.checks import watch_for_time_first
from microclip.clipper import Clipper
from microclip.engines.gradients import set_aside, trainable
from microclip.microbatches import Ids, count_examples, cut
from microclip.outcome import Outcome

_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}


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

    def pieces(self, batch: Any, first_position: int) -> list[Piece]:
        """Return the micro-batches of a batch."""
        ids = None if self.ids is None else self.ids(batch)
        labels = _to_labels(None if self.domain is None else self.domain(batch))
        if self.size is not None:
            domain = _single_domain(labels) if isinstance(labels, list) else labels
            names = ids.tolist() if isinstance(ids, Tensor) else ids
            return [Piece(batch, self.size(batch), None if names is None else tuple(names), domain)]
        count = count_examples(batch, self.batch_dim or 0)
        domains = labels if isinstance(labels, list) else [labels] * count
        if self.microbatch_size is None:
            _single_domain(domains)
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


class ClippedSteps:
    """Replaces a strategy's `training_step` and `backward` until `release` puts them back."""

    def __init__(self, trainer: pl.Trainer, clipper: Clipper, cutter: BatchCutter) -> None:
        self.clipper = clipper
        self.folded = 0  # micro-batches folded in the current window
        self.unlogged: Outcome | None = None  # set when a window ends, until it is logged
        self._trainer, self._cutter = trainer, cutter
        self._examples = 0
        self._pending: tuple[Tensor, Piece] | None = None  # forward has run, backward has not
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
        pieces = self._pieces(batch)
        self._warn_if_single(len(pieces))
        module = self._trainer.lightning_module
        logs = MicrobatchLogs(module) if len(pieces) > 1 else None
        outputs = MicrobatchOutputs()
        with self.clipper.local():
            for piece in pieces:
                self._fold_pending()
                capture = logs.capture(piece.size) if logs else nullcontext()
                with self._checking_layout(piece), capture:
                    output = self._step(piece.batch, *rest)
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if output is None:
                    continue
                if not isinstance(loss, Tensor):
                    return output  # Lightning raises its own error for this
                self._pending = loss, piece
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

    def _pieces(self, batch: Any) -> list[Piece]:
        try:
            return self._cutter.pieces(batch, self._examples)
        except (TypeError, ValueError) as error:
            error.add_note(
                "microclip: use MicrobatchClip(batch_dim=1) for time-first batches, or "
                "MicrobatchClip(size=...) for batches that need not be cut."
            )
            raise

    def _fold_pending(self, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        if self._pending is None:
            return
        (loss, piece), self._pending = self._pending, None
        optimizer = self._trainer.optimizers[0] if optimizer is None else optimizer
        # .grad still holds the previous window, or belongs to parameters no optimizer clears
        if not self.folded:
            self._parameters = trainable(self.clipper.model)
        with set_aside(self._parameters):
            self._differentiate(loss, optimizer, *args, **kwargs)
            self.clipper.fold(
                size=piece.size, loss=loss.detach(), ids=piece.ids, domain=piece.domain
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

    def _warn_if_single(self, pieces: int) -> None:
        trainer = self._trainer
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
            warnings.warn(message, UserWarning, stacklevel=2)

    def _discard_window(self) -> None:
        self.clipper.discard()
        self.folded = self._examples = 0
        self._pending = None


class MicrobatchOutputs:
    """Collects what `training_step` returns per micro-batch and merges it for the batch."""

    def __init__(self) -> None:
        self._outputs: list[Any] = []
        self._sizes: list[int] = []

    def __len__(self) -> int:
        return len(self._outputs)

    def add(self, output: Any, size: int) -> None:
        """Add one micro-batch's output, without its graph."""
        self._outputs.append(_detach(output))
        self._sizes.append(size)

    def merged(self) -> Any:
        """Return the output of the whole batch, with the mean loss."""
        first, sizes = self._outputs[0], self._sizes
        if isinstance(first, Tensor):
            return _weighted_mean(self._outputs, sizes)
        return {
            key: _weighted_mean([each[key] for each in self._outputs], sizes)
            if key == "loss"
            else _merge(f"{key!r}", [each.get(key) for each in self._outputs], sizes)
            for key in first
        }


class MicrobatchLogs:
    """Merges what `training_step` logs per micro-batch into one log entry for the batch."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._log = module.log
        self._signature = inspect.signature(module.log)
        self._size = 0
        self._entries: dict[str, tuple[list[Any], list[int], dict[str, Any]]] = {}

    @contextmanager
    def capture(self, size: int) -> Iterator[None]:
        """Inside the block, collect `self.log` calls of a micro-batch of this size."""
        self._size = size
        before = vars(self._module).get("log")
        self._module.log = self._collect  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._module.log  # uncovers the method again
            if before is not None:
                self._module.log = before  # type: ignore[method-assign]

    def _collect(self, *args: Any, **kwargs: Any) -> None:
        options = self._signature.bind(*args, **kwargs).arguments
        name, value = options.pop("name"), options.pop("value")
        reduction = _REDUCTIONS.get(_reduction_name(options.get("reduce_fx", "mean")))
        plain = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if not plain or reduction is None:
            self._log(name, value, **options)  # a torchmetrics Metric accumulates by itself
            return
        values, sizes, _ = self._entries.setdefault(name, ([], [], options))
        values.append(value.detach() if isinstance(value, Tensor) else value)
        sizes.append(options.get("batch_size") or self._size)

    def write(self) -> None:
        """Log the merged entries."""
        for name, (values, sizes, options) in self._entries.items():
            reduction = _REDUCTIONS[_reduction_name(options.get("reduce_fx", "mean"))]
            tensors = [torch.as_tensor(value, dtype=_float_dtype(value)) for value in values]
            if reduction == "mean":
                value = _weighted_mean(tensors, sizes)
            else:
                value = getattr(torch.stack([each.reshape(()) for each in tensors]), reduction)()
            self._log(name, value, **{**options, "batch_size": sum(sizes)})
        self._entries.clear()


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


def _weighted_mean(values: list[Tensor], sizes: list[int]) -> Tensor:
    total = torch.stack([value * size for value, size in zip(values, sizes, strict=True)]).sum(0)
    mean: Tensor = total / sum(sizes)
    return mean


def _merge(name: str, values: list[Any], sizes: list[int]) -> Any:
    """Merge outputs: concatenate per-example values, average numbers, or keep what is equal."""
    first = values[0]
    if isinstance(first, Tensor) and all(isinstance(value, Tensor) for value in values):
        if all(v.dim() > 0 and len(v) == size for v, size in zip(values, sizes, strict=True)):
            return torch.cat(values)
        if all(v.dim() == 0 and v.is_floating_point() for v in values):
            return _weighted_mean(values, sizes)
        if all(v.shape == first.shape and torch.equal(v, first) for v in values):
            return first
    elif isinstance(first, Mapping) and all(isinstance(v, Mapping) for v in values):
        keys = [key for key in first if all(key in value for value in values)]
        return {key: _merge(f"{name}[{key!r}]", [v[key] for v in values], sizes) for key in keys}
    elif all(isinstance(value, float) for value in values):
        return math.fsum(v * size for v, size in zip(values, sizes, strict=True)) / sum(sizes)
    elif isinstance(first, list) and all(
        isinstance(v, list) and len(v) == size for v, size in zip(values, sizes, strict=True)
    ):
        return [each for value in values for each in value]
    elif all(type(value) is type(first) and value == first for value in values):
        return first
    raise NotImplementedError(
        f"training_step returned {name} along with the loss, once for each of {len(values)} "
        f"micro-batches, and microclip cannot merge these into one value for the batch: {first!r}, "
        f"{values[1]!r}, ... Return one entry per example or a mean as a float, log it with "
        "self.log, or leave it out."
    )


def _detach(node: Any) -> Any:
    if isinstance(node, Tensor):
        return node.detach()
    if isinstance(node, Mapping):
        return {key: _detach(value) for key, value in node.items()}
    return node


def _reduction_name(reduce_fx: Any) -> str:
    return reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")


def _float_dtype(value: Any) -> torch.dtype:
    given = isinstance(value, Tensor) and value.is_floating_point()
    return value.dtype if given else torch.get_default_dtype()
