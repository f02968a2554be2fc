"""The Clipper: the object that users hold. Checks what it is given, and does whole steps or none.

What happens inside a step is in `microclip.step`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from microclip import checks
from microclip.distributed.parallelism import Parallelism
from microclip.engines.gradients import LossFn, deposit, kept_gradients, restore, trainable
from microclip.engines.select import (
    ENGINES,
    SCOPES,
    EngineName,
    EngineReport,
    EngineSelector,
    Scope,
    check,
)
from microclip.engines.step_record import REDUCTIONS, Policy, Reduction
from microclip.example_step import ExampleIds
from microclip.interrupts import uninterrupted
from microclip.microbatches import Domains, Ids, check_batch_dim, check_size
from microclip.outcome import Outcome
from microclip.rules import NONFINITE, ExampleRule, MinNorm, Nonfinite, Rule
from microclip.step import Step
from microclip.step_predictions import StepPredictions
from microclip.user_warnings import warn

if TYPE_CHECKING:
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
        rule: How norms become weights; the default is the paper's, `rules.MinNorm()`. With Adam,
            `rules.Unit()` did better on most of our tasks. Rules such as `rules.LossHistory()`
            weight examples instead, by their ids and losses.
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
        budget, verify = checks.check_budget(memory_budget), checks.check_verify(verify)
        self._parallelism = Parallelism(model, scope)
        self._selector = EngineSelector(
            engine, model, grad_scaler, budget, verify, self._parallelism.fsdp
        )
        self.policy = Policy(rule, check_size(microbatch_size), reduction, nonfinite)
        self.batch_dim = check_batch_dim(batch_dim)
        self.step = 0
        self.ledger = ledger
        self._predictions = self._receive_predictions()
        self.outcome: Outcome | None = None  # of the last finished step
        self._open: Step | None = None  # the step in progress
        self._example_rule = rule if isinstance(rule, ExampleRule) else None
        self._ids = None if self._example_rule is None else ExampleIds(self._example_rule)
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
        names = checks.check_losses(losses, ids)
        if self._example_rule is None:
            return losses.mean()
        return self._current().weighted_mean(losses, names, ids)

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
            if self._open is not None and self._open.failed:
                self.discard()
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
        if not self._has_folded and self._parallelism.ddp is None:
            raise RuntimeError(
                "finish() has nothing to finish: no micro-batch was folded since the last finish()."
            )
        step = self._current()
        parameters = step.parameters
        messages: list[str | Warning] = []
        together = uninterrupted()  # what the rule learns, `.grad` and the ledger
        try:
            self._parallelism.reshard()
            gradients, seen = step.result(parameters)
            noise = step.noise(gradients)
            with together:
                step.record.update_rule()
                if self._example_rule is not None and seen is not None:
                    self._example_rule.remember(seen)
                    messages = self._example_rule.messages()
                outcome = step.outcome(noise, tuple(map(str, messages)))
                done = {"outcome": outcome, "step": step.number + 1}
                done |= {"_open": None, "_parameters": parameters}
                deposit(parameters, gradients, (self.__dict__.update, done))
                if self.ledger is not None:
                    self.ledger.record(outcome)
        except BaseException:
            if self.step == step.number:  # unfinished
                self.discard()
            together.release()
            raise
        for message in messages:
            if isinstance(message, Warning):
                warn(message)
        self._mistakes.after(parameters)
        self._mistakes.equal_losses(outcome.losses, outcome.norms, step.number)
        if self._parallelism.outer_wrapper is not None and self._parallelism.ddp is None:
            self._parallelism.outer_wrapper.warn_unwrapped()
        skipped = len(step.record.left_out)
        if skipped and not step.overflowed and not self._warned:
            self._warned = True
            warn(
                f"Skipped {skipped} of {len(step.record)} micro-batches in step "
                f"{step.number}: their gradients are not finite. From now on such micro-batches "
                "are only counted, in outcome.skipped, without a warning."
            )
        return outcome

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

    def local(self) -> AbstractContextManager[None]:
        """Inside the block, gradients stay on this rank: for `fold()` after your own backward."""
        return self._parallelism.local()

    def discard(self) -> None:
        """Drop what was folded since the last `finish()`, for example to skip a bad batch."""
        self._open = None

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
        self._parallelism.reshard()
        if not self._has_folded:
            self._mistakes.at_start(self.step)
        self._current().fold_batch(loss_fn, batch, ids, domains, final)

    def _fold_gradient(
        self,
        size: int | None,
        loss: Tensor | None,
        loss_scale: float,
        ids: Ids | None,
        domain: Hashable,
    ) -> None:
        self._parallelism.reshard()
        self._parallelism.refuse_own_backward()
        parameters = trainable(self.model)
        loss = checks.check_own_backward(size, loss, loss_scale, domain)
        if loss is not None and loss_scale == 1:
            self._mistakes.divided(loss)
        checks.check_streams(self.policy.rule, self.engine)
        self._parallelism.expect_local()
        if size is None and loss is not None and loss.dim() == 1 and len(loss) > 1:
            size = len(loss)
        size, names = checks.size_and_ids(size, ids)
        checks.check_shape(loss, size)
        checks.check_gradients_exist(parameters)
        given = size, names, loss, loss_scale, ids, domain
        self._current().fold_gradient(parameters, *given)

    def _current(self) -> Step:
        """Return the step in progress; start one if there is none."""
        if self._open is None:
            self._open = Step(
                self.step,
                self.policy,
                self._selector,
                self._parallelism,
                self._mistakes,
                ids=self._ids,
                returns_losses=self._losses_of,
                predictions=self._predictions,
                batch_dim=self.batch_dim,
                noise_scale=self._noise_scale,
            )
        return self._open

    @property
    def _has_folded(self) -> bool:
        """Whether the step in progress has micro-batches."""
        return self._open is not None and self._open.has_folded
