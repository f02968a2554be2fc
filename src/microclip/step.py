"""One step of a Clipper: batches are cut, weighted if the rule says so, folded, and clipped.

Here the parts of a step meet: its engine (`EngineStep`), its examples (`ExampleStep`), what the
model predicted, and the ranks. Nothing here touches `.grad` or outlives the step: that is up to
the Clipper.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from microclip import checks, multitensor
from microclip.batches import is_empty
from microclip.distributed.parallelism import Parallelism
from microclip.engine_step import EngineStep
from microclip.engines.gradients import (
    Gradients,
    LossFn,
    MeanOfExamplesError,
    name_of,
    trainable,
    unscale,
)
from microclip.engines.select import EngineSelector
from microclip.engines.step_record import Policy, StepRecord
from microclip.example_step import ExampleIds, ExampleStep
from microclip.microbatches import Domains, Ids, Microbatch, MicrobatchList, cut
from microclip.outcome import Outcome
from microclip.rules import ExampleRule, Seen
from microclip.step_predictions import StepPredictions


class Step:
    """The step in progress.

    Args:
        number: The number of the step.
        policy: The user's settings.
        selector: Makes the engine.
        parallelism: The ranks.
        mistakes: Warns about mistakes in the training loop.
        ids: The ids so far, if the rule weights examples.
        returns_losses: By the name of a loss function, whether it returns one loss per example;
            filled in here, if the rule weights examples.
        predictions: Receives what the model predicts, if that is recorded.
        batch_dim: The dimension that the examples lie along.
        noise_scale: Whether the outcome says how noisy gradients are.
    """

    def __init__(
        self,
        number: int,
        policy: Policy,
        selector: EngineSelector,
        parallelism: Parallelism,
        mistakes: checks.Mistakes,
        *,
        ids: ExampleIds | None,
        returns_losses: dict[str, bool],
        predictions: StepPredictions | None,
        batch_dim: int,
        noise_scale: bool,
    ) -> None:
        self.number = number
        self.policy = policy
        self.failed = False  # whether it failed halfway: a sum of gradients cannot be split again
        self.rule = policy.rule if isinstance(policy.rule, ExampleRule) else None
        self.examples: ExampleStep | None = None  # if the rule weights them
        self._selector = selector
        self._parallelism = parallelism
        self._mistakes = mistakes
        self._returns_losses = returns_losses
        self._predictions = predictions
        self._batch_dim = batch_dim
        self._noise_scale = noise_scale
        # for each fold, the factors that `loss_fn` multiplies its losses by, if it does
        self._loss_scales: list[Tensor | None] = []
        self._label_shares: list[Tensor | None] = []  # likewise, if losses are shares of a step's
        parallelism.begin(number)
        ranks = parallelism.ranks
        by_domain = noise_scale and ranks is None and parallelism.fsdp is None
        self._engine_step = EngineStep(
            number, policy, selector, ranks, predictions, by_domain and policy.rule.streams
        )
        if self.rule is not None and ids is not None:
            self.examples = ExampleStep(self.rule, ids, number)

    @property
    def record(self) -> StepRecord:
        """What is known of the micro-batches so far."""
        return self._engine_step.record

    @property
    def has_folded(self) -> bool:
        """Whether anything was folded yet."""
        return self._engine_step.engine is not None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained in this step."""
        engine = self._engine_step.engine
        return trainable(self._selector.model) if engine is None else engine.parameters

    def fold_batch(
        self, loss_fn: LossFn, batch: Any, ids: Ids | None, domains: Domains | None, final: bool
    ) -> None:
        """Cut a batch into micro-batches and add them; `final`: no others will follow."""
        parallelism = self._parallelism
        if parallelism.ddp is not None:
            if is_empty(batch, self._batch_dim):
                return
        elif parallelism.fsdp is not None and is_empty(batch, self._batch_dim):
            parallelism.fsdp.report_empty_batch(self.record, self._selector.scaler)
        place = {"first_position": self.record.examples, "batch_dim": self._batch_dim}
        given: dict[str, Any] = {"domains": domains, "ids": ids, **place}
        if self.examples is None:
            microbatches = cut(batch, self.policy.microbatch_size, **given)
            self._engine_step.note_size(microbatches.examples, final)
            self._fold_microbatches(loss_fn, microbatches, final)
        else:
            self._fold_weighted(loss_fn, batch, given, final)

    def _fold_weighted(
        self, loss_fn: LossFn, batch: Any, given: dict[str, Any], final: bool
    ) -> None:
        """Fold a batch of weighted examples.

        Without clipping, it is one micro-batch: a single weighted backward pass. If `loss_fn`
        returns a mean, the batch is cut into micro-batches, and these are weighted instead.
        """
        rule, examples, ids = self.rule, self.examples, given["ids"]
        assert rule is not None
        assert examples is not None
        b, name = self.policy.microbatch_size, name_of(loss_fn)
        scales = _loss_scales(loss_fn)
        if rule.clip is not None or rule.needs_norms or self._returns_losses.get(name) is False:
            microbatches = cut(batch, b, **given)
            self._fold_microbatches(
                loss_fn, examples.weigh(microbatches, ids, False, scales), final
            )
            return
        microbatches = examples.weigh(cut(batch, None, **given), ids, True, scales)
        before = None
        if name not in self._returns_losses:  # its first call may have to be undone
            before = self._selector.side_effects.snapshot(loss_fn)
            microbatches = microbatches.keep_copy()
        earlier = len(self.record)
        try:
            self._fold_microbatches(loss_fn, microbatches, final)
            if max(microbatches.sizes) > 1:  # a single example has one loss either way
                self._returns_losses[name] = True
        except MeanOfExamplesError:
            if b is not None:
                self._returns_losses[name] = False
            self._refuse_mean(b, microbatches.examples, earlier, final)
            if before is not None:
                before.restore()
                microbatches.reverted()
            if len(self.record) > earlier:  # and nothing before that: see above
                self._engine_step.restart()
            examples.forget_last()
            self._fold_weighted(loss_fn, batch, given, final)

    def _refuse_mean(self, b: int | None, examples: int, earlier: int, final: bool) -> None:
        """Refuse a mean over several examples, where the fold cannot be done again.

        Its first micro-batches may have been added: those of one example, whose mean is its loss.
        """
        if b is None:
            reason = f"{examples} losses"
            remedy = "If that is impossible, pass microbatch_size=1 (slow) or more, and the "
            remedy += "micro-batches are weighted."
        elif 0 < earlier < len(self.record):  # a sum of gradients cannot be split again
            reason = "several losses, which did not show while single examples were folded"
            remedy = "Or repeat this step: its micro-batches are then weighted."
        else:
            return
        error = ValueError(
            f"{type(self.rule).__name__} weights examples, but loss_fn returns the mean of "
            f'{reason}. Return the losses themselves, as with reduction="none". {remedy}'
        )
        self._fail(error, final)
        raise error from None

    def _fold_microbatches(
        self, loss_fn: LossFn, microbatches: MicrobatchList, final: bool
    ) -> None:
        called = loss_fn
        if self._predictions is not None:
            called = self._predictions.watched(loss_fn)
        if self.number & (self.number + 1) == 0:
            self.record.on_loss = partial(self._mistakes.in_loss, microbatches=microbatches)
            self._mistakes.in_batch(microbatches, self.number)
        parallelism = self._parallelism
        try:
            with parallelism.local(), self._mistakes.watching(microbatches, self.number):
                self._engine_step.fold(called, microbatches, final, parallelism.communication)
            scales = _loss_scales(loss_fn)
            self._loss_scales.append(None if scales is None else scales[microbatches.order])
            shares: Tensor | None = getattr(loss_fn, "label_shares", None)
            self._label_shares.append(None if shares is None else shares[microbatches.order])
        except MeanOfExamplesError:  # the caller tries again
            raise
        except BaseException as error:
            self._fail(error, final)
            raise

    def fold_gradient(
        self,
        parameters: dict[str, nn.Parameter],
        size: int,
        names: tuple[Hashable, ...],
        loss: Tensor | None,
        loss_scale: float,
        ids: Ids | None,
        domain: Hashable,
    ) -> None:
        """Take what is in `.grad` as the gradient of one micro-batch."""
        kept = [parameter.grad for parameter in parameters.values()]
        engine = self._engine_step.stream(parameters)
        if self.examples is not None and loss is not None and loss.shape == (size,):
            self.examples.expect_weighted(size, names)
        names = names or tuple(range(self.record.examples, self.record.examples + size))
        try:
            microbatch = Microbatch(None, range(size), domain, names)
            if self.examples is not None:
                unscaled = None if loss is None else loss / loss_scale
                microbatch = self._weighted(microbatch, unscaled, ids)
            if self._predictions is not None:
                self._predictions.fold_own(size, loss)
            self._engine_step.add_gradients(engine, parameters, microbatch, loss, loss_scale)
        except BaseException as error:
            for parameter, gradient in zip(parameters.values(), kept, strict=True):
                parameter.grad = gradient
            self._fail(error, final=False)
            raise

    def weighted_mean(self, losses: Tensor, names: tuple[Hashable, ...], ids: Ids | None) -> Tensor:
        """Return the mean of the losses of examples that will be folded next, weighted."""
        assert self.examples is not None
        size = len(losses)
        microbatch = Microbatch(None, range(size), None, names or tuple(range(size)))
        weighted = self._weighted(microbatch, losses, ids)
        self.examples.forget_last()  # fold() arrives at the same weights
        self.examples.weighted_for = size, names
        return weighted.mean(losses)

    def _weighted(self, microbatch: Microbatch, loss: Tensor | None, ids: Ids | None) -> Microbatch:
        """Return a micro-batch whose gradient is in `.grad` already, with its examples' weights."""
        assert self.examples is not None
        if loss is None:
            raise ValueError(
                f"{self.policy.rule!r} needs the loss of every micro-batch. Pass it to fold(): "
                "clipper.fold(loss=loss, ids=ids)."
            )
        size, name = microbatch.size, type(self.policy.rule).__name__
        if self.rule is not None and self.rule.needs_norms and size != 1:
            raise ValueError(
                f"{name} needs the gradient of one example at a time, but this is that of {size}. "
                "Fold single examples, or use clipper.backward(loss_fn, batch)."
            )
        one = MicrobatchList(None, [microbatch.positions], [microbatch.domain], [microbatch.ids])
        weighted = self.examples.weigh(one, ids, False)[0]
        assert weighted.weights is not None
        losses = loss.detach() if loss.shape == (microbatch.size,) else loss.detach().mean()
        weighted.weights.multipliers([weighted.positions], losses.reshape(-1))
        return weighted

    def _fail(self, error: BaseException, final: bool) -> None:
        self.failed = True
        if not final and len(self.record):
            error.add_note(
                f"microclip: the {len(self.record)} micro-batches folded since the last "
                "finish() were dropped. Start this step again."
            )

    def result(self, parameters: dict[str, nn.Parameter]) -> tuple[Gradients, Seen | None]:
        """Return the clipped gradient, summed over all ranks if there are several.

        The second value is what all ranks saw of their examples, if the rule wants to know.
        """
        parallelism, record, engine = self._parallelism, self.record, self._engine_step.engine
        if parallelism.ranks is not None:
            parallelism.ranks.describe(self.policy, self._selector.scaler, parameters)
        record.sync_ranks()
        seen = None
        if self.examples is not None:
            seen = self.examples.gather(record, parallelism.ranks)
        if parallelism.ddp is not None:
            parallelism.ddp.end()
        if engine is None:  # this rank has no examples, and adds nothing
            record.leave_out()
            gradients: Gradients = {}
        else:
            with parallelism.local():
                gradients = engine.finish()
            if self.overflowed:  # the scaler must see it, on every rank
                gradients = {name: g.fill_(torch.nan) for name, g in gradients.items()}
        return parallelism.sum(record.step, gradients, parameters), seen

    @property
    def overflowed(self) -> bool:
        """Whether micro-batches are skipped because the loss scale is too large."""
        record, scaler = self.record, self._selector.scaler
        return bool(record.left_out and scaler and record.overflowed(scaler.get_scale()))

    def noise(self, gradients: Gradients) -> dict[str, Any]:
        """Return what the outcome says about how noisy gradients are, if it is to say so."""
        if not self._noise_scale or not gradients:
            return {}
        record, scaler, fsdp = self.record, self._selector.scaler, self._parallelism.fsdp
        each = list(gradients.values())
        norm = unscale(multitensor.norm(each, each[0].device), scaler)
        if fsdp is not None:
            found = record.noise(fsdp.norm_of_shards(norm))
            return {"noise": replace(found, trace=found.trace * fsdp.ranks_per_row)}
        noise: dict[str, Any] = {"noise": record.noise(norm)}
        record.domain_norms = {
            domain: unscale(norm, scaler)
            for domain, norm in record.domain_norms.items()
            if domain is not None
        }
        if record.domain_norms:
            noise["domain_noise"] = record.domain_noise()
        return noise

    def outcome(self, noise: dict[str, Any], messages: tuple[str, ...]) -> Outcome:
        """Return what the step did; `messages` are those of the rule."""
        engine, notes = self._engine_step.engine, tuple(self._engine_step.notes)
        if self.overflowed:
            notes += (
                "The gradients overflowed half precision at this loss scale. The result is "
                "NaN, so the scaler will lower the scale.",
            )
        outcome = self.record.outcome(engine.name if engine else "none", notes + messages)
        outcome = _with_own_losses(outcome, self._loss_scales)
        outcome = _with_own_means(outcome, self._label_shares)
        if noise:
            outcome = replace(outcome, **noise)
        if self._predictions is not None and outcome.example_losses is not None:
            predictions, classes = self._predictions.take()
            outcome = replace(outcome, predictions=predictions, classes=classes)
        if self.examples is not None:
            outcome = replace(outcome, example_weights=self.examples.weights())
        return outcome


