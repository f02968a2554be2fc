"""Micro-batch clipping in transformers' Trainer.

    from microclip.integrations.transformers import ClippedTrainer

    trainer = ClippedTrainer(model, args, train_dataset=data, microbatch_size=4)

`microbatch_size` is independent of `per_device_train_batch_size` and
`gradient_accumulation_steps`: a micro-batch may be part of a batch or span several batches.
`max_grad_norm` then acts on the clipped gradient of the whole mini-batch.

For your own Trainer: `class MyClippedTrainer(ClippedTrainerMixin, MyTrainer)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from microclip.batches import count_examples
from microclip.checks import check_choice
from microclip.clipper import Clipper
from microclip.engines.gradients import LossFn, backward
from microclip.engines.select import EngineName, Scope
from microclip.integrations.metrics import metrics
from microclip.microbatches import check_size
from microclip.outcome import Outcome
from microclip.rules import ExampleRule, Nonfinite, Rule

try:
    import accelerate  # noqa: F401
    from transformers import Seq2SeqTrainer, Trainer
except ImportError as error:
    raise ImportError(
        "microclip.integrations.transformers needs transformers and accelerate: "
        "pip install 'microclip[hf]'"
    ) from error

from microclip.integrations.columns import (
    EXAMPLE_COUNT,
    ColumnCollator,
    check_column,
    collating_columns,
    decode_strings,
    forward_arguments,
)
from microclip.integrations.denominator_finder import DenominatorFinder
from microclip.integrations.denominators import known_denominator
from microclip.integrations.example_losses import (
    LOSS_MEANS,
    ExampleLosses,
    ExampleLossFinder,
    LossMean,
    may_lack_labels,
    zero_if_no_labels,
)
from microclip.integrations.loss_means import StepLabels, refuse_mean
from microclip.integrations.trainer_checks import (
    RequireClipped,
    check_base_classes,
    check_weighted_batch,
    no_example_losses_message,
    not_examples_message,
    refuse_sharded,
    refuse_unsupported,
)
from microclip.integrations.wide_microbatches import WideMicrobatch

if TYPE_CHECKING:
    from microclip.ledger import Ledger

STATE = "microclip.pt"  # in a checkpoint, next to optimizer.pt


class ClippedTrainerMixin:
    """Adds clipping to the Trainer that follows it; replaces the backward pass and nothing else.

    Args:
        microbatch_size: b, how many examples are clipped together, on one rank. None: a whole
            batch (`per_device_train_batch_size`).
        rule: How norms become weights; the default is `rules.MinNorm()`. Rules that weight
            examples, such as `rules.LossHistory()`, learn from the Trainer how long it trains.
        engine: As in `Clipper`.
        nonfinite: As in `Clipper`.
        scope: As in `Clipper`, for FSDP2.
        ledger: As in `Clipper`: records what was done to which examples.
        domain_column: The column of the data set with the examples' domains.
        id_column: The column of the data set with the examples' ids, which rules that remember
            examples need.
        loss_mean: Whose labels (tokens) a loss is the mean over. "microbatch": those of the
            micro-batch. "example": those of each example, so long texts do not count for more than
            short ones. "step": those of the whole step, as in the stock Trainer, so they do.
    """

    _packages: tuple[str, ...] = ("transformers",)  # whose training_step may be replaced

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_base_classes(cls, ClippedTrainerMixin, cls._packages)

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
        loss_mean: LossMean = "microbatch",
        **kwargs: Any,
    ) -> None:
        self._size = check_size(microbatch_size)
        check_choice("loss_mean", loss_mean, LOSS_MEANS)
        self._loss_mean, self._step_labels = loss_mean, StepLabels(self)
        self._options: dict[str, Any] = {"rule": rule, "engine": engine, "nonfinite": nonfinite}
        self._options |= {"scope": scope, "ledger": ledger}
        self._columns = {"domains": domain_column, "ids": id_column}
        self._fresh_rule = None if rule is None else deepcopy(rule.state_dict())
        self._example_rule = rule if isinstance(rule, ExampleRule) else None
        # whether to tell the rule how long training takes, because the user has not
        self._tells_steps = (
            self._example_rule is not None and self._example_rule.total_steps is None
        )
        self._must_tell_steps = self._tells_steps
        self.clipper: Clipper | None = None  # created with the first batch, for the wrapped model
        self._state: dict[str, Any] | None = None  # from a checkpoint, until the clipper is created
        self._losses = self._new_loss_finder()
        self._wide = WideMicrobatch(self._size or 1)
        self._finder: DenominatorFinder | None = None
        self._finder_for: tuple[Any, ...] = ()  # the loss it belongs to
        self._folded = False  # anything since the last optimizer step
        self._clipped = False  # whether `.grad` holds a clipped gradient
        super().__init__(*args, **kwargs)
        trainer: Any = self
        refuse_unsupported(trainer)
        trainer.add_callback(RequireClipped(self))

    def _new_loss_finder(self) -> ExampleLossFinder:
        return ExampleLossFinder(self)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and write the ledger to disk however training ends."""
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            if self._options["ledger"] is not None:
                self._options["ledger"].flush()

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Start afresh: the rest of an interrupted step must not enter the next one.

        `train` calls this once, or once for every batch size that `auto_find_batch_size` tries.
        """
        self._state = None
        self._must_tell_steps = self._tells_steps
        self._losses, self._finder = self._new_loss_finder(), None
        self._step_labels = StepLabels(self)
        self._wide.discard()
        self._folded = self._clipped = False
        if self.clipper is not None:
            self.clipper.discard()
        return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Differentiate one batch; clip if it is the last of a step.

        Every micro-batch has its own mean loss. `num_items_in_batch` is not used, unless with
        loss_mean="step": with it, the norm of a gradient depends on the number of tokens.
        """
        trainer: Any = self
        model.train()
        if hasattr(trainer.optimizer, "train") and callable(trainer.optimizer.train):
            trainer.optimizer.train()
        inputs = dict(trainer._prepare_inputs(inputs))
        packed = inputs.pop(EXAMPLE_COUNT, None)
        columns = self._take_columns(inputs)
        clipper = self._clipper_of(model)
        self._prepare_example_rule(clipper, columns, packed)
        batch_size = self._batch_size()
        last = trainer.accelerator.sync_gradients
        whole_step = last and trainer.current_gradient_accumulation_steps == 1 and not self._folded
        if packed is not None and self._size not in (None, batch_size):
            raise NotImplementedError(not_examples_message(packed, inputs, self._size))
        if packed is not None:
            refuse_mean(self._loss_mean, "the data collator packs examples without padding")
            self._fold_packed(model, clipper, inputs, packed, columns)
        elif self._is_wide(model, inputs, batch_size):
            refuse_mean(
                self._loss_mean, f"microbatch_size {self._size} exceeds a batch of {batch_size}"
            )
            self._add_to_wide(model, clipper, inputs, columns)
            if last:
                self._wide.fold(clipper)
        else:
            loss_fn = self._loss_fn(model, inputs, columns.get("domains"), batch_size)
            if whole_step:
                return self._step_loss(clipper.backward(loss_fn, inputs, **columns))
            clipper.fold(loss_fn, inputs, **columns)
        self._folded = True
        return self._step_loss(clipper.finish() if last else None)

    def _batch_size(self) -> int | None:
        """Return the examples of a batch, None if their number varies.

        Not of this very batch: the last one of an epoch may be shorter.
        """
        trainer: Any = self
        size: int = trainer._train_batch_size or trainer.args.train_batch_size
        return size // (
            trainer.accelerator.num_processes if trainer.accelerator.split_batches else 1
        )

    def _prepare_example_rule(
        self, clipper: Clipper, columns: dict[str, Any], packed: int | None
    ) -> None:
        """Tell a rule that weights examples how long training takes; refuse useless batches."""
        rule = self._example_rule
        if rule is None:
            return
        check_weighted_batch(rule, columns.get("ids"), packed)
        if self._must_tell_steps:
            state = self.state  # type: ignore[attr-defined]
            # the clipper has counted the steps of earlier calls of train(), too
            rule.total_steps = clipper.step + max(1, state.max_steps - state.global_step)
            self._must_tell_steps = False

    def _is_wide(self, model: nn.Module, inputs: dict[str, Any], batch_size: int | None) -> bool:
        """Whether micro-batches span several batches."""
        if self._size is None or batch_size is None or self._size <= batch_size:
            return False
        rule = self._example_rule
        if rule is None:
            return True
        if rule.clip is not None:
            raise NotImplementedError(
                f"{rule!r} clips micro-batches of weighted examples, which must be part of one "
                f"batch, but microbatch_size {self._size} is larger than the {batch_size} examples "
                "of a batch. Increase per_device_train_batch_size, or decrease microbatch_size."
            )
        # examples that can be weighted one by one need no micro-batches
        return self._losses.find(model, inputs) is None

    def _step_loss(self, outcome: Outcome | None) -> Tensor:
        """Return the loss for the Trainer's log: the step's with its last batch, 0 before that."""
        trainer: Any = self
        if outcome is not None:
            self._folded, self._clipped = False, True
        if outcome is None or outcome.loss is None:
            return torch.zeros((), device=trainer.args.device)
        return outcome.loss.to(trainer.args.device)

    def _take_columns(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return domains and ids, and remove them from the batch unless the model needs them."""
        trainer: Any = self
        found = {}
        for name, column in self._columns.items():
            if column is None:
                continue
            check_column(column, list(inputs))
            found[name] = decode_strings(inputs[column])
        model_inputs = forward_arguments(trainer.model.forward) if found else frozenset()
        for column in {column for column in self._columns.values() if column} - model_inputs:
            inputs.pop(column)
        return found

    def _loss_fn(
        self, model: nn.Module, inputs: dict[str, Any], domains: Any, batch_size: int | None
    ) -> LossFn:
        """Return a function for the loss of a micro-batch, per example where that is available."""
        trainer: Any = self
        each, rule, mean = None, self._example_rule, self._loss_mean
        is_cut = self._size is not None and (batch_size is None or self._size < batch_size)
        is_cut |= domains is not None  # which micro-batches never mix
        if is_cut or rule is not None or mean == "example":  # else there is only one micro-batch
            each = self._losses.find(model, inputs)
            if each is not None and rule is not None and rule.is_one_pass:
                self._add_scales(each, inputs, None, None)  # the batch is not cut
            elif each is not None:
                self._add_scales(each, inputs, self._size, domains)
            elif mean == "example" and self._size != 1:
                refuse_mean(mean, f"examples have no losses of their own ({self._losses.reason})")
            elif rule is not None and self._size is None:
                raise NotImplementedError(no_example_losses_message(rule, self._losses.reason))
            elif self._options["engine"] == "fused":
                raise NotImplementedError(
                    'engine="fused" needs per-example losses, which are not available here: '
                    f'{self._losses.reason}. Use engine="auto".'
                )
        streams_shares = each is None and mean == "step"
        if streams_shares and self._step_labels.must_check(inputs, is_cut):
            self._step_labels.check(model, inputs, self._loss)
        guard = each is None and may_lack_labels(inputs)

        def loss_fn(batch: Any) -> Tensor:
            if each is None:
                labels = batch["labels"] if guard else None
                size = count_examples(batch) if mean == "step" else 0  # before labels are taken out
                loss = self._loss(model, batch)
                loss = self._step_labels.loss_of(loss, size) if mean == "step" else loss
                return loss if labels is None else zero_if_no_labels(loss, labels, model)
            with trainer.compute_loss_context_manager():
                return each(model, batch, self._options["ledger"])

        if each is not None:
            vars(loss_fn)["loss_scales"] = each.factors(inputs)
            vars(loss_fn)["label_shares"] = each.shares(inputs) if mean == "step" else None
        elif streams_shares:
            vars(loss_fn)["label_shares"] = self._step_labels.shares(inputs)
            vars(loss_fn)["loss_scales"] = self._step_labels.factors(inputs, self._size, domains)
        return loss_fn

    def _add_scales(
        self, each: ExampleLosses, inputs: dict[str, Any], b: int | None, domains: Any
    ) -> None:
        step = self._step_labels.scale if self._loss_mean == "step" else 1.0
        each.add_scales(inputs, b, domains, self._loss_mean, step)

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the Trainer's own loss."""
        trainer: Any = self
        items = self._step_labels.items if self._loss_mean == "step" else None
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(model, batch, num_items_in_batch=items)
            return loss

    def _fold_packed(
        self,
        model: nn.Module,
        clipper: Clipper,
        inputs: dict[str, Any],
        examples: int,
        columns: dict[str, Any],
    ) -> None:
        """Fold a batch packed without padding as one micro-batch of so many examples."""
        if "domains" in columns:
            raise NotImplementedError(
                f"The data collator packed {examples} examples into a batch without padding, so "
                "they cannot be told apart by domain. Use a collator that pads."
            )
        refuse_sharded(model)
        with clipper.local():
            loss = self._loss(model, inputs)
            backward(loss, clipper.grad_scaler)
            clipper.fold(size=examples, loss=loss, ids=columns.get("ids"))

    def _add_to_wide(
        self, model: nn.Module, clipper: Clipper, inputs: dict[str, Any], columns: dict[str, Any]
    ) -> None:
        """Add a batch to a micro-batch that spans several batches."""
        if "domains" in columns:
            raise ValueError(
                f"With domains, a micro-batch must be part of one batch, but microbatch_size "
                f"{self._size} is larger than the {count_examples(inputs)} examples of a batch. "
                "Increase per_device_train_batch_size, or decrease microbatch_size."
            )
        refuse_sharded(model)
        finder, loss_fn = self._finder_of(model, inputs), partial(self._loss, model)
        self._wide.add(clipper, inputs, columns.get("ids"), loss_fn, finder)

    def _finder_of(self, model: nn.Module, inputs: dict[str, Any]) -> DenominatorFinder:
        """Return what knows, or measures, what the loss is the mean over."""
        trainer: Any = self
        inner = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
        each = self._losses.find(model, inputs)
        functions = (trainer.compute_loss_func, vars(trainer).get("compute_loss"))
        loss = (id(inner), each and each.kind, trainer.label_smoother, *functions)
        if self._finder is None or loss != self._finder_for:
            known = None if each is None else known_denominator(each.kind, inputs)
            self._finder = DenominatorFinder(trainer, inner, known)
            self._finder_for = loss
        return self._finder

    def _clipper_of(self, model: nn.Module) -> Clipper:
        if self.clipper is not None and self.clipper.model is not model:
            self._reset_clipper()  # the rule's memory belongs to the other model
        if self.clipper is None:
            trainer: Any = self
            scaler = trainer.accelerator.scaler
            self.clipper = Clipper(model, self._size, grad_scaler=scaler, **self._options)
        if self._state is not None:
            self.clipper.load_state_dict(self._state)
            self._state = None
        return self.clipper

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of a step; count their labels if the loss is the mean over them."""
        samples, items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        if self._loss_mean == "step" and samples:
            columns = frozenset(column for column in self._columns.values() if column)
            self._step_labels.count(samples, items, columns)
        return samples, items

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the clipping metrics to the training log."""
        if "loss" in logs and self.clipper is not None and self.clipper.outcome is not None:
            logs = {**logs, **metrics(self.clipper.outcome)}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's own loader, with the id and domain columns in its batches."""
        trainer: Any = self
        there = getattr(trainer.train_dataset, "column_names", None)
        for column in self._columns.values():
            if column is not None and isinstance(there, list):
                check_column(column, there)
        with self._collating_columns(add_to_batch=True):
            return super().get_train_dataloader()  # type: ignore[misc]

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's own loader, without these columns."""
        with self._collating_columns(add_to_batch=False):
            return super().get_eval_dataloader(*args, **kwargs)  # type: ignore[misc]

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's own loader, without these columns."""
        with self._collating_columns(add_to_batch=False):
            return super().get_test_dataloader(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _collating_columns(self, add_to_batch: bool) -> Iterator[None]:
        """Inside the block, the Trainer's collator handles the id and domain columns."""
        columns = tuple(dict.fromkeys(column for column in self._columns.values() if column))
        with collating_columns(self, columns, add_to_batch):
            yield

    def _get_collator_with_removed_columns(self, data_collator: Any, *args: Any, **kw: Any) -> Any:
        wrap = super()._get_collator_with_removed_columns  # type: ignore[misc]
        if not isinstance(data_collator, ColumnCollator):
            return wrap(data_collator, *args, **kw)
        # read our columns before any are removed, so that an error can list the others
        return data_collator.with_collator(wrap(data_collator.collator, *args, **kw))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        trainer: Any = self
        if self.clipper is None:
            return
        if self._options["ledger"] is not None:  # on every rank: each writes its own files
            self._options["ledger"].flush()
        if trainer.args.should_save:
            torch.save(self.clipper.lasting_state(), Path(output_dir) / STATE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None and (Path(checkpoint) / STATE).exists():
            self._state = torch.load(Path(checkpoint) / STATE, weights_only=True)
        elif checkpoint is not None:  # saved by a Trainer that did not clip
            self._reset_clipper()

    def _reset_clipper(self) -> None:
        """Start with a new clipper, and with the rule as it was in the beginning."""
        self.clipper = None
        if self._fresh_rule is not None:
            self._options["rule"].load_state_dict(deepcopy(self._fresh_rule))


class ClippedTrainer(ClippedTrainerMixin, Trainer):
    """The Trainer, with clipping."""


class ClippedSeq2SeqTrainer(ClippedTrainerMixin, Seq2SeqTrainer):
    """The Seq2SeqTrainer, with clipping."""
