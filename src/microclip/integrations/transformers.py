"""Micro-batch clipping in the Trainer of transformers.

    from microclip.integrations.transformers import ClippedTrainer

    trainer = ClippedTrainer(model, args, train_dataset=data, microbatch_size=4)

`microbatch_size` is independent of `per_device_train_batch_size` and of
`gradient_accumulation_steps`: a micro-batch may be a part of what the model sees at once, or
several of those. `max_grad_norm` then acts on the clipped gradient of the whole mini-batch.

For a Trainer of your own: `class MyClippedTrainer(ClippedTrainerMixin, MyTrainer)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from microclip.clipper import Clipper
from microclip.engines.choose import EngineName, Scope
from microclip.engines.losses import LossFn, backward
from microclip.integrations.metrics import metrics
from microclip.microbatches import check_size, count_examples
from microclip.outcome import Outcome
from microclip.rules import Nonfinite, Rule

try:
    import accelerate  # noqa: F401
    from transformers import Seq2SeqTrainer, Trainer
except ImportError as error:
    raise ImportError(
        "microclip.integrations.transformers needs transformers and accelerate: "
        "pip install 'microclip[hf]'"
    ) from error

from microclip.integrations.candidates import of_kind
from microclip.integrations.columns import EXAMPLES, ColumnCollator, check_column, named_in, read
from microclip.integrations.denominators import Denominators
from microclip.integrations.example_losses import ExampleLossFinder, has_gaps, zero_for_nothing
from microclip.integrations.growing import GrowingMicrobatch
from microclip.integrations.refusals import (
    OnlyClipped,
    check_order,
    packed_message,
    refuse_early_use,
    refuse_shards,
)

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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_order(cls, ClippedTrainerMixin)

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
        self._fresh_rule = None if rule is None else deepcopy(rule.state_dict())
        self.clipper: Clipper | None = None  # made with the first batch, for the wrapped model
        self._state: dict[str, Any] | None = None  # of a checkpoint, until the clipper has it
        self._losses = ExampleLossFinder(self)
        self._growing = GrowingMicrobatch(self._size or 1)
        self._means: Denominators | None = None
        self._means_for: tuple[Any, ...] = ()
        self._folded = False  # something since the last optimizer step
        self._clipped = False  # what is in `.grad`
        super().__init__(*args, **kwargs)
        trainer: Any = self
        refuse_early_use(trainer)
        trainer.add_callback(OnlyClipped(self))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; what a ledger has recorded is on disk afterwards, however it ends."""
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            if self._options["ledger"] is not None:
                self._options["ledger"].flush()

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Start anew: what an interrupted training has left is no part of the next step.

        Called by `train`, and again for every batch size that `auto_find_batch_size` tries.
        """
        self._state = None
        self._losses, self._means = ExampleLossFinder(self), None
        self._growing.drop()
        self._folded = self._clipped = False
        if self.clipper is not None:
            self.clipper.discard()
        return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]

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
        packed = inputs.pop(EXAMPLES, None)
        labels = self._take_columns(inputs)
        clipper = self._clipper_of(model)
        # not by the size of this batch: the last one of an epoch is only shorter
        at_once = trainer._train_batch_size or trainer.args.train_batch_size
        if trainer.accelerator.split_batches:
            at_once //= trainer.accelerator.num_processes
        last = trainer.accelerator.sync_gradients
        whole_step = last and trainer.current_gradient_accumulation_steps == 1 and not self._folded
        if packed is not None and self._size not in (None, at_once):
            raise NotImplementedError(packed_message(packed, inputs, self._size))
        if packed is not None:
            self._fold_packed(model, clipper, inputs, packed, labels)
        elif self._size is not None and self._size > at_once:
            self._grow(model, clipper, inputs, labels)
            if last:
                self._growing.fold(clipper)
        else:
            loss_fn = self._loss_fn(model, inputs, labels.get("domains"), at_once)
            if whole_step:
                return self._logged(clipper.backward(loss_fn, inputs, **labels))
            clipper.fold(loss_fn, inputs, **labels)
        self._folded = True
        return self._logged(clipper.finish() if last else None)

    def _logged(self, outcome: Outcome | None) -> Tensor:
        """Return what counts as a batch's loss: with the last batch of a step, all of it."""
        trainer: Any = self
        if outcome is not None:
            self._folded, self._clipped = False, True
        if outcome is None or outcome.loss is None:
            return torch.zeros((), device=trainer.args.device)
        return outcome.loss.to(trainer.args.device)

    def _take_columns(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Take domains and ids out of a batch, but for those that the model needs as well."""
        trainer: Any = self
        found = {}
        for name, column in self._columns.items():
            if column is None:
                continue
            check_column(column, list(inputs))
            found[name] = read(inputs[column])
        given = named_in(trainer.model.forward) if found else frozenset()
        for column in {column for column in self._columns.values() if column} - given:
            inputs.pop(column)
        return found

    def _loss_fn(
        self, model: nn.Module, inputs: dict[str, Any], domains: Any, at_once: int
    ) -> LossFn:
        """Return what gives a micro-batch's loss, or its examples' if they can be had."""
        trainer: Any = self
        each = None
        if self._size is not None and self._size < at_once:  # else it is of no use
            each = self._losses.find(model, inputs)
            if each is not None:
                each.share(inputs, self._size, domains)
            elif self._options["engine"] == "fused":
                raise NotImplementedError(
                    'engine="fused" needs the losses of single examples, but '
                    f'{self._losses.reason}. Use engine="auto".'
                )
        gaps = each is None and has_gaps(inputs)

        def loss_fn(batch: Any) -> Tensor:
            if each is None:
                labels = batch["labels"] if gaps else None
                loss = self._loss(model, batch)
                return loss if labels is None else zero_for_nothing(loss, labels, model)
            with trainer.compute_loss_context_manager():
                return each(model, batch)

        return loss_fn

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return what the Trainer trains on."""
        trainer: Any = self
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(model, batch, num_items_in_batch=None)
            return loss

    def _fold_packed(
        self,
        model: nn.Module,
        clipper: Clipper,
        inputs: dict[str, Any],
        examples: int,
        labels: dict[str, Any],
    ) -> None:
        """Fold a batch without padding as one micro-batch, which counts by its examples."""
        if "domains" in labels:
            raise NotImplementedError(
                f"The data collator made a batch without padding of {examples} examples, so they "
                "cannot be told apart by domain. Use a collator that pads."
            )
        refuse_shards(model)
        with clipper.local():
            loss = self._loss(model, inputs)
            backward(loss, clipper.grad_scaler)
            clipper.fold(size=examples, loss=loss, ids=labels.get("ids"))

    def _grow(
        self, model: nn.Module, clipper: Clipper, inputs: dict[str, Any], labels: dict[str, Any]
    ) -> None:
        """Let a micro-batch grow over several batches, up to its size and no further."""
        if "domains" in labels:
            raise ValueError(
                f"With domains, a micro-batch must be part of a batch, but microbatch_size "
                f"{self._size} is larger than the {count_examples(inputs)} examples that the model "
                "sees at once."
            )
        refuse_shards(model)
        means, loss_fn = self._means_of(model, inputs), partial(self._loss, model)
        self._growing.add(clipper, inputs, labels.get("ids"), loss_fn, means)

    def _means_of(self, model: nn.Module, inputs: dict[str, Any]) -> Denominators:
        """Return what the loss is the mean over: as it is known, else as it is measured."""
        trainer: Any = self
        inner = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
        each = self._losses.find(model, inputs)
        functions = (trainer.compute_loss_func, vars(trainer).get("compute_loss"))
        loss = (id(inner), each and each.kind, trainer.label_smoother, *functions)
        if self._means is None or loss != self._means_for:
            known = None if each is None else of_kind(each.kind, inputs)
            self._means = Denominators(trainer, inner, known)
            self._means_for = loss
        return self._means

    def _clipper_of(self, model: nn.Module) -> Clipper:
        if self.clipper is not None and self.clipper.model is not model:
            self._forget()  # what a rule remembers of one model is not true of another
        if self.clipper is None:
            trainer: Any = self
            scaler = trainer.accelerator.scaler
            self.clipper = Clipper(model, self._size, grad_scaler=scaler, **self._options)
        if self._state is not None:
            self.clipper.load_state_dict(self._state)
            self._state = None
        return self.clipper

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add what clipping did to what is logged of training."""
        if "loss" in logs and self.clipper is not None and self.clipper.outcome is not None:
            logs = {**logs, **metrics(self.clipper.outcome)}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's own, whose batches have the columns that were asked for."""
        trainer: Any = self
        there = getattr(trainer.train_dataset, "column_names", None)
        for column in self._columns.values():
            if column is not None and isinstance(there, list):
                check_column(column, there)
        with self._collating_columns(show=True):
            return super().get_train_dataloader()  # type: ignore[misc]

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's own, without these columns."""
        with self._collating_columns(show=False):
            return super().get_eval_dataloader(*args, **kwargs)  # type: ignore[misc]

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's own, without these columns."""
        with self._collating_columns(show=False):
            return super().get_test_dataloader(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _collating_columns(self, show: bool) -> Iterator[None]:
        """Inside the block, the Trainer's collator is one that looks after the columns."""
        trainer: Any = self
        columns = tuple(dict.fromkeys(column for column in self._columns.values() if column))
        given = named_in(trainer.model.forward)
        trainer._set_signature_columns_if_needed()
        collator, signature = trainer.data_collator, trainer._signature_columns
        source = inspect.unwrap(getattr(collator, "func", collator))
        theirs = str(getattr(source, "__module__", "")).startswith("transformers.")
        hide = trainer.args.remove_unused_columns or theirs
        dispatch = trainer.accelerator.dispatch_batches
        if dispatch is None:
            dispatch = isinstance(trainer.train_dataset, IterableDataset)
        sent = dispatch and trainer.accelerator.num_processes > 1
        trainer.data_collator = ColumnCollator(
            collator, columns, given, hide=hide, show=show, as_tensors=sent
        )
        trainer._signature_columns = [*signature, *(columns if show else ())]
        try:
            yield
        finally:
            trainer.data_collator, trainer._signature_columns = collator, signature

    def _get_collator_with_removed_columns(self, data_collator: Any, *args: Any, **kw: Any) -> Any:
        wrap = super()._get_collator_with_removed_columns  # type: ignore[misc]
        if not isinstance(data_collator, ColumnCollator):
            return wrap(data_collator, *args, **kw)
        # the columns are read before any are removed, and can be named where one is missing
        return data_collator.around(wrap(data_collator.collator, *args, **kw))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        trainer: Any = self
        if self.clipper is None:
            return
        if self._options["ledger"] is not None:  # of every rank, for each has its own
            self._options["ledger"].flush()
        if trainer.args.should_save:
            torch.save(self.clipper.lasting_state(), Path(output_dir) / STATE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None and (Path(checkpoint) / STATE).exists():
            self._state = torch.load(Path(checkpoint) / STATE)
        elif checkpoint is not None:  # of a Trainer that did not clip: nothing is known from then
            self._forget()

    def _forget(self) -> None:
        """Begin with a new clipper and a rule that remembers nothing."""
        self.clipper = None
        if self._fresh_rule is not None:
            self._options["rule"].load_state_dict(deepcopy(self._fresh_rule))


class ClippedTrainer(ClippedTrainerMixin, Trainer):
    """The Trainer, with clipping."""


class ClippedSeq2SeqTrainer(ClippedTrainerMixin, Seq2SeqTrainer):
    """The Seq2SeqTrainer, with clipping."""
