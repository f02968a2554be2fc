"""`RecordingTrainer`: transformers' Trainer, which also records the loss of every example.

Training is not changed in any way. What is recorded is for `microclip.find_issues` and
`microclip.spikes`: per-example losses from the model's outputs and, for classifiers, predictions.

For your own Trainer: `class MyRecordingTrainer(RecordingTrainerMixin, MyTrainer)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    from transformers import Seq2SeqTrainer, Trainer
except ImportError as error:
    raise ImportError(
        "microclip.integrations.recording needs transformers: pip install 'microclip[hf]'"
    ) from error

from microclip.integrations.columns import (
    EXAMPLE_COUNT,
    ColumnCollator,
    check_column,
    collating_columns,
    decode_strings,
)
from microclip.integrations.example_losses import CrossEntropy, Ctc, LossKind

if TYPE_CHECKING:
    from microclip.ledger import Ledger

Losses = Callable[[Any, dict[str, Any]], Tensor]  # outputs and inputs to one loss per example


class RecordingTrainerMixin:
    """Adds recording to the Trainer that follows it.

    Args:
        ledger: Where to record, `microclip.Ledger(folder)`.
        id_column: The column of the data set with the examples' ids; see `microclip.with_ids`.
        losses: Returns one loss per example, from the model's outputs and the batch. By default
            they are those of classifiers, regressions, language models and CTC.
    """

    def __init__(
        self,
        *args: Any,
        ledger: Ledger,
        id_column: str = "id",
        losses: Losses | None = None,
        **kwargs: Any,
    ) -> None:
        self._ledger, self._id_column, self._example_losses = ledger, id_column, losses
        self._next: int | None = None  # the number of the next batch to record
        self._shifted: bool | None = None  # whether the model's tokens predict the next one
        super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and write the ledger to disk however training ends."""
        self._next = self._shifted = None
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._ledger.flush()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the Trainer's own loss, after recording that of every example."""
        trainer: Any = self
        inputs = dict(inputs)
        inputs.pop(EXAMPLE_COUNT, None)
        ids = inputs.pop(self._id_column, None)
        batch = dict(inputs)  # the Trainer may take labels out
        compute = super().compute_loss  # type: ignore[misc]
        loss, outputs = compute(model, inputs, True, *args, **kwargs)
        if model.training:
            items = kwargs.get("num_items_in_batch")
            total = None if items is None else loss * items / trainer.accelerator.num_processes
            self._record(model, decode_strings(ids), outputs, batch, _Reported(loss, total))
        return (loss, outputs) if return_outputs else loss

    def _record(
        self, model: Any, ids: Any, outputs: Any, batch: dict[str, Any], loss: _Reported
    ) -> None:
        if ids is None:
            raise ValueError(
                f"The batches have no column {self._id_column!r} with the ids of examples. Add one "
                "to the data set, for instance with microclip.with_ids(dataset), or name it: "
                "id_column=..."
            )
        trainer: Any = self
        if self._next is None:  # after a checkpoint, training does not start at 0
            self._next = trainer.state.global_step * trainer.args.gradient_accumulation_steps
        losses = (self._example_losses or self._stock_losses(model, loss))(outputs, batch)
        labels = batch.get("labels")
        more: dict[str, Any] = {}
        if self._example_losses is None and isinstance(labels, Tensor) and _are_classes(labels):
            more = {"logits": outputs["logits"], "labels": labels}
        self._ledger.record(ids, losses.detach(), step=self._next, **more)
        self._next += 1

    def _stock_losses(self, model: Any, loss: _Reported) -> Losses:
        """Return per-example losses of the kinds of model that transformers has a loss for."""
        trainer: Any = self
        inner = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)

        def losses(outputs: Any, batch: dict[str, Any]) -> Tensor:
            labels, logits = batch.get("labels"), outputs.get("logits")
            if not isinstance(labels, Tensor) or not isinstance(logits, Tensor):
                raise ValueError(
                    "Per-example losses need labels in the batch and logits in the model's "
                    "outputs. Pass losses=, a function of outputs and batch."
                )
            if labels.is_floating_point():
                return _of_numbers(logits, labels)
            kind: LossKind = CrossEntropy(shifted=False)
            if labels.dim() > 1 and hasattr(inner.config, "ctc_loss_reduction"):
                kind = Ctc(inner)
            elif labels.dim() > 1:
                if self._shifted is None:
                    self._shifted = _is_shifted(outputs, batch, loss)
                kind = CrossEntropy(shifted=self._shifted)
            sums, counts = kind.sums(outputs, batch), kind.counts(labels)
            return sums if counts is None else sums / counts.clamp(min=1)

        return losses

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's own loader, with the id column in its batches."""
        trainer: Any = self
        there = getattr(trainer.train_dataset, "column_names", None)
        if isinstance(there, list):
            check_column(self._id_column, there)
        with collating_columns(self, (self._id_column,), add_to_batch=True):
            return super().get_train_dataloader()  # type: ignore[misc]

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's own loader, without the id column."""
        with collating_columns(self, (self._id_column,), add_to_batch=False):
            return super().get_eval_dataloader(*args, **kwargs)  # type: ignore[misc]

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's own loader, without the id column."""
        with collating_columns(self, (self._id_column,), add_to_batch=False):
            return super().get_test_dataloader(*args, **kwargs)  # type: ignore[misc]

    def _get_collator_with_removed_columns(self, data_collator: Any, *args: Any, **kw: Any) -> Any:
        wrap = super()._get_collator_with_removed_columns  # type: ignore[misc]
        if not isinstance(data_collator, ColumnCollator):
            return wrap(data_collator, *args, **kw)
        return data_collator.with_collator(wrap(data_collator.collator, *args, **kw))


class _Reported(NamedTuple):
    """What the Trainer says about a batch."""

    loss: Tensor
    total: Tensor | None  # over all labels, if the Trainer counts them until the next step


def _is_shifted(outputs: Any, batch: dict[str, Any], reported: _Reported) -> bool:
    """Return whether each token predicts the next one: which of both is the Trainer's loss?"""
    errors = []
    with torch.no_grad():
        for shifted in (True, False):
            kind = CrossEntropy(shifted)
            total, count = kind.sums(outputs, batch).sum(), kind.counts(batch["labels"]).sum()
            found = [abs(float(total / count.clamp(min=1) - reported.loss))]
            if reported.total is not None:
                found.append(abs(float((total - reported.total) / count.clamp(min=1))))
            errors.append(min(found))
    return errors[0] <= errors[1]


def _are_classes(labels: Tensor) -> bool:
    return labels.dim() == 1 and not labels.is_floating_point()


def _of_numbers(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the squared errors of a regression, or the cross-entropies of several labels."""
    if labels.dim() > 1 and labels.shape[-1] > 1 and logits.shape == labels.shape:
        each = F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none")
    else:
        each = (logits.float().view_as(labels) - labels.float()).square()
    return each.reshape(len(labels), -1).mean(1)


class RecordingTrainer(RecordingTrainerMixin, Trainer):
    """transformers' Trainer, which also records the loss of every example; see the mixin."""


class RecordingSeq2SeqTrainer(RecordingTrainerMixin, Seq2SeqTrainer):
    """The same for sequence-to-sequence models."""