def _loss_scales(loss_fn: LossFn) -> Tensor | None:
    """Return the factors of a batch's losses, which those of transformers' models have."""
    scales: Tensor | None = getattr(loss_fn, "loss_scales", None)
    return scales


def _with_own_losses(outcome: Outcome, scales: list[Tensor | None]) -> Outcome:
    """Return the outcome with the losses of examples as they are without these factors."""
    known = [each for each in scales if each is not None]
    if outcome.example_losses is None or not known or len(known) < len(scales):
        return outcome
    losses = outcome.example_losses
    return replace(outcome, example_losses=losses / torch.cat(known).to(losses))


def _with_own_means(outcome: Outcome, shares: list[Tensor | None]) -> Outcome:
    """Return the outcome with each micro-batch's mean over its own labels.

    `shares` has the labels of each example, relative to the mean over the step. `outcome.loss`, the
    mean over the labels of the step, is right as it is.
    """
    known = [each for each in shares if each is not None]
    if outcome.losses is None or not known or len(known) < len(shares):
        return outcome
    losses, each = outcome.losses, torch.cat(known)
    groups = torch.tensor([j for j, ids in enumerate(outcome.ids) for _ in ids]).to(each.device)
    sums = each.new_zeros(len(outcome)).index_add_(0, groups, each).to(losses)
    means = sums / outcome.sizes.to(losses)
    return replace(outcome, losses=torch.where(means > 0, losses / means, losses))
