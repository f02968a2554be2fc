"""The Clipper: the object that users hold. It ties engines, rules and ranks together."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from microclip import checks, multitensor
from microclip.distributed.ddp import Ddp
from microclip.distributed.detection import LossCommunication, OuterWrapper, refuse_late_sharding
from microclip.engines.base import Engine
from microclip.engines.gradients import (
    Gradients,
    LossFn,
    MeanOfExamplesError,
    deposit,
    kept_gradients,
    name_of,
    restore,
    trainable,
    unscale,
)
from microclip.engines.select import (
    ENGINES,
    SCOPES,
    EngineName,
    EngineReport,
    EngineSelector,
    Scope,
    check,
)
from microclip.engines.step_record import REDUCTIONS, Policy, Reduction, StepRecord
from microclip.example_step import ExampleIds, ExampleStep
from microclip.interrupts import uninterrupted
from microclip.microbatches import (
    Domains,
    Ids,
    Microbatch,
    MicrobatchList,
    check_batch_dim,
    check_size,
    cut,
    is_empty,
)
from microclip.outcome import Outcome
from microclip.rules import NONFINITE, ExampleRule, MinNorm, Nonfinite, Rule, Seen
from microclip.step import Step
from microclip.step_predictions import StepPredictions
from microclip.wrappers import is_sharded, refuse_unsupported, world_size

if TYPE_CHECKING:
    from microclip.distributed.fsdp import Fsdp
    from microclip.engines.single_pass.verify import Verify
    from microclip.ledger import Ledger


class Clipper:
    """Micro-batch clipping for a model: `clipper.backward(loss_fn, batch)` for `loss.backward()`.

    >>> import torch
    >>> model = torch.nn.Linear(3, 1)
    >>> clipper = Clipper(model, microbatch_size=4)
    >>> batch = torch.randn(16, 3), torch.randn(16, 1)
    >>> def loss_fn(batch):
    ...     x, y = batch
    ...     return torch.nn.functional.mse_loss(model(x), y)
    >>> outcome = clipper.backward(loss_fn, batch)  # was: loss_fn(batch).backward()
    >>> len(outcome), bool(outcome.weights.max() == 1)
    (4, True)

    Args:
        model: The module whose trainable parameters are clipped together. It must contain
            everything that is trained; put several modules into one `torch.nn.ModuleList`.
        microbatch_size: b, the number of examples clipped together; None makes each batch (or
            chunk) one micro-batch.
        rule: How norms become weights; the default is the paper's, `rules.MinNorm()`. Rules such
            as `rules.LossHistory()` weight examples instead, by their ids and losses.
        engine: "auto", "stream", "two_pass" or "fused": how the gradient is computed. It never
            changes the result. "auto" tries them on the first batch (see `engine_report`).
        reduction: "mean" has the scale of an ordinary mini-batch gradient; "sum", the paper's
            Algorithm 1, is the mean times B / b, the number of full micro-batches.
        nonfinite: What to do with a micro-batch gradient that has NaN or inf: "propagate" it,
            "skip" the micro-batch, or "raise". The latter two read the device once per step.
        grad_scaler: The loss scaler of float16 training. Norms are then those of the unscaled
            loss, and `.grad` stays scaled, as `scaler.step(optimizer)` expects it.
        memory_budget: Bytes that a single-pass step may use besides the parameters; larger batches
            are processed in chunks, which never changes the result. None: the free memory of the
            device. Rules that do not stream keep a part of every chunk.
        scope: For models sharded with `fully_shard`: with "rank" a micro-batch belongs to one rank,
            with "world" it is what all ranks process at the same time.
        verify: How often single passes are checked against a micro-batch run on its own: "rarely"
            (on the first batch, at steps 2, 4, 8, ... and whenever the model does something new,
            which takes at most 1 % of the time), "always", "never", or a number n for every n-th
            step as well. If they differ, the step is redone by streaming, with a warning that names
            the parameter.
        batch_dim: The dimension of a batch's tensors that the examples lie along: 1 for batches of
            shape (time, examples, ...). Tensors with fewer dimensions are cut along their last.
        ledger: A `microclip.Ledger` that records every finished step.
        noise_scale: Whether to estimate the gradient noise scale (`outcome.noise_scale`), which
            takes the norm of the result: a few percent of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        microbatch_size: int | None = None,
        *,
        rule: Rule | None = None,
        engine: EngineName = "auto",
        reduction: Reduction = "mean",
        nonfinite: Nonfinite = "propagate",
        grad_scaler: torch.amp.GradScaler | None = None,
        memory_budget: int | None = None,
        scope: Scope = "rank",
        verify: Verify = "rarely",
        batch_dim: int = 0,
        ledger: Ledger | None = None,
        noise_scale: bool = False,
    ) -> None:
        rule = MinNorm() if rule is None else rule
        checks.check_model(model)
        checks.check_rule(rule)
        checks.check_choice("engine", engine, ENGINES)
        checks.check_choice("reduction", reduction, REDUCTIONS)
        checks.check_choice("nonfinite", nonfinite, NONFINITE)
        checks.check_choice("scope", scope, SCOPES)
        checks.check_ledger(ledger)
        check(engine, rule)
        checks.check_example_rule(rule, microbatch_size, scope)
        self._parameters = trainable(model)  # as of the last step
        self.model = model
        refuse_unsupported(model)
        self._ddp = Ddp.find(model)
        self._outer_wrapper: OuterWrapper | None = None
        self._communication: LossCommunication | None = None
        budget, verify = checks.check_budget(memory_budget), checks.check_verify(verify)
        self._fsdp = _find_fsdp(model, scope)
        self._selector = EngineSelector(engine, model, grad_scaler, budget, verify, self._fsdp)
        self._ranks = self._ddp.ranks if self._ddp else None
        if self._ranks is None and self._fsdp is not None:
            self._ranks = self._fsdp.norm_exchange
        self._detect_ranks()
        self.policy = Policy(rule, check_size(microbatch_size), reduction, nonfinite)
        self.batch_dim = check_batch_dim(batch_dim)
        self.step = 0
        self.ledger = ledger
        self._predictions = self._receive_predictions()
        self.outcome: Outcome | None = None  # of the last finished step
        self._open: Step | None = None  # the step in progress
        self._example_rule = rule if isinstance(rule, ExampleRule) else None
        self._ids = None if self._example_rule is None else ExampleIds(self._example_rule)
        self._examples: ExampleStep | None = None  # of the step in progress
        self._losses_of: dict[str, bool] = {}  # by loss_fn: whether it returns one per example
        self._noise_scale = self._wants_noise_scale(noise_scale)
        self._mistakes = checks.Mistakes(model)
        self._warned = False

    @property
    def engine(self) -> EngineName:
        """The requested engine; `outcome.engine` says which one did the work."""
        return self._selector.name

    @property
    def engine_report(self) -> EngineReport | None:
        """What "auto" found on the first batch, and chose; None before that, or if not "auto"."""
        return self._selector.report

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler, if any."""
        return self._selector.scaler

    def __repr__(self) -> str:
        p = self.policy
        return (
            f"Clipper({type(self.model).__name__}, microbatch_size={p.microbatch_size}, "
            f"rule={p.rule!r}, engine={self.engine!r}, reduction={p.reduction!r}, "
            f"nonfinite={p.nonfinite!r})"
        )

    def backward(
        self, loss_fn: LossFn, batch: Any, *, ids: Ids | None = None, domains: Domains | None = None
    ) -> Outcome:
        """Add the clipped gradient of a whole mini-batch to `.grad`, as `loss.backward()` would.

        Args:
            loss_fn: Called with a micro-batch of the same structure as `batch`; returns the mean
                loss over it, or one loss per example.
            batch: A tensor, or any nesting of tuples, lists, dicts and dataclasses of tensors with
                the examples along their first dimension. Lists with one string per example are
                cut as well; everything else is passed on whole.
            ids: One label per example, to identify it in the outcome, and to recognize it in later
                steps for rules that remember examples.
            domains: One label per example. Micro-batches never mix domains, and the rule is
                applied within each.
        """
        if self._has_folded:
            raise RuntimeError(
                f"{len(self._current().record)} micro-batches are folded but not finished. Call "
                "finish() to use them or discard() to drop them, then backward()."
            )
        with self._all_or_nothing():
            self._fold_batch(loss_fn, batch, ids, domains, final=True)
            return self._finish()

    @overload
    def fold(
        self, loss_fn: LossFn, chunk: Any, *, ids: Ids | None = ..., domains: Domains | None = ...
    ) -> None: ...

    @overload
    def fold(
        self,
        *,
        size: int = ...,
        loss: Tensor | None = ...,
        loss_scale: float = ...,
        ids: Ids | None = ...,
        domain: Hashable = ...,
    ) -> None: ...

    def fold(
        self,
        loss_fn: LossFn | None = None,
        chunk: Any = None,
        *,
        ids: Ids | None = None,
        domains: Domains | None = None,
        size: int | None = None,
        loss: Tensor | None = None,
        loss_scale: float = 1.0,
        domain: Hashable = None,
    ) -> None:
        """Add a part of a mini-batch; call `finish()` once afterwards, before the optimizer.

        `fold(loss_fn, chunk)` cuts a chunk into micro-batches, for mini-batches that do not fit
        at once. Chunks are cut separately, so make their size a multiple of `microbatch_size`.

        `fold()` after your own `loss.backward()` takes what is in `.grad` as the gradient of one
        micro-batch, and clears it. Give its `size` if micro-batches differ in size (one loss or id
        per example tells it, too), and its `loss` for the outcome: the mean, or one loss per
        example. If the loss was multiplied before the backward pass (by 1 / steps, in loops that
        accumulate), pass `loss_scale=1 / steps`, which undoes it for both.
        """
        with self._all_or_nothing():
            checks.check_fold_arguments(loss_fn, chunk, domains, size, loss, loss_scale, domain)
            if loss_fn is None:
                self._fold_gradient(size, loss, loss_scale, ids, domain)
            else:
                self._fold_batch(loss_fn, chunk, ids, domains, final=False)

    def weighted_loss(self, losses: Tensor, *, ids: Ids | None = None) -> Tensor:
        """Return the loss to differentiate yourself, if the rule weights examples.

        It is the weighted mean of one loss per example. Give the same losses to `fold()`:

            clipper.weighted_loss(losses, ids=ids).backward()
            clipper.fold(loss=losses, ids=ids)
        """
        size, names = checks.check_losses(losses, ids)
        if self._example_rule is None:
            return losses.mean()
        self._current()
        assert self._examples is not None
        microbatch = Microbatch(None, range(size), None, names or tuple(range(size)))
        weighted = self._weighted(microbatch, losses, ids)
        self._examples.forget_last()  # fold() arrives at the same weights
        self._examples.weighted_for = size, names
        return weighted.mean(losses)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """If the block ends early, leave `.grad` as it was, wherever an interrupt (Ctrl-C) hits."""
        parameters, step, mode = self._parameters, self.step, torch.is_grad_enabled()
        kept: list[Tensor | None] | None = None
        try:
            kept = kept_gradients(parameters)
            yield
        except BaseException as error:
            torch.set_grad_enabled(mode)
            if self.step == step:
                if kept is not None:
                    restore(parameters, kept)
                if not isinstance(error, Exception):
                    self.discard()
            raise

    def finish(self) -> Outcome:
        """Apply the rule to everything that was folded and add the result to `.grad`."""
        with self._all_or_nothing():
            return self._finish()

    def _finish(self) -> Outcome:
        if not self._has_folded and self._ddp is None:
            raise RuntimeError(
                "finish() has nothing to finish: no micro-batch was folded since the last finish()."
            )
        step, examples = self._current(), self._examples
        engine, record = step.engine, step.record
        parameters = trainable(self.model) if engine is None else engine.parameters
        messages: list[str | Warning] = []
        together = uninterrupted()  # what the rule learns, `.grad` and the ledger
        try:
            self._reshard()
            gradients, seen = self._result(engine, record, parameters)
            noise = self._noise(record, gradients) if self._noise_scale else {}
            notes = tuple(step.notes)
            overflowed = self._overflowed(record)
            if overflowed:
                notes += (
                    "The gradients overflowed half precision at this loss scale. The result is "
                    "NaN, so the scaler will lower the scale.",
                )
            with together:
                record.update_rule()
                if self._example_rule is not None and seen is not None:
                    self._example_rule.remember(seen)
                    messages = self._example_rule.messages()
                    notes += tuple(map(str, messages))
                outcome = record.outcome(engine.name if engine else "none", notes)
                outcome = _with_own_losses(outcome, step.loss_scales)
                if noise:
                    outcome = replace(outcome, **noise)
                if self._predictions is not None and outcome.example_losses is not None:
                    predictions, classes = self._predictions.take()
                    outcome = replace(outcome, predictions=predictions, classes=classes)
                if examples is not None:
                    outcome = replace(outcome, example_weights=examples.weights())
                done = {"outcome": outcome, "step": record.step + 1}
                done |= {"_open": None, "_examples": None, "_parameters": parameters}
                deposit(parameters, gradients, (self.__dict__.update, done))
                if self.ledger is not None:
                    self.ledger.record(outcome)
        except BaseException:
            if self.step == record.step:  # unfinished
                self.discard()
            together.release()
            raise
        for message in messages:
            if isinstance(message, Warning):
                warnings.warn(message, stacklevel=3)
        self._mistakes.after(parameters)
        self._mistakes.equal_losses(outcome.losses, outcome.norms, record.step)
        if self._outer_wrapper is not None and self._ddp is None:
            self._outer_wrapper.warn_unwrapped()
        if record.left_out and not overflowed and not self._warned:
            self._warned = True
            warnings.warn(
                f"Skipped {len(record.left_out)} of {len(record)} micro-batches in step "
                f"{record.step}: their gradients are not finite. From now on such micro-batches "
                "are only counted, in outcome.skipped, without a warning.",
                RuntimeWarning,
                stacklevel=3,
            )
        return outcome

    def _result(
        self, engine: Engine | None, record: StepRecord, parameters: dict[str, nn.Parameter]
    ) -> tuple[Gradients, Seen | None]:
        """Return the clipped gradient, summed over all ranks if there are several.

        The second value is what all ranks saw of their examples, if the rule wants to know.
        """
        if self._ranks is not None:
            self._ranks.describe(self.policy, self.grad_scaler, parameters)
        record.sync_ranks()
        seen = None
        if self._examples is not None:
            seen = self._examples.gather(record, self._ranks)
        if self._ddp is not None:
            self._ddp.end()
        if engine is None:  # this rank has no examples, and adds nothing
            record.leave_out()
            gradients: Gradients = {}
        else:
            with self.local():
                gradients = engine.finish()
            if self._overflowed(record):  # the scaler must see it, on every rank
                gradients = {name: g.fill_(torch.nan) for name, g in gradients.items()}
        if self._ddp is not None:
            gradients = self._ddp.ranks.sum(record.step, gradients, parameters)
        return gradients, seen

    def _noise(self, record: StepRecord, gradients: Gradients) -> dict[str, Any]:
        """Return what the outcome says about how noisy gradients are."""
        if not gradients:
            return {}
        each = list(gradients.values())
        norm = unscale(multitensor.norm(each, each[0].device), self.grad_scaler)
        if self._fsdp is not None:
            found = record.noise(self._fsdp.norm_of_shards(norm))
            return {"noise": replace(found, trace=found.trace * self._fsdp.ranks_per_row)}
        noise: dict[str, Any] = {"noise": record.noise(norm)}
        record.domain_norms = {
            domain: unscale(norm, self.grad_scaler)
            for domain, norm in record.domain_norms.items()
            if domain is not None
        }
        if record.domain_norms:
            noise["domain_noise"] = record.domain_noise()
        return noise

    def _wants_noise_scale(self, asked: bool) -> bool:
        """Return whether to estimate it; refuse where that is impossible."""
        if not isinstance(asked, bool):
            raise ValueError(f"noise_scale must be True or False, but got {asked!r}.")
        if asked and self._example_rule is not None:
            raise ValueError(
                "noise_scale=True is not available for rules that weight examples, such as "
                f"{self._example_rule!r}: they take one weighted backward pass, without the norms "
                "that the estimate is made of. Measure it with rule=rules.Keep()."
            )
        return asked

    def _receive_predictions(self) -> StepPredictions | None:
        """Return what receives the predictions that `loss_fn` records, if there is a ledger."""
        receive = getattr(self.ledger, "send_predictions_to", None)
        if receive is None:
            return None
        found = StepPredictions()
        receive(found.note)
        return found

    def _overflowed(self, record: StepRecord) -> bool:
        """Whether micro-batches are skipped because the loss scale is too large."""
        scaler = self.grad_scaler
        return bool(record.left_out and scaler and record.overflowed(scaler.get_scale()))

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside the block, gradients stay on this rank: for `fold()` after your own backward."""
        with (
            nullcontext() if self._ddp is None else self._ddp.local(),
            nullcontext() if self._outer_wrapper is None else self._outer_wrapper.refused(),
        ):
            yield

    def discard(self) -> None:
        """Drop what was folded since the last `finish()`, for example to skip a bad batch."""
        self._open = self._examples = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: steps, the rule's state, and what "auto" found.

        Also writes everything the ledger has recorded to disk.
        """
        if self._has_folded:
            raise RuntimeError(
                "A checkpoint cannot hold half a step: call finish() or discard() before "
                "state_dict()."
            )
        if self.ledger is not None:
            self.ledger.flush()
        return self.lasting_state()

    def lasting_state(self) -> dict[str, Any]:
        """Return the state as of the last `finish()`, whatever has been folded since."""
        state = {
            "step": self.step,
            "rule": self.policy.rule.state_dict(),
            "trials": self._selector.trials(),
        }
        return state if self._ids is None else {**state, "ids": self._ids.kind}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if not isinstance(state, dict) or set(state) - {"trials", "ids"} != {"step", "rule"}:
            got = sorted(map(str, state)) if isinstance(state, dict) else repr(state)
            raise ValueError(
                "A Clipper's state has the entries 'step' and 'rule', and optionally 'trials', but "
                f"got {got}."
            )
        self.policy.rule.load_state_dict(state["rule"])
        self._selector.load_trials(state.get("trials", []))
        if self._ids is not None:
            self._ids.kind = str(state.get("ids", ""))
        self.step = state["step"]

    def _fold_batch(
        self, loss_fn: LossFn, batch: Any, ids: Ids | None, domains: Domains | None, final: bool
    ) -> None:
        checks.check_loss_fn(loss_fn)
        b = self.policy.microbatch_size
        self._reshard()
        if not self._has_folded:
            self._mistakes.at_start(self.step)
        if self._ddp is not None:
            self._current()
            if is_empty(batch, self.batch_dim):
                return
        elif self._fsdp is not None and is_empty(batch, self.batch_dim):
            self._fsdp.report_empty_batch(self._current().record, self.grad_scaler)
        step = self._current()
        place = {"first_position": step.record.examples, "batch_dim": self.batch_dim}
        given: dict[str, Any] = {"domains": domains, "ids": ids, **place}
        if self._example_rule is None:
            microbatches = cut(batch, b, **given)
            step.note_size(microbatches.examples, final)
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
        rule, examples, ids = self._example_rule, self._examples, given["ids"]
        assert rule is not None
        assert examples is not None
        b, name = self.policy.microbatch_size, name_of(loss_fn)
        scales = _loss_scales(loss_fn)
        if rule.clip is not None or rule.needs_norms or self._losses_of.get(name) is False:
            microbatches = cut(batch, b, **given)
            self._fold_microbatches(
                loss_fn, examples.weigh(microbatches, ids, False, scales), final
            )
            return
        microbatches = examples.weigh(cut(batch, None, **given), ids, True, scales)
        before = None
        if name not in self._losses_of:  # its first call may have to be undone
            before = self._selector.side_effects.snapshot(loss_fn)
            microbatches = microbatches.keep_copy()
        try:
            self._fold_microbatches(loss_fn, microbatches, final)
            if microbatches.examples > 1:  # a single example has one loss either way
                self._losses_of[name] = True
        except MeanOfExamplesError:
            if b is None:
                raise ValueError(
                    f"{type(rule).__name__} weights examples, but loss_fn returns the mean of "
                    f"{microbatches.examples} losses. Return the losses themselves, as with "
                    'reduction="none". If that is impossible, pass microbatch_size=1 (slow) or '
                    "more, and the micro-batches are weighted."
                ) from None
            if before is not None:
                before.restore()
                microbatches.reverted()
            self._losses_of[name] = False
            examples.forget_last()
            self._fold_weighted(loss_fn, batch, given, final)

    def _fold_microbatches(
        self, loss_fn: LossFn, microbatches: MicrobatchList, final: bool
    ) -> None:
        step, called = self._current(), loss_fn
        if self._predictions is not None:
            called = self._predictions.watched(loss_fn)
        if self.step & (self.step + 1) == 0:
            step.record.on_loss = partial(self._mistakes.in_loss, microbatches=microbatches)
            self._mistakes.in_batch(microbatches, self.step)
        try:
            with self.local(), self._mistakes.watching(microbatches, self.step):
                step.fold(called, microbatches, final, self._communication)
            scales = _loss_scales(loss_fn)
            step.loss_scales.append(None if scales is None else scales[microbatches.order])
        except MeanOfExamplesError:  # before anything was recorded
            raise
        except BaseException as error:
            self._abandon(error, final)
            raise

    def _fold_gradient(
        self,
        size: int | None,
        loss: Tensor | None,
        loss_scale: float,
        ids: Ids | None,
        domain: Hashable,
    ) -> None:
        self._reshard()
        if self._fsdp is not None:
            raise NotImplementedError(
                "fold() after your own backward would take gradients that FSDP has already "
                "averaged over ranks, and only this rank's shards of them. Use "
                "backward(loss_fn, batch) or fold(loss_fn, chunk). `.grad` is unchanged."
            )
        parameters = trainable(self.model)
        loss = checks.check_own_backward(size, loss, loss_scale, domain)
        if loss is not None and loss_scale == 1:
            self._mistakes.divided(loss)
        checks.check_streams(self.policy.rule, self.engine)
        self._detect_ranks()
        if self._ddp is not None:
            self._ddp.expect_local()
        if self._outer_wrapper is not None:
            self._outer_wrapper.expect_none()
        if size is None and loss is not None and loss.dim() == 1 and len(loss) > 1:
            size = len(loss)
        size, names = checks.size_and_ids(size, ids)
        checks.check_shape(loss, size)
        checks.check_gradients_exist(parameters)
        kept = [parameter.grad for parameter in parameters.values()]
        step = self._current()
        engine = step.stream(parameters)
        if self._examples is not None and loss is not None and loss.shape == (size,):
            self._examples.expect_weighted(size, names)
        names = names or tuple(range(step.record.examples, step.record.examples + size))
        try:
            microbatch = Microbatch(None, range(size), domain, names)
            if self._examples is not None:
                unscaled = None if loss is None else loss / loss_scale
                microbatch = self._weighted(microbatch, unscaled, ids)
            if self._predictions is not None:
                self._predictions.fold_own(size, loss)
            step.add_gradients(engine, parameters, microbatch, loss, loss_scale)
        except BaseException as error:
            for parameter, gradient in zip(parameters.values(), kept, strict=True):
                parameter.grad = gradient
            self._abandon(error, final=False)
            raise

    def _weighted(self, microbatch: Microbatch, loss: Tensor | None, ids: Ids | None) -> Microbatch:
        """Return a micro-batch whose gradient is in `.grad` already, with its examples' weights."""
        assert self._examples is not None
        if loss is None:
            raise ValueError(
                f"{self.policy.rule!r} needs the loss of every micro-batch. Pass it to fold(): "
                "clipper.fold(loss=loss, ids=ids)."
            )
        size, name = microbatch.size, type(self.policy.rule).__name__
        if self._example_rule is not None and self._example_rule.needs_norms and size != 1:
            raise ValueError(
                f"{name} needs the gradient of one example at a time, but this is that of {size}. "
                "Fold single examples, or use clipper.backward(loss_fn, batch)."
            )
        one = MicrobatchList(None, [microbatch.positions], [microbatch.domain], [microbatch.ids])
        weighted = self._examples.weigh(one, ids, False)[0]
        assert weighted.weights is not None
        losses = loss.detach() if loss.shape == (microbatch.size,) else loss.detach().mean()
        weighted.weights.multipliers([weighted.positions], losses.reshape(-1))
        return weighted

    def _current(self) -> Step:
        """Return the step in progress; start one if there is none."""
        if self._open is None:
            self._detect_ranks()
            if self._ddp is not None:  # on every rank, with or without examples
                self._ddp.begin(self.step)
            by_domain = self._noise_scale and self._ranks is None and self._fsdp is None
            more = self._ranks, self._predictions, by_domain and self.policy.rule.streams
            self._open = Step(self.step, self.policy, self._selector, *more)
            if self._example_rule is not None and self._ids is not None:
                self._examples = ExampleStep(self._example_rule, self._ids, self.step)
        return self._open

    @property
    def _has_folded(self) -> bool:
        """Whether the step in progress has micro-batches."""
        return self._open is not None and self._open.engine is not None

    def _detect_ranks(self) -> None:
        """Check for other ranks, which may have joined after this Clipper was made."""
        if self._outer_wrapper is None and world_size() > 1 and self._fsdp is None:
            self._outer_wrapper = OuterWrapper(self.model)
            self._communication = LossCommunication(self.model)

    def _reshard(self) -> None:
        """Before parameters are listed, put those that the optimizer has back in place."""
        if self._fsdp is not None:
            self._fsdp.reshard()
        else:
            refuse_late_sharding(self.model)

    def _abandon(self, error: BaseException, final: bool) -> None:
        """Drop a step that failed halfway: a sum of gradients cannot be split again."""
        if not final and self._open is not None and len(self._open.record):
            error.add_note(
                f"microclip: the {len(self._open.record)} micro-batches folded since the last "
                "finish() were dropped. Start this step again."
            )
        self.discard()


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


def _find_fsdp(model: nn.Module, scope: Scope) -> Fsdp | None:
    """Return how a model is sharded; imports FSDP only if it is."""
    found = None
    if is_sharded(model):
        from microclip.distributed.fsdp import Fsdp

        found = Fsdp.find(model, scope)
    if scope == "world" and found is None:
        raise ValueError(
            'scope="world" is for models sharded with fully_shard(): on others, each rank has its '
            "own gradients."
        )
    return found
