"""The engine: record, differentiate once, apply the rule, add up."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointError
from typing_extensions import override

from microclip.batches import copied, tensors_of
from microclip.engines.base import (
    MEAN_LOSS,
    CannotFuseError,
    Engine,
    MeanLossError,
    MismatchError,
)
from microclip.engines.gradients import (
    Gradients,
    LossFn,
    OutsideParameterCheck,
    backward,
    call,
    set_aside,
    take,
    unscale,
)
from microclip.engines.randomness import DropoutDisabled, Randomness
from microclip.engines.single_pass.checkpointing import DIFFERENT
from microclip.engines.single_pass.chunk import ChunkContributions
from microclip.engines.single_pass.contributions import Groups
from microclip.engines.single_pass.handlers import HANDLERS, vmap_fallback
from microclip.engines.single_pass.memory import (
    Budget,
    choose_materialized,
    keep_freed_memory,
    least_bytes,
)
from microclip.engines.single_pass.recorder import Recorder
from microclip.engines.single_pass.rounding import rounding_explains
from microclip.engines.single_pass.torch_functions import HostReads
from microclip.engines.single_pass.verify import (
    ALONE,
    FEW,
    TRIES,
    AutocastWatch,
    Verifier,
    draws_numbers,
    module_of,
)
from microclip.engines.stream import Sums
from microclip.microbatches import MicrobatchList
from microclip.user_warnings import warn
from microclip.wrappers import modules_of

# what torch says where recording gets in a model's way
FAILURES = {
    "saved tensor hooks": "The single-pass engine cannot look inside torch.func transforms.",
    "does not require grad and does not have": "The single-pass engine cannot follow gradients of "
    "parameters that are taken inside the forward pass.",
    "to not have been used in the graph": "The single-pass engine cannot follow losses that depend "
    "on gradients of parameters.",
}


class Fused(Engine):
    """Differentiates all examples of a chunk at once."""

    name = "fused"

    def __init__(self, *args: Any, budget: Budget, verifier: Verifier, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = budget
        self.verifier = verifier
        self._devices = {parameter.device for parameter in self.parameters.values()}
        self._began = False
        _check(self.model, self.parameters)
        if self.device.type == "cpu":
            keep_freed_memory()
        self._held: list[ChunkContributions] = []
        self._batches: list[MicrobatchList] = []  # whose rows are held
        self._sums = Sums(self.record)

    @property
    @override
    def expects_check(self) -> bool:
        return self.verifier.expects_check

    def fold(self, loss_fn: LossFn, microbatches: MicrobatchList, final: bool) -> None:
        """Differentiate the examples of all these micro-batches together, or in large chunks."""
        if not self._began:
            self._began = True
            self.verifier.begin()
        is_tight = self.budget.is_tight(microbatches, self.parameters)
        for chunk in self.budget.chunks(microbatches, self.parameters):
            found = self._visit(loss_fn, chunk, is_tight)
            self.side_effects.note_edits(chunk)
            if self.verifier.is_due(found.trail, len(chunk), found.is_doubtful):
                self._verify(loss_fn, chunk, found)
            self.record.extend(chunk, found.norms, found.means, found.losses)
            alone = final and len(chunk) == len(microbatches) == len(self.record)
            alone = alone and not self.record.wants_domain_norms  # which need a sum for each
            if alone or not self.record.policy.rule.streams:
                self._held.append(found.contributions)
                self._batches.append(chunk.as_it_is)
            else:
                self._add_up(found.contributions, found.norms, chunk)

    def _visit(self, loss_fn: LossFn, microbatches: MicrobatchList, is_tight: bool) -> _Pass:
        """One forward and one backward pass.

        Constants that seem to have one row per example are assumed to belong to the examples. Where
        that turns out wrong, batches of this size are done without the assumption.
        """
        if microbatches.examples in self.budget.without_adoption:
            return self._pass(loss_fn, microbatches, is_tight, False)
        is_new = microbatches.examples not in self.budget.with_adoption
        before = self.side_effects.snapshot(loss_fn) if is_new else None
        try:
            found = self._pass(loss_fn, microbatches, is_tight, True)
            self.budget.with_adoption.add(microbatches.examples)
            return found
        except _AdoptionError:
            # the pass that failed must leave no trace
            if before is not None:
                before.restore()
            if not microbatches.can_be_repeated:
                raise EditedBatchError from None
        found = self._pass(loss_fn, microbatches.pristine, is_tight, False)
        self.budget.without_adoption.add(microbatches.examples)
        return found

    def _pass(
        self, loss_fn: LossFn, microbatches: MicrobatchList, is_tight: bool, adopts: bool
    ) -> _Pass:
        groups = Groups(microbatches.sizes)
        batch = microbatches.whole
        examples = [leaf for _, leaf in tensors_of(batch)]
        how = is_tight, self.model, adopts, microbatches.batch_dim
        recorder = Recorder(self.parameters, groups, examples, HANDLERS, vmap_fallback, *how)
        with (
            set_aside(self.parameters),
            self.budget.learning(microbatches, self.parameters) as meter,
        ):
            contributions = ChunkContributions(recorder, meter)
            try:
                with recorder.metered(meter):
                    losses = call(recorder.watched(loss_fn), batch, groups.examples)
                    if losses.shape != (groups.examples,):
                        raise MeanLossError(MEAN_LOSS)
                    losses = recorder.in_order(losses)
                factors = microbatches.multipliers(losses)
                means = groups.means(losses if factors is None else losses * factors)
                is_new = self.verifier.is_new(recorder.tracker.trail)
                step = self.record.step
                if is_new or step & (step + 1) == 0:
                    OutsideParameterCheck(self.parameters, 0, len(groups), final=True).check(means)
                weights = recorder.weights_used_once()
                least = least_bytes(weights, groups)
                allowance = self.budget.to_keep(microbatches, self.parameters, least, meter)
                contributions.to_materialize = choose_materialized(weights, groups, allowance)
                recorder.is_final = True
                backward(means.sum(), self.scaler)
                contributions.complete(recorder)
            except RuntimeError as error:
                if isinstance(error, CheckpointError):
                    raise CannotFuseError(DIFFERENT) from error
                for words, reason in FAILURES.items():
                    if words in str(error):
                        raise CannotFuseError(reason) from error
                if isinstance(error, CannotFuseError) and adopts and recorder.adopted:
                    raise _AdoptionError from error
                raise
            finally:
                recorder.release()
        norms = unscale(contributions.norms(), self.scaler)
        tracker = recorder.tracker
        return _Pass(
            contributions,
            norms,
            means.detach() if factors is None else groups.means(losses.detach()),
            losses.detach(),
            trail=tracker.trail,
            reads=recorder.reads.values,
            by_place=tracker.by_place,
            is_doubtful=recorder.reads_of_several,
            has_dropout=tracker.has_dropout,
        )

    def _verify(self, loss_fn: LossFn, chunk: MicrobatchList, found: _Pass) -> None:
        """Compare one micro-batch's gradients with those it has when run alone.

        On the first batch the examples are shuffled, too. If random numbers are drawn, a separate
        pass is made with dropout disabled: over everything the first time, then over a few.
        """
        if len(chunk) == 1 or not bool(found.norms.isfinite().all()):
            return
        if not chunk.can_be_repeated:
            return  # loss_fn wrote to it for the first time; the next batch will be copied
        chunk = chunk.pristine
        after = self.side_effects.snapshot(loss_fn)
        is_random = found.has_dropout or draws_numbers(found.trail)
        rows = self.verifier.shuffled(len(chunk))
        compared = False
        try:
            if not is_random:
                order = list(range(len(chunk)))
                compared = self._compare(loss_fn, chunk, found, order, rows)
            if self.verifier.is_first or is_random:
                rows = rows[: max(FEW, len(rows) // 2) if self.verifier.is_first else FEW]
                self.verifier.spend(len(rows) / len(chunk))
                with DropoutDisabled() if is_random else nullcontext():
                    few = chunk.chosen(rows).keep_copy().pristine
                    again = self._visit(loss_fn, few, is_tight=False)
                    after.learn()
                    drawn = after.has_drawn()
                    compared |= self._compare(loss_fn, chunk, again, rows, rows[::-1], drawn)
            if found.is_doubtful and not compared:
                raise MismatchError(
                    "A single pass cannot be checked: the model reads values of several examples "
                    "on the host, so it may mix them, and it draws random numbers that cannot be "
                    "disabled, or its gradients are mostly rounding errors."
                )
        except (CannotFuseError, MismatchError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # from the model, which does not work on so few examples
            if "inplace operation" in str(error):  # which a single pass does not always notice
                raise
            self.verifier.how = "never"
            warn(
                "Single passes cannot be checked: run on a micro-batch alone, or on some of them "
                f"in another order, loss_fn fails with {error!r}."
            )
        finally:
            after.restore()

    def _compare(
        self,
        loss_fn: LossFn,
        chunk: MicrobatchList,
        found: _Pass,
        order: list[int],
        rows: list[int],
        drawn: bool = False,
    ) -> bool:
        """Differentiate micro-batches alone, and raise if a parameter's gradient differs.

        One is enough, unless this is the first step or the model selects examples by position.
        Another one follows if the model read values on the host and reads the same ones of the
        micro-batch alone (it has the longest example, say): then nothing is known about their use.

        Args:
            loss_fn: Returns the losses.
            chunk: All the micro-batches.
            found: A pass that had them in the given order.
            order: The micro-batches of that pass, in order.
            rows: Micro-batches to try.
            drawn: Whether that pass drew random numbers that could not be disabled.

        Returns:
            Whether the comparison was conclusive.
        """
        first = max(1, len(rows) // 4) if self.verifier.is_first else 1
        least = TRIES if found.by_place else first
        conclusive = False
        for tried, row in enumerate(rows[:TRIES], start=1):
            now = Randomness.now(self._devices)
            watch = AutocastWatch(self.model, {device.type for device in self._devices})
            reads = HostReads()
            with watch as autocast:
                batch = copied(chunk[row].batch)
                with found.contributions.compared(order.index(row), self.parameters) as comparison:
                    with reads:
                        loss = chunk[row].mean(call(loss_fn, batch, chunk[row].size))
                    backward(loss, self.scaler)
            suspect = comparison.suspect(autocast.seen)
            if drawn or now.moved(self._devices):
                return suspect is None  # a difference may come from the random numbers
            if suspect is not None:
                alone = partial(self._alone, loss_fn, chunk, row)
                if rounding_explains(comparison, alone, autocast.seen):
                    continue  # nothing is known
                raise MismatchError(
                    "A single pass disagrees with the gradient of a micro-batch run alone, most "
                    f"clearly for parameter {suspect!r}{module_of(self.model, suspect)}: the model "
                    "seems to mix examples, or to change from call to call."
                )
            conclusive = True
            self.verifier.spend(ALONE / len(chunk))
            if tried >= least and not (found.reads and reads.values == found.reads):
                break
        return conclusive

    def _alone(self, loss_fn: LossFn, chunk: MicrobatchList, row: int) -> Gradients:
        """Return the gradients of a micro-batch run alone."""
        with set_aside(self.parameters):
            loss = chunk[row].mean(call(loss_fn, copied(chunk[row].batch), chunk[row].size))
            backward(loss, self.scaler)
            return take(self.parameters)

    @torch.no_grad()
    def _add_up(
        self, contributions: ChunkContributions, norms: Tensor, microbatches: MicrobatchList
    ) -> None:
        """Add up a chunk's gradients, so that nothing of it has to be kept."""
        if self.record.policy.nonfinite != "propagate":
            contributions.leave_out(~norms.isfinite())
        domains = list(dict.fromkeys(microbatches.domains))
        sizes = norms.new_tensor(microbatches.effective_sizes)
        for domain in domains:
            here = torch.tensor([d == domain for d in microbatches.domains], device=norms.device)
            sum_ = self._sums.of(domain)
            shares = self._sums.shares(norms, sizes).masked_fill(~here, torch.nan)
            multiples = sum_.multiples(shares, norms) * here
            last = domain == domains[-1]
            contributions.add_to(sum_.gradients, multiples, self.parameters, last)

    @torch.no_grad()
    def finish(self) -> Gradients:
        """Add up the gradients, now that the share of each is known."""
        if not self._held:
            return self._sums.finish()
        if any(batch.were_edited for batch in self._batches):
            raise RuntimeError(
                "A batch was written to between fold() and finish(), but its rows are part of "
                "gradients that have not been added up yet. Fold a copy (batch.clone()), or finish "
                "before reusing the memory."
            )
        rows = self.record.leave_out()
        coefficients = self.record.coefficients()
        if rows:
            left_out = torch.zeros_like(coefficients, dtype=torch.bool)
            left_out[rows] = True
        total: Gradients = {}
        start = 0
        for contributions in self._held:
            stop = start + len(contributions.groups)
            if rows:
                contributions.leave_out(left_out[start:stop])
            contributions.add_to(total, coefficients[start:stop], self.parameters, last=True)
            start = stop
        return total


