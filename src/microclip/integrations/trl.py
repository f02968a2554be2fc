"""Micro-batch clipping in TRL's trainers: SFT, DPO and reward models.

    from microclip.integrations.trl import ClippedDPOTrainer

    trainer = ClippedDPOTrainer(model, args=args, train_dataset=pairs, microbatch_size=1)

An example is what a row of the data set is: a text for SFT, a pair of answers for DPO and reward
models. All options are those of `ClippedTrainer`. For your own trainer:
`class MySFT(ClippedTrlMixin, SFTTrainer)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn

try:
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.reward_trainer import RewardTrainer
    from trl.trainer.sft_trainer import SFTTrainer
except ImportError as error:
    raise ImportError(
        "microclip.integrations.trl needs trl and datasets: pip install 'microclip[trl]'"
    ) from error

from microclip.integrations.denominator_finder import DenominatorFinder
from microclip.integrations.denominators import REMEDY, known_denominator, one_per_example
from microclip.integrations.transformers import ClippedTrainerMixin
from microclip.integrations.trl_checks import (
    check_trainer,
    refuse_offloading,
    refuse_options,
    warn_of_equal_answers,
)
from microclip.integrations.trl_losses import PairCollator, TrlLossFinder, stacked
from microclip.integrations.trl_packing import (
    TextCollator,
    is_padding_free,
    pack_with_columns,
    padding,
    refuse_cut_texts,
)
from microclip.outcome import Outcome


class ClippedTrlMixin(ClippedTrainerMixin):
    """Adds clipping to SFTTrainer, DPOTrainer or RewardTrainer, or to your subclass of one.

    Takes the arguments of `ClippedTrainerMixin` and all those of the trainer that follows it.
    """

    _packages = ("transformers", "trl")
    _has_warned = False  # of equal answers

    def __init_subclass__(cls, **kwargs: Any) -> None:
        check_trainer(cls)
        super().__init_subclass__(**kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_offloading((*args, *kwargs.values()))
        super().__init__(*args, **kwargs)
        refuse_options(self, self._size, self._columns, self._example_rule, self._loss_mean)

    @property
    def pairs(self) -> bool:
        """Whether an example is a pair of answers."""
        return isinstance(self, DPOTrainer | RewardTrainer)

    @property
    def _unpacks(self) -> bool:
        """Whether batches without padding are padded, so that each text is an example."""
        trainer: Any = self
        one_by_one = self._size is not None or self._example_rule is not None
        one_by_one |= bool(self._column_names()) or self._loss_mean != "microbatch"
        return one_by_one and is_padding_free(trainer.data_collator)

    def _column_names(self) -> list[str]:
        return list(dict.fromkeys(column for column in self._columns.values() if column))

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *more: Any) -> Any:
        """Prepare a data set as TRL does; what is packed for training keeps ids and domains."""
        prepare, columns = super()._prepare_dataset, self._column_names()  # type: ignore[misc]
        if self.pairs or not (more[0] and more[-1] == "train"):  # packing, formatter, name
            return prepare(dataset, processing_class, args, *more)
        refuse_cut_texts(args.packing_strategy, self._columns, self._example_rule)
        if not columns or args.max_length is None:  # TRL explains why it needs max_length
            return prepare(dataset, processing_class, args, *more)
        whole = copy(args)
        whole.max_length, whole.shuffle_dataset = None, False  # packing truncates and shuffles
        texts = prepare(dataset, processing_class, whole, False, *more[1:])
        return pack_with_columns(texts, args, columns)

    def _batch_size(self) -> int | None:
        return None if self._unpacks else super()._batch_size()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Differentiate one batch; clip if it is the last of a step."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        trainer: Any = self
        if "attention_mask" in inputs:
            count = inputs["attention_mask"].sum()
        elif "input_ids" in inputs:
            count = torch.tensor(inputs["input_ids"].numel())
        else:  # TRL counts neither embeddings nor anything else
            return loss
        count = trainer.accelerator.gather(count.to(trainer.accelerator.device)).sum()
        trainer._total_train_tokens += int(count) // trainer._tp_size
        trainer._metrics["train"]["num_tokens"] = [trainer._total_train_tokens]
        return loss

    def _step_loss(self, outcome: Outcome | None) -> Tensor:
        if outcome is not None and self.pairs and not self._has_warned:
            self._has_warned = warn_of_equal_answers(outcome)
        return super()._step_loss(outcome)

    def stock_loss(
        self, model: nn.Module, batch: dict[str, Any], items: Tensor | None = None
    ) -> Tensor:
        """Return TRL's own loss of some texts or pairs, divided by their own labels or `items`."""
        trainer: Any = self
        batch = stacked(batch) if self.pairs else dict(batch)
        with self._on_this_rank():
            loss: Tensor = trainer.compute_loss(model, batch, num_items_in_batch=items)
            return loss

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        trainer: Any = self
        items = self._step_labels.items if self._loss_mean == "step" else None
        with trainer.compute_loss_context_manager():
            return self.stock_loss(model, batch, items)

    @contextmanager
    def _on_this_rank(self) -> Iterator[None]:
        """Inside the block, metrics are not gathered from other ranks, and tokens not counted.

        Ranks may have different numbers of micro-batches, and engines may call a loss twice.
        """
        trainer: Any = self
        tokens, accelerator = trainer._total_train_tokens, trainer.accelerator
        gather = ("gather", "gather_for_metrics")
        if accelerator.num_processes > 1:
            for name in gather:
                vars(accelerator)[name] = _as_it_is
        try:
            yield
        finally:
            trainer._total_train_tokens = tokens
            for name in gather:
                vars(accelerator).pop(name, None)

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """After the block, the trainer's metrics are what they were before."""
        trainer: Any = self
        kept = deepcopy(trainer._metrics)
        try:
            yield
        finally:
            trainer._metrics = kept

    def note(self, **values: Tensor) -> None:
        """Add to the metrics that the trainer logs, where its own loss does not run."""
        trainer: Any = self
        for name, value in values.items():
            trainer._metrics["train"][name].append(value.detach().mean().item())

    def _new_loss_finder(self) -> TrlLossFinder:
        return TrlLossFinder(self)

    def _finder_of(self, model: nn.Module, inputs: dict[str, Any]) -> DenominatorFinder:
        trainer: Any = self
        inner = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
        each = self._losses.find(model, inputs)
        if each is None:
            raise NotImplementedError(
                "microclip does not know what this loss is the mean over "
                f"({self._losses.reason}), so a micro-batch cannot span several batches. {REMEDY}"
            )
        known = one_per_example() if self.pairs else known_denominator(each.kind, inputs)
        return DenominatorFinder(trainer, inner, known)

    @contextmanager
    def _collating_columns(self, add_to_batch: bool) -> Iterator[None]:
        trainer: Any = self
        collator, unpacks = trainer.data_collator, self._unpacks
        if self.pairs and add_to_batch:
            trainer.data_collator = PairCollator(collator)
        elif unpacks and add_to_batch:
            trainer.data_collator = padding(collator)
        try:
            with super()._collating_columns(add_to_batch):
                if unpacks and add_to_batch:
                    columns = self._column_names()
                    trainer.data_collator = TextCollator(trainer.data_collator, columns)
                yield
        finally:
            trainer.data_collator = collator


def _as_it_is(values: Any, *args: Any, **kwargs: Any) -> Any:
    return values


class ClippedSFTTrainer(ClippedTrlMixin, SFTTrainer):
    """TRL's SFTTrainer, with clipping: an example is a text."""


class ClippedDPOTrainer(ClippedTrlMixin, DPOTrainer):
    """TRL's DPOTrainer, with clipping: an example is a pair of answers."""


class ClippedRewardTrainer(ClippedTrlMixin, RewardTrainer):
    """TRL's RewardTrainer, with clipping: an example is a pair of answers."""
