"""Whose labels a loss is the mean over: the Trainer takes the mean over those of a whole step.

A language model's loss is a sum over tokens, divided by a number of tokens. `loss_mean` says which:
those of the micro-batch, of each example, or of the whole step, as in the stock Trainer. What this
module counts is all that the third needs to know; it never runs a model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microclip.integrations.columns import EXAMPLE_COUNT
from microclip.integrations.example_losses import LossMean
from microclip.microbatches import count_examples

REMEDY = 'Use loss_mean="microbatch", the default'


class StepLabels:
    """Counts the examples and the labels of a step before it is computed.

    With N labels and B examples on all ranks, the stock Trainer's loss is sum_i s_i / N, where s_i
    is the sum of example i's terms. It is the mean over examples of s_i B / N: their losses here.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.items: Tensor | None = None  # what the Trainer divides by
        self._examples = 0.0

    def count(self, samples: list[Any], items: Any, columns: frozenset[str]) -> None:
        """Count the batches of a step; `items` is the Trainer's number of labels."""
        if items is None:
            raise NotImplementedError(
                'loss_mean="step" divides by the labels of a whole step, but the Trainer does not '
                "count them: the batches have no labels, or the model does not take "
                f"num_items_in_batch. {REMEDY}."
            )
        total = sum(_examples(batch, columns) for batch in samples)
        accelerator = self.trainer.accelerator
        self.items = torch.as_tensor(items)
        self._examples = float(total)
        if accelerator.num_processes > 1:
            counts = torch.tensor([total], device=accelerator.device)
            self._examples = float(accelerator.gather(counts).sum())

    @property
    def scale(self) -> float:
        """B / N, the factor of each example's sum."""
        assert self.items is not None
        scale = self._examples / max(1.0, float(self.items))
        # without it, every rank divides by its own labels, and the ranks' losses are averaged
        shared = self.trainer.args.average_tokens_across_devices
        return scale if shared else scale / float(self.trainer.accelerator.num_processes)

    def loss_of(self, loss: Tensor, size: int) -> Tensor:
        """Return a micro-batch's loss, given what the Trainer returns for it: its share of N."""
        accelerator = self.trainer.accelerator
        if self.trainer.args.average_tokens_across_devices:  # the Trainer undoes DDP's average
            loss = loss / (accelerator.num_processes // self.trainer.get_tp_size())
        return loss * (self.scale * float(self.items or 0) / size)


def refuse_mean(mean: LossMean, what: str) -> None:
    """Refuse a mean over other labels than the micro-batch's, where losses cannot be told apart."""
    if mean != "microbatch":
        raise NotImplementedError(f"loss_mean={mean!r} is not possible here: {what}. {REMEDY}.")


def _examples(batch: Any, columns: frozenset[str]) -> int:
    if EXAMPLE_COUNT in batch:
        return int(batch[EXAMPLE_COUNT])
    return count_examples({name: value for name, value in batch.items() if name not in columns})