@dataclass(frozen=True)
class _Pass:
    """The result of a forward and a backward pass."""

    contributions: ChunkContributions
    norms: Tensor
    means: Tensor  # of the losses of each micro-batch
    losses: Tensor
    trail: set[Any]  # which operation came after which
    reads: list[Any]  # values that the model read on the host
    by_place: bool  # whether it selected examples by their position in the batch
    is_doubtful: bool  # whether it read values that depend on several examples
    has_dropout: bool  # in attention, where no other operation shows it


class EditedBatchError(RuntimeError):
    """loss_fn wrote to its batch before a pass that has to be repeated."""

    def __init__(self) -> None:
        super().__init__(
            "loss_fn modified its batch in place, and the step has to be repeated on the original "
            "batch. Let loss_fn work on a copy (batch.clone()), or repeat the step."
        )


class _AdoptionError(Exception):
    """A constant may have been wrongly assumed to belong to the examples."""


def _check(model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse what is known not to work, before any work is done."""
    for module in modules_of(model):
        if isinstance(module, _BatchNorm) and module.training:
            name = next(name for name, found in model.named_modules() if found is module)
            raise CannotFuseError(
                f"Module {name!r} is a {type(module).__name__} in training mode, which mixes "
                "examples; the single-pass engine would mix micro-batches. Use GroupNorm or "
                'LayerNorm, or engine="stream".'
            )
    for name, parameter in parameters.items():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CannotFuseError(
                f"Parameter {name!r} has a hook, which would not see the gradients of individual "
                'micro-batches in a single pass. Remove it or use engine="stream".'
            )
