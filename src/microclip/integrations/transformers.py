"""Micro-batch clipping in the Trainer of transformers.

    from microclip.integrations.transformers import ClippedTrainer

    trainer = ClippedTrainer(model, args, train_dataset=data, microbatch_size=4)

`microbatch_size` is independent of `per_device_train_batch_size` and of
`gradient_accumulation_steps`: a micro-batch may be a part of what the model sees at once, or
several of those. `max_grad_norm` then acts on the clipped gradient of the whole mini-batch.

For a Trainer of your own: `class MyClippedTrainer(ClippedTrainerMixin, MyTrainer)`.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from microclip.clipper import Clipper
from microclip.engines.choose import EngineName, Scope
from microclip.engines.losses import LossFn, backward
from microclip.integrations.example_losses import ExampleLosses
from microclip.integrations.metrics import metrics
from microclip.microbatches import Ids, check_size, count_examples, cut
from microclip.outcome import Outcome
from microclip.rules import Nonfinite, Rule

try:
    from accelerate.utils import DistributedType
    from transformers import Seq2SeqTrainer, Trainer
except ImportError as error:
    raise ImportError(
        "microclip.integrations.transformers needs transformers and accelerate: "
        "pip install 'microclip[hf]'"
    ) from error

if TYPE_CHECKING:
    from microclip.ledger import Ledger

STATE = "microclip.pt"  # beside the optimizer's, in a checkpoint


class ClippedTrainerMixin:
    """Put it before a Trainer: it replaces the backward pass, and nothing else.

    Args:
        microbatch_size: b, the examples clipped together on one rank; None: all that a rank sees at
            once (`per_device_train_batch_size`).
        rule: How norms become weights; the default is `rules.MinNorm()`.
        engine: As in `Clipper`.
        nonfinite: As in `Clipper`.
        scope: As in `Clipper`, for FSDP2.
        ledger: As in `Clipper`: records what was done to which examples.
        domain_column: A column of the data set with the examples' domains.
        id_column: A column of the data set with the examples' names.
    """

    def __init__(
        self,
        *args: Any,
        microbatch_size: int | None = None,
        rule: Rule | None = None,
        engine: EngineName = "auto",
        nonfinite: Nonfinite = "propagate",
        scope: Scope = "rank",
        ledger: Ledger | None = None,
        domain_column: str | None = None,
        id_column: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._size = check_size(microbatch_size)
        self._options: dict[str, Any] = {"rule": rule, "engine": engine, "nonfinite": nonfinite}
        self._options |= {"scope": scope, "ledger": ledger}
        self._columns = {"domains": domain_column, "ids": id_column}
        self.clipper: Clipper | None = None  # made with the first batch, for the wrapped model
        self._state: dict[str, Any] | None = None
        # how the losses of single examples are had; None: not asked yet
        self._each: ExampleLosses | Literal["unknown"] | None = None
        self._waiting = 0  # examples of a micro-batch that is not complete
        self._ids_waiting: tuple[Hashable, ...] = ()
        self._items_waiting: Tensor | float = 0.0
        self._loss_waiting: Tensor | float = 0.0
        super().__init__(*args, **kwargs)
        trainer: Any = self
        if trainer.accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise NotImplementedError(
                "DeepSpeed reduces gradients before they can be clipped. Use DDP or FSDP2."
            )
        if trainer.args.n_gpu > 1:
            raise NotImplementedError(
                "nn.DataParallel mixes the gradients of its GPUs. Start with torchrun, which gives "
                "each GPU a process of its own."
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; what a ledger has recorded is on disk afterwards, however it ends."""
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            if self._options["ledger"] is not None:
                self._options["ledger"].flush()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Differentiate one batch; with the last of a step, clip.

        `num_items_in_batch` would make the norm of a gradient follow the number of tokens; every
        micro-batch has the mean loss of its own.
        """
        trainer: Any = self
        model.train()
        if hasattr(trainer.optimizer, "train") and callable(trainer.optimizer.train):
            trainer.optimizer.train()
        inputs = dict(trainer._prepare_inputs(inputs))
        columns = {name: column for name, column in self._columns.items() if column}
        labels = {name: inputs.pop(column, None) for name, column in columns.items()}
        clipper = self._clipper_of(model)
        # not by the size of this batch: the last one of an epoch is only shorter
        at_once = trainer._train_batch_size or trainer.args.train_batch_size
        last = trainer.accelerator.sync_gradients
        if self._size is not None and self._size > at_once:
            self._add_parts(model, clipper, inputs, labels.get("ids"))
            if last:
                self._fold_parts(clipper)
        else:
            loss_fn = self._loss_fn(model, inputs, labels.get("domains"), at_once)
            if last and trainer.current_gradient_accumulation_steps == 1:
                return self._logged(clipper.backward(loss_fn, inputs, **labels))
            clipper.fold(loss_fn, inputs, **labels)
        return self._logged(clipper.finish() if last else None)

    def _logged(self, outcome: Outcome | None) -> Tensor:
        """Return what counts as a batch's loss: with the last batch of a step, all of it."""
        trainer: Any = self
        if outcome is None or outcome.loss is None:
            return torch.zeros((), device=trainer.args.device)
        return outcome.loss.to(trainer.args.device)

    def _loss_fn(
        self, model: nn.Module, inputs: dict[str, Any], domains: Any, at_once: int
    ) -> LossFn:
        """Return what gives a micro-batch's loss, or its examples' if they can be had."""
        trainer: Any = self
        each = self._losses_of_examples(model, inputs, at_once)
        if each is not None:
            each.share(inputs, self._size, domains)

        def loss_fn(batch: Any) -> Tensor:
            with trainer.compute_loss_context_manager():
                if each is not None:
                    return each(model, batch)
                loss: Tensor = trainer.compute_loss(model, batch, num_items_in_batch=None)
                return loss

        return loss_fn

    def _add_parts(
        self, model: nn.Module, clipper: Clipper, inputs: dict[str, Any], ids: Ids | None
    ) -> None:
        """Let a micro-batch grow over several batches, up to its size and no further."""
        trainer: Any = self
        assert self._size is not None
        if self._columns["domains"]:
            raise ValueError(
                f"With domains, a micro-batch must be part of a batch, but microbatch_size "
                f"{self._size} is larger than the {count_examples(inputs)} examples that the model "
                "sees at once."
            )
        for part in cut(inputs, self._size - self._waiting, ids=ids):
            items = self._items(part.batch, part.size)
            with clipper.local():
                with trainer.compute_loss_context_manager():
                    loss = trainer.compute_loss(model, part.batch, num_items_in_batch=None)
                backward(loss * items, clipper.grad_scaler)
            self._waiting += part.size
            self._ids_waiting += () if ids is None else part.ids
            self._items_waiting += items
            self._loss_waiting += loss.detach() * items
            if self._waiting == self._size:
                self._fold_parts(clipper)

    def _fold_parts(self, clipper: Clipper) -> None:
        """Fold what has grown; at the end of a step that may be a smaller micro-batch."""
        if not self._waiting:
            return
        for parameter in clipper.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self._items_waiting)
        loss = torch.as_tensor(self._loss_waiting / self._items_waiting)
        with clipper.local():
            clipper.fold(size=self._waiting, loss=loss, ids=self._ids_waiting or None)
        self._waiting, self._items_waiting, self._loss_waiting = 0, 0.0, 0.0
        self._ids_waiting = ()

    def _items(self, inputs: Any, size: int) -> Tensor | float:
        """Return what the model's mean loss is the mean over: labels that count, or examples."""
        trainer: Any = self
        labels = inputs.get("labels")
        if labels is None or labels.dim() < 2 or "CTC" in type(trainer.model).__name__:
            return float(size)
        if getattr(trainer, "_loss_shifts_labels", False):
            labels = labels[..., 1:]
        counted: Tensor = (labels != -100).sum()
        return counted.to(torch.float32)

    def _losses_of_examples(
        self, model: nn.Module, inputs: dict[str, Any], at_once: int
    ) -> ExampleLosses | None:
        """Return how the examples' losses are had, if they are of use and follow from the model."""
        trainer: Any = self
        if self._size is None or self._size >= at_once or self._each == "unknown":
            return None
        inner = trainer.accelerator.unwrap_model(model)
        if self._each is None:
            overridden = type(self).compute_loss is not Trainer.compute_loss  # type: ignore[attr-defined]
            found = None if overridden else ExampleLosses.find(trainer, inner, inputs)
            self._each = found or "unknown"
        if not isinstance(self._each, ExampleLosses):
            return None
        with trainer.compute_loss_context_manager():
            if not self._each.agree(inner, inputs):
                self._each = "unknown"
                return None
        return self._each

    def _clipper_of(self, model: nn.Module) -> Clipper:
        if self.clipper is None or self.clipper.model is not model:
            trainer: Any = self
            scaler = trainer.accelerator.scaler
            self.clipper = Clipper(model, self._size, grad_scaler=scaler, **self._options)
            if self._state is not None:
                self.clipper.load_state_dict(self._state)
        return self.clipper

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add what clipping did to what is logged of training."""
        if "loss" in logs and self.clipper is not None and self.clipper.outcome is not None:
            logs = {**logs, **metrics(self.clipper.outcome)}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        trainer: Any = self
        for column in self._columns.values():
            if column is not None and column not in trainer._signature_columns:
                trainer._signature_columns.append(column)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        trainer: Any = self
        if self.clipper is None:
            return
        state = self.clipper.state_dict()  # of every rank, for each has a ledger to flush
        if trainer.args.should_save:
            torch.save(state, Path(output_dir) / STATE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None and (Path(checkpoint) / STATE).exists():
            self._state = torch.load(Path(checkpoint) / STATE)


class ClippedTrainer(ClippedTrainerMixin, Trainer):
    """The Trainer, with clipping."""


class ClippedSeq2SeqTrainer(ClippedTrainerMixin, Seq2SeqTrainer):
    """The Seq2SeqTrainer, with clipping."""
