"""Whose labels a loss is the mean over: the Trainer takes the mean over those of a whole step.

A language model's loss is a sum over tokens, divided by a number of tokens. `loss_mean` says which:
those of the micro-batch, of each example, or of the whole step, as in the stock Trainer. This
module counts what the third needs to know, and checks that a loss is divided by it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from microclip.batches import count_examples
from microclip.integrations.columns import EXAMPLE_COUNT
from microclip.integrations.example_losses import IGNORE_INDEX, LossMean
from microclip.integrations.trainer_checks import DryRun, losses_agree
from microclip.microbatches import Domains, cut
from microclip.wrappers import is_sharded

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
        self._seen = 0  # batches whose losses are not known per example

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

    def shares(self, inputs: dict[str, Any]) -> Tensor:
        """Return, per example, its labels (as the Trainer counts them) by the mean over the step.

        The loss of a micro-batch is its mean over own labels, times the mean share of its examples.
        """
        labels: Tensor = inputs["labels"]
        if "shift_labels" in inputs:
            labels = inputs["shift_labels"]
        elif self.trainer._loss_shifts_labels:
            labels = labels[..., 1:]
        wide = torch.float32 if labels.device.type == "mps" else torch.float64
        counts = (labels != IGNORE_INDEX).reshape(len(labels), -1).sum(1)
        return self.scale * counts.to(wide)

    def factors(self, inputs: dict[str, Any], b: int | None, domains: Domains | None) -> Tensor:
        """Return, per example, what `loss_of` makes of its micro-batch's mean over own labels.

        That mean is what rules and ledger are to see.
        """
        shares = self.shares(inputs)
        factors = torch.empty_like(shares)
        for piece in cut(shares, b, domains=domains):
            rows = torch.tensor(piece.ids, device=shares.device)
            factors[rows] = shares[rows].sum().clamp(min=self.scale) / len(rows)
        return factors

    def must_check(self, inputs: dict[str, Any], is_cut: bool) -> bool:
        """Whether to check that the loss of this batch is a share: the 1st, 2nd, 4th, 8th ...

        Where a micro-batch is the whole step, its share is its loss, whatever it is divided by.
        """
        if not is_cut and count_examples(inputs) == self._examples:
            return False
        self._seen += 1
        return not self._seen & (self._seen - 1)

    def check(
        self, model: nn.Module, inputs: dict[str, Any], loss_fn: Callable[[nn.Module, Any], Tensor]
    ) -> None:
        """Refuse a loss that is not divided by `items`: twice as many of them must halve it."""
        items, trainer = self.items, self.trainer
        assert items is not None
        inner = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
        if is_sharded(inner):  # cannot be run without leaving a trace
            return
        dry, found = DryRun(trainer, inner), []
        try:
            with getattr(trainer, "leaving_no_trace", nullcontext)():  # in TRL's metrics
                for self.items in (items, 2 * items):
                    found.append(dry.run(lambda: loss_fn(inner, dict(inputs)).mean(), False).loss)
        finally:
            self.items = items
        loss, other = found
        if not bool(loss.isfinite()):  # wait for another batch
            self._seen -= 1
        elif not losses_agree(2 * other, loss):
            raise NotImplementedError(
                'loss_mean="step" needs a loss that is a sum divided by the labels of the whole '
                "step, but this one does not halve if num_items_in_batch doubles: "
                f"{float(loss):.6g} becomes {float(other):.6g}. Perhaps it is a mean over its "
                "batch, or has an auxiliary term. If it is your own, divide its sum by "
                f"num_items_in_batch. {REMEDY}."
            )


def refuse_mean(mean: LossMean, what: str) -> None:
    """Refuse a mean over other labels than the micro-batch's, where losses cannot be told apart."""
    if mean != "microbatch":
        raise NotImplementedError(f"loss_mean={mean!r} is not possible here: {what}. {REMEDY}.")


def _examples(batch: Any, columns: frozenset[str]) -> int:
    if EXAMPLE_COUNT in batch:
        return int(batch[EXAMPLE_COUNT])
    return count_examples({name: value for name, value in batch.items() if name not in columns})
