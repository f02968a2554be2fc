"""The Clipper: what a user holds. It ties the rooms together and does little else."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch import Tensor, nn

from microclip.distributed.collectives import Collectives
from microclip.distributed.ddp import Ddp
from microclip.distributed.outside import Outside, ranks_around, refuse_other_wrappers
from microclip.engines.base import Engine, MismatchError
from microclip.engines.choose import ENGINES, SCOPES, Chooser, EngineName, Scope, check
from microclip.engines.gradients import Gradients, deposit, take, trainable
from microclip.engines.losses import LossFn, LossPerExampleError, MeansOnly
from microclip.engines.stream import Stream
from microclip.engines.tally import REDUCTIONS, Policy, Reduction, Tally
from microclip.microbatches import (
    Cuts,
    Domains,
    Ids,
    Microbatch,
    check_batch_dim,
    check_size,
    cut,
    is_empty,
)
from microclip.mistakes import Mistakes
from microclip.multitensor import accumulation_dtype
from microclip.outcome import Outcome
from microclip.rules import NONFINITE, MinNorm, Nonfinite, Rule

if TYPE_CHECKING:
    from microclip.engines.single_pass.verify import Verify
    from microclip.engines.trial import EngineReport
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
        model: The module whose trainable parameters are clipped together. It must hold
            everything that is trained; several modules go into one `torch.nn.ModuleList`.
        microbatch_size: b, the number of examples clipped together; None makes each batch (or
            chunk) one micro-batch.
        rule: How norms become weights; the default is the paper's, `rules.MinNorm()`.
        engine: "auto", "stream", "two_pass" or "fused": how the gradient is obtained, never what
            it is. "auto" tries them out on the first batch (see `engine_report`).
        reduction: "mean" has the scale of an ordinary mini-batch gradient; "sum", the paper's
            Algorithm 1, is the mean times the number of micro-batches.
        nonfinite: What to do about a micro-batch gradient with NaN or inf: "propagate" it,
            "skip" the micro-batch, or "raise". The latter two read the device once per step.
        grad_scaler: The loss scaler of float16 training. Norms are then those of the unscaled
            loss, and `.grad` stays scaled, as `scaler.step(optimizer)` expects it.
        memory_budget: Bytes that a single-pass step may hold beside the parameters; larger
            batches are taken in chunks, which never changes the result. None: what the device has
            free. Rules that do not stream keep a part of every chunk.
        scope: For models sharded with `fully_shard`: "rank" makes micro-batches of one rank's
            examples, "world" of what all ranks process at the same time.
        verify: How often single passes are checked against a micro-batch alone: "rarely" (on the
            first batch, at steps 2, 4, 8, ... and whenever the model does something new, which
            takes at most 1 % of the time), "always", "never", or a number n for every n-th step as
            well. Where they differ, the step is redone by streaming, with a warning that names the
            parameter.
        batch_dim: The dimension of a batch's tensors that the examples lie along: 1 for batches of
            shape (time, examples, ...). Shorter tensors are cut along their last.
        ledger: A `microclip.Ledger`, which then records every finished step.
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
    ) -> None:
        rule = MinNorm() if rule is None else rule
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"Clipper needs the model, a torch.nn.Module, but got {type(model).__name__}. "
                "Put several modules into one torch.nn.ModuleList."
            )
        if not isinstance(rule, Rule):
            raise TypeError(
                f"rule must be an instance of a Rule, such as microclip.rules.MinNorm(), but got "
                f"{rule!r}."
            )
        _one_of("engine", engine, ENGINES)
        _one_of("reduction", reduction, REDUCTIONS)
        _one_of("nonfinite", nonfinite, NONFINITE)
        _one_of("scope", scope, SCOPES)
        if ledger is not None and not hasattr(ledger, "record"):
            raise TypeError(
                f"ledger must be a microclip.Ledger, but got {ledger!r}. "
                "Say ledger=microclip.Ledger(path)."
            )
        check(engine, rule)
        trainable(model)
        self.model = model
        refuse_other_wrappers(model)
        self._ddp = Ddp.find(model)
        self._outside: Outside | None = None
        self._collectives: Collectives | None = None
        budget = _check_budget(memory_budget)
        self._chooser = Chooser(engine, model, grad_scaler, budget, scope, _check_verify(verify))
        self._ranks = self._ddp.ranks if self._ddp else self._chooser.ranks
        self._look_around()
        self.policy = Policy(rule, check_size(microbatch_size), reduction, nonfinite)
        self.batch_dim = check_batch_dim(batch_dim)
        self.step = 0
        self.ledger = ledger
        self.outcome: Outcome | None = None  # of the last finished step
        self._tally: Tally | None = None
        self._engine: Engine | None = None
        self._notes: list[str] = []
        self._mistakes = Mistakes(model)
        self._warned = False

    @property
    def engine(self) -> EngineName:
        """The engine that was asked for; `outcome.engine` says which one did the work."""
        return self._chooser.name

    @property
    def engine_report(self) -> EngineReport | None:
        """What "auto" found out on the first batch, and chose; None before, or if not "auto"."""
        return self._chooser.report

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler that was given."""
        return self._chooser.scaler

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
                the examples along their first dimension. Lists with a string for each example are
                cut as well; everything else is handed on whole.
            ids: One label per example, to find it again in the outcome.
            domains: One label per example. Micro-batches never mix domains, and the rule is
                applied within each.
        """
        if self._engine is not None:
            raise RuntimeError(
                f"{len(self._current())} micro-batches are folded and not finished. Call finish() "
                "to use them or discard() to drop them, then backward()."
            )
        self._fold_batch(loss_fn, batch, ids, domains, final=True)
        return self.finish()

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
        """Add a part of a mini-batch; `finish()` afterwards, once, before the optimizer.

        `fold(loss_fn, chunk)` cuts a chunk into micro-batches, for mini-batches that do not fit
        at once. A chunk is cut by itself, so let its size be a multiple of `microbatch_size`.

        `fold()` after your own `loss.backward()` takes what is in `.grad` as the gradient of one
        micro-batch, and clears it. Give its `size` if micro-batches differ in size, and its `loss`
        for the outcome. If the loss was multiplied before the backward pass (by 1 / steps, in loops
        that accumulate), say so with `loss_scale=1 / steps`: both are then taken as if it had not.
        """
        if loss_fn is not None:
            if size is not None or loss is not None or domain is not None or loss_scale != 1:
                raise TypeError(
                    "size, loss, loss_scale and domain belong to fold() after your own backward; "
                    "fold(loss_fn, chunk) finds them out. Did you mean domains=?"
                )
            self._fold_batch(loss_fn, chunk, ids, domains, final=False)
            return
        if chunk is not None or domains is not None:
            raise TypeError("fold() with a chunk or domains needs loss_fn: fold(loss_fn, chunk).")
        self._fold_gradient(size, loss, loss_scale, ids, domain)

    def finish(self) -> Outcome:
        """Apply the rule to all that was folded and add the result to `.grad`."""
        if self._engine is None and self._ddp is None:
            raise RuntimeError(
                "finish() has nothing to finish: no micro-batch was folded since the last one."
            )
        engine, tally = self._engine, self._current()
        parameters = trainable(self.model) if engine is None else engine.parameters
        try:
            self._chooser.reshard()
            gradients = self._result(engine, tally, parameters)
        finally:
            notes = tuple(self._notes)
            self.discard()
        overflowed = self._overflowed(tally)
        if overflowed:
            notes += (
                "The gradients overflowed half precision at this loss scale. The result is NaN, so "
                "the scaler will lower the scale.",
            )
        outcome = tally.outcome(engine.name if engine else "none", notes)
        deposit(parameters, gradients)
        self.outcome = outcome
        self._mistakes.after(parameters)
        self._mistakes.equal_losses(self.outcome.losses, self.outcome.norms, self.step)
        self.step += 1
        if self.ledger is not None:
            self.ledger.record(self.outcome)
        if self._outside is not None and self._ddp is None:
            self._outside.warn_of_replicas()
        if tally.left_out and not overflowed and not self._warned:
            self._warned = True
            warnings.warn(
                f"Left {len(tally.left_out)} of {len(tally)} micro-batches out of step "
                f"{tally.step}: their gradients are not finite. From now on such micro-batches "
                "are counted in outcome.skipped without a word.",
                RuntimeWarning,
                stacklevel=3,
            )
        return self.outcome

    def _result(
        self, engine: Engine | None, tally: Tally, parameters: dict[str, nn.Parameter]
    ) -> Gradients:
        """Return the clipped gradient; over all ranks, if there are several."""
        if self._ranks is not None:
            self._ranks.describe(self.policy, self.grad_scaler, parameters)
        tally.settle()
        if self._ddp is not None:
            self._ddp.end()
        if engine is None:  # this rank has no examples, but listens, and adds nothing
            tally.leave_out()
            gradients: Gradients = {}
        else:
            with self.local():
                gradients = engine.finish()
            if self._overflowed(tally):  # the scaler must see it, on every rank
                gradients = {name: g.fill_(torch.nan) for name, g in gradients.items()}
        if self._ddp is None:
            return gradients
        return self._ddp.ranks.sum(tally.step, gradients, parameters)

    def _overflowed(self, tally: Tally) -> bool:
        """Whether micro-batches are to be left out because the loss scale is too large."""
        scaler = self.grad_scaler
        return bool(tally.left_out and scaler and tally.overflowed(scaler.get_scale()))

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside the block gradients stay on this rank: for `fold()` after your own backward."""
        with (
            nullcontext() if self._ddp is None else self._ddp.local(),
            nullcontext() if self._outside is None else self._outside.refused(),
        ):
            yield

    def discard(self) -> None:
        """Drop what was folded since the last `finish()`, for instance to leave a bad batch out."""
        self._engine = self._tally = None
        self._notes = []

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: steps, the rule's state, and what "auto" found.

        What a ledger has recorded until here is written to disk.
        """
        if self._engine is not None:
            raise RuntimeError(
                "A checkpoint cannot hold half a step: call finish() or discard() before "
                "state_dict()."
            )
        if self.ledger is not None:
            self.ledger.flush()
        return self.lasting_state()

    def lasting_state(self) -> dict[str, Any]:
        """Return the state as of the last `finish()`, whatever has been folded since."""
        return {
            "step": self.step,
            "rule": self.policy.rule.state_dict(),
            "trials": self._chooser.trials(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        if set(state) - {"trials"} != {"step", "rule"}:
            raise ValueError(
                "A Clipper's state has the entries 'step' and 'rule', and perhaps 'trials', but "
                f"got {sorted(state)}."
            )
        self.policy.rule.load_state_dict(state["rule"])
        self._chooser.take_trials(state.get("trials", []))
        self.step = state["step"]

    def _fold_batch(
        self, loss_fn: LossFn, batch: Any, ids: Ids | None, domains: Domains | None, final: bool
    ) -> None:
        if not callable(loss_fn):
            raise TypeError(
                f"loss_fn must be a function from a micro-batch to its loss, but got "
                f"{type(loss_fn).__name__}. Clipping needs the loss of every micro-batch, not that "
                "of the whole batch: backward(loss_fn, batch) instead of backward(loss)."
            )
        b = self.policy.microbatch_size
        self._chooser.reshard()
        if self._engine is None:
            self._mistakes.at_start(self.step)
        if self._ddp is not None:
            self._current()
            if is_empty(batch, self.batch_dim):
                return
        elif self._chooser.is_sharded and is_empty(batch, self.batch_dim):
            self._chooser.tell_of_no_examples(self._current())
        tally = self._current()
        place = {"first_position": tally.examples, "batch_dim": self.batch_dim}
        microbatches = cut(batch, b, domains=domains, ids=ids, **place)
        self._note_sizes(microbatches.examples, final)
        if self.step & (self.step + 1) == 0:
            tally.on_loss = partial(self._mistakes.in_loss, cuts=microbatches)
            self._mistakes.in_batch(microbatches, self.step)
        try:
            with self.local(), self._mistakes.watching(microbatches, self.step):
                self._fold_cuts(loss_fn, microbatches, final)
        except BaseException as error:
            self._abandon(error, final)
            raise

    def _fold_cuts(self, loss_fn: LossFn, microbatches: Cuts, final: bool) -> None:
        def fold(loss_fn: LossFn) -> None:
            (self._fold_whole if final else self._fold_chunk)(loss_fn, microbatches)

        if self._collectives is None:
            fold(loss_fn)
            return
        before = self._engine
        if self._collectives.run(fold, loss_fn):
            return
        self._chooser.stay_in_step(self._collectives.found)
        if before is None:
            self._engine, self._tally = None, Tally(self.policy, self.step, self._ranks)
        if self._ranks is not None:
            self._ranks.describe(self.policy, self.grad_scaler, trainable(self.model))
            self._ranks.agree(self.step, len(microbatches))
        fold(loss_fn)

    def _fold_chunk(self, loss_fn: LossFn, microbatches: Cuts) -> None:
        tally = self._current()
        first = self._engine is None
        self._engine = self._engine or self._chooser.for_chunks(tally)
        self._expect_same_parameters(self._engine)
        microbatches = self._guarded(microbatches)
        try:
            self._engine.fold(loss_fn, microbatches, final=False)
        except MismatchError as error:
            self._chooser.give_up_single_passes(error)
            if not first:
                raise
            self._tally = Tally(self.policy, self.step, self._ranks)
            self._engine = self._chooser.for_chunks(self._current())
            self._engine.fold(loss_fn, microbatches.pristine, final=False)

    def _fold_whole(self, loss_fn: LossFn, microbatches: Cuts) -> None:
        if self._chooser.wants_to_know(loss_fn, microbatches):
            guarded = microbatches.keep_copy()
            if self._fold_means(loss_fn, microbatches.keep_copy()):
                return
            microbatches = guarded.reverted()
        self._engine = self._chooser.for_batch(self._current(), loss_fn, microbatches)
        microbatches = self._guarded(microbatches)
        try:
            self._engine.fold(loss_fn, microbatches, final=True)
        except Exception as error:
            # a rare branch of the model, or a batch too large, must not end a training run; if it
            # is the model that fails, it will fail again
            if (
                self._engine.name != "fused"
                or not self._chooser.may_give_up(error)
                or not microbatches.can_be_repeated
            ):
                raise
            self._tally = Tally(self.policy, self.step, self._ranks)
            self._engine = self._chooser.certain_engine(self._current())
            self._engine.fold(loss_fn, microbatches.pristine, final=True)
            self._chooser.give_up_single_passes(error)

    def _fold_means(self, loss_fn: LossFn, microbatches: Cuts) -> bool:
        """Fold by a certain engine if `loss_fn` gives means; return whether it does.

        So `loss_fn` is called no more often than it would be without "auto". If it gives one loss
        per example, that one call is undone. If it reads what cannot be read again, whatever it
        gives, it is not called for a trial.
        """
        memory = self._chooser.memory
        before = memory.snapshot(loss_fn)
        self._engine = self._chooser.certain_engine(self._current())
        try:
            function = loss_fn if before.unrepeatable else MeansOnly(loss_fn)
            self._engine.fold(function, microbatches, final=True)
        except LossPerExampleError:
            before.restore()
            self._engine, self._tally = None, Tally(self.policy, self.step, self._ranks)
            return False
        self._chooser.note_certain(loss_fn, microbatches, self._engine.name, before.unrepeatable)
        return True

    def _guarded(self, microbatches: Cuts) -> Cuts:
        """Return micro-batches that can be had again where an engine calls `loss_fn` twice."""
        if self._engine is None or self._engine.name == "stream":
            return microbatches
        return self._chooser.memory.guarded(microbatches)

    def _expect_same_parameters(self, engine: Engine) -> None:
        """Refuse a part of a step in which other parameters are trained than in the first."""
        now = {id(p) for p in self.model.parameters() if p.requires_grad}
        if now == {id(parameter) for parameter in engine.parameters.values()}:
            return
        changed = [
            name
            for name, p in self.model.named_parameters()
            if p.requires_grad != (name in engine.parameters)
        ]
        raise RuntimeError(
            f"requires_grad of parameter {changed[0]!r} has changed since the first fold() of this "
            "step, so that its gradient would not be clipped with the others. Freeze and unfreeze "
            "between finish() and the next fold()."
            if changed
            else "The model has got other parameters since the first fold() of this step. Change "
            "it between finish() and the next fold()."
        )

    def _fold_gradient(
        self,
        size: int | None,
        loss: Tensor | None,
        loss_scale: float,
        ids: Ids | None,
        domain: Hashable,
    ) -> None:
        self._chooser.reshard()
        if self._chooser.is_sharded:
            raise NotImplementedError(
                "fold() after your own backward would take gradients that FSDP has already "
                "averaged over ranks, and only this rank's shards of them. Use "
                "backward(loss_fn, batch) or fold(loss_fn, chunk). `.grad` is as it was."
            )
        parameters = trainable(self.model)
        if not isinstance(loss_scale, int | float) or not 0 < loss_scale < math.inf:
            raise ValueError(
                f"loss_scale must be the positive number that the loss was multiplied with, but "
                f"got {loss_scale!r}. For a loss divided by 8 it is 1 / 8."
            )
        if isinstance(loss, int | float):
            loss = torch.tensor(float(loss))
        if loss is not None and not isinstance(loss, Tensor):
            raise TypeError(f"loss must be a tensor or a number, but got {type(loss).__name__}.")
        if not isinstance(domain, Hashable):
            raise TypeError(
                f"domain must be a label that can be looked up, such as a string or a number, but "
                f"got {domain!r}."
            )
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(
                f"size must be a positive integer, the number of examples folded, but got {size!r}."
            )
        if loss is not None and loss_scale == 1:
            self._mistakes.divided(loss)
        if self.engine in ("two_pass", "fused") or not self.policy.rule.streams:
            raise RuntimeError(
                f"fold() after your own backward sees gradients once, but {self.policy.rule!r} "
                f"with engine={self.engine!r} must see the examples. Use backward(loss_fn, batch) "
                "or fold(loss_fn, chunk), or a rule that streams."
            )
        self._look_around()
        if self._ddp is not None:
            self._ddp.expect_local()
        if self._outside is not None:
            self._outside.expect_none()
        names = () if ids is None else tuple(ids.tolist() if isinstance(ids, Tensor) else ids)
        size = check_size(size) or len(names) or 1
        if names and len(names) != size:
            raise ValueError(f"The micro-batch has {size} examples, but ids has {len(names)}.")
        if all(parameter.grad is None for parameter in parameters.values()):
            raise RuntimeError(
                "fold() found no gradient: every parameter's .grad is None. Call loss.backward() "
                "first, and fold() once after each."
            )
        kept = [parameter.grad for parameter in parameters.values()]
        tally = self._current()
        engine = self._engine or Stream(self.model, parameters, tally, self._chooser.scaler)
        assert isinstance(engine, Stream)
        self._expect_same_parameters(engine)
        self._engine = engine
        names = names or tuple(range(tally.examples, tally.examples + size))
        try:
            microbatch = Microbatch(None, range(size), domain, names)
            mean_loss = None if loss is None else loss.detach().mean() / loss_scale
            gradients = take(parameters)
            if loss_scale != 1:
                gradients = {
                    name: gradient.to(accumulation_dtype(gradient)) / loss_scale
                    for name, gradient in gradients.items()
                }
            # their memory may be the user's, who may write the next gradients to it
            engine.add(gradients, microbatch, mean_loss, is_lent=loss_scale == 1)
        except BaseException as error:
            for parameter, gradient in zip(parameters.values(), kept, strict=True):
                parameter.grad = gradient
            self._abandon(error, final=False)
            raise

    def _current(self) -> Tally:
        if self._tally is None:
            self._look_around()
            if self._ddp is not None:  # by every rank, whether it has examples or not
                self._ddp.begin(self.step)
            self._tally = Tally(self.policy, self.step, self._ranks)
        return self._tally

    def _look_around(self) -> None:
        """Take note of other ranks, which may have come to be after this Clipper."""
        if self._outside is None and ranks_around() > 1 and not self._chooser.is_sharded:
            self._outside = Outside(self.model)
            self._collectives = Collectives(self.model)

    def _note_sizes(self, examples: int, final: bool) -> None:
        b = self.policy.microbatch_size
        if b is not None and final and examples < b:
            self._notes.append(
                f"microbatch_size {b} is larger than the batch of {examples}: one micro-batch."
            )
        elif b is not None and not final and examples % b:
            self._notes.append(
                f"A chunk of {examples} examples is no multiple of microbatch_size {b}: "
                "its last micro-batch is smaller."
            )

    def _abandon(self, error: BaseException, final: bool) -> None:
        """Forget a step that failed half way; what it had added up cannot be taken apart again."""
        if not final and self._tally is not None and len(self._tally):
            error.add_note(
                f"microclip: the {len(self._tally)} micro-batches folded since the last finish() "
                "were dropped; start this step anew."
            )
        self.discard()


def _check_budget(memory_budget: object) -> int | None:
    if memory_budget is None:
        return None
    if not isinstance(memory_budget, int) or isinstance(memory_budget, bool) or memory_budget <= 0:
        raise ValueError(
            f"memory_budget must be a positive number of bytes or None, but got {memory_budget!r}. "
            "For two gibibytes, say 2 * 2**30."
        )
    return memory_budget


def _check_verify(verify: object) -> Verify:
    if verify in ("rarely", "always", "never"):
        return cast("Verify", verify)
    if isinstance(verify, int) and not isinstance(verify, bool) and verify > 0:
        return verify
    raise ValueError(
        f'verify must be "rarely", "always", "never" or a positive number of steps, but got '
        f"{verify!r}."
    )


def _one_of(what: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{what} must be one of {choices}, but got {value!r}.")
