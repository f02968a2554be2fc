"""The engine: record, differentiate once, ask the rule, add up."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from microclip import multitensor
from microclip.engines.base import (
    MEAN_LOSS,
    CannotFuseError,
    Engine,
    MeanLossError,
    MismatchError,
)
from microclip.engines.gradients import Gradients, add_multiple, modules_of, set_aside
from microclip.engines.losses import LossFn, Outsiders, backward, call, unscale
from microclip.engines.randomness import Randomness
from microclip.engines.single_pass.allocator import hold_on_to_freed_memory
from microclip.engines.single_pass.anything import anything
from microclip.engines.single_pass.budget import Budget, Meter
from microclip.engines.single_pass.formed import Formed, Joined, Use
from microclip.engines.single_pass.groups import Groups, Shares
from microclip.engines.single_pass.layers import HANDLERS
from microclip.engines.single_pass.plan import least_to_keep, to_write_out
from microclip.engines.single_pass.record import HostReads, Recorder
from microclip.engines.single_pass.uses import merged, squared_norms, sum_of
from microclip.engines.single_pass.verify import (
    ALONE,
    FEW,
    TRIES,
    AutocastWatch,
    Comparison,
    Verifier,
    draws_numbers,
    module_of,
)
from microclip.engines.stillness import Still
from microclip.engines.sums import Sums
from microclip.microbatches import Cuts, copied, tensors_of

# Norms come from products of up to four numbers of float32. Between these they are right.
SMALLEST, LARGEST = 1e-10, 1e16

# what torch says where the engine's way of recording is in a model's way
FAILURES = {
    "saved tensor hooks": "The single-pass engine cannot look into transforms of torch.func.",
    "does not require grad and does not have": "The single-pass engine cannot follow gradients of "
    "parameters that are taken inside the forward pass.",
    "to not have been used in the graph": "The single-pass engine cannot follow losses that are "
    "made of gradients of parameters.",
}


class Fused(Engine):
    """Visits all examples of a chunk at once."""

    name = "fused"

    def __init__(self, *args: Any, budget: Budget, verifier: Verifier, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = budget
        self.verifier = verifier
        self._devices = {parameter.device for parameter in self.parameters.values()}
        self._began = False
        _check(self.model, self.parameters)
        if self.device.type == "cpu":
            hold_on_to_freed_memory()
        self._held: list[_Uses] = []
        self._batches: list[Cuts] = []  # whose rows are held
        self._sums = Sums(self.tally)

    def fold(self, loss_fn: LossFn, microbatches: Cuts, final: bool) -> None:
        """Differentiate the examples of all these micro-batches together, or of large chunks."""
        if not self._began:
            self._began = True
            self.verifier.begin()
        is_tight = self.budget.is_tight(microbatches, self.parameters)
        for chunk in self.budget.chunks(microbatches, self.parameters):
            found = self._visit(loss_fn, chunk, is_tight)
            self.memory.note_edits(chunk)
            if self.verifier.is_due(found.trail, len(chunk), found.is_doubtful):
                self._verify(loss_fn, chunk, found)
            self.tally.extend(chunk, found.norms, found.means, found.losses)
            alone = final and len(chunk) == len(microbatches) == len(self.tally)
            if alone or not self.tally.policy.rule.streams:
                self._held.append(found.uses)
                self._batches.append(chunk.as_it_is)
            else:
                self._settle(found.uses, found.norms, chunk)

    def _visit(self, loss_fn: LossFn, microbatches: Cuts, is_tight: bool) -> _Pass:
        """One forward and one backward pass.

        Constants that seem to have a row for each example are taken for theirs. Where that turns
        out to be a mistake, batches of this size are done without.
        """
        if microbatches.examples in self.budget.without_adoption:
            return self._pass(loss_fn, microbatches, is_tight, False)
        is_new = microbatches.examples not in self.budget.with_adoption
        before = self.memory.snapshot(loss_fn) if is_new else None
        try:
            found = self._pass(loss_fn, microbatches, is_tight, True)
            self.budget.with_adoption.add(microbatches.examples)
            return found
        except _AdoptionError:
            # the pass that is repeated must leave no trace
            if before is not None:
                before.restore()
            if not microbatches.can_be_repeated:
                raise EditedBatchError from None
        found = self._pass(loss_fn, microbatches.pristine, is_tight, False)
        self.budget.without_adoption.add(microbatches.examples)
        return found

    def _pass(self, loss_fn: LossFn, microbatches: Cuts, is_tight: bool, adopts: bool) -> _Pass:
        groups = Groups(microbatches.sizes)
        batch = microbatches.whole
        examples = [leaf for _, leaf in tensors_of(batch)]
        how = is_tight, self.model, adopts, microbatches.batch_dim
        recorder = Recorder(self.parameters, groups, examples, HANDLERS, anything, *how)
        with (
            set_aside(self.parameters),
            self.budget.learning(microbatches, self.parameters) as meter,
        ):
            uses = _Uses(recorder, meter)
            try:
                with recorder.metered(meter):
                    losses = call(recorder.watched(loss_fn), batch, groups.examples)
                    if losses.shape != (groups.examples,):
                        raise MeanLossError(MEAN_LOSS)
                    losses = recorder.in_order(losses)
                means = groups.means(losses)
                is_new = self.verifier.is_new(recorder.tracker.trail)
                step = self.tally.step
                if is_new or step & (step + 1) == 0:
                    Outsiders(self.parameters, 0, len(groups), final=True).check(means)
                weights = recorder.weights_used_once()
                least = least_to_keep(weights, groups)
                allowance = self.budget.to_keep(microbatches, self.parameters, least, meter)
                uses.written_out = to_write_out(weights, groups, allowance)
                recorder.is_final = True
                backward(means.sum(), self.scaler)
                uses.complete(recorder)
            except RuntimeError as error:
                for words, reason in FAILURES.items():
                    if words in str(error):
                        raise CannotFuseError(reason) from error
                if isinstance(error, CannotFuseError) and adopts and recorder.adopted:
                    raise _AdoptionError from error
                raise
            finally:
                recorder.let_go()
        norms = unscale(uses.norms(), self.scaler)
        tracker = recorder.tracker
        return _Pass(
            uses,
            norms,
            means.detach(),
            losses.detach(),
            trail=tracker.trail,
            reads=recorder.reads.values,
            by_place=tracker.by_place,
            is_doubtful=recorder.reads_of_several,
            has_dropout=tracker.has_dropout,
        )

    def _verify(self, loss_fn: LossFn, chunk: Cuts, found: _Pass) -> None:
        """Compare one micro-batch's gradients with those that it has alone.

        On the first batch the examples are shuffled, too. Where random numbers are drawn, a pass
        of its own is made with dropout held still: of everything the first time, then of a few.
        """
        if len(chunk) == 1 or not bool(found.norms.isfinite().all()):
            return
        if not chunk.can_be_repeated:
            return  # loss_fn has written to it, for the first time: the next one will be copied
        chunk = chunk.pristine
        after = self.memory.snapshot(loss_fn)
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
                with Still() if is_random else nullcontext():
                    few = chunk.chosen(rows).keep_copy().pristine
                    again = self._visit(loss_fn, few, is_tight=False)
                    after.learn()
                    drawn = after.has_drawn()
                    compared |= self._compare(loss_fn, chunk, again, rows, rows[::-1], drawn)
            if found.is_doubtful and not compared:
                raise MismatchError(
                    "A single pass cannot be checked: the model looks at values of several "
                    "examples on the host, by which it may mix them, and draws random numbers that "
                    "cannot be held still."
                )
        except (CannotFuseError, MismatchError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of the model's, which cannot do with so few examples
            if "inplace operation" in str(error):  # which a single pass does not notice always
                raise
            self.verifier.how = "never"
            warnings.warn(
                f"Single passes cannot be checked: a micro-batch alone makes loss_fn fail with "
                f"{error!r}.",
                RuntimeWarning,
                stacklevel=6,
            )
        finally:
            after.restore()

    def _compare(
        self,
        loss_fn: LossFn,
        chunk: Cuts,
        found: _Pass,
        order: list[int],
        rows: list[int],
        drawn: bool = False,
    ) -> bool:
        """Differentiate a micro-batch alone, and raise if a parameter's gradient is another.

        Return whether anything could be said.

        One is enough, unless this is the first step, or the model chooses examples by their place.
        Another one follows as well if the model looked at values, and they are the same of the
        micro-batch alone (it has the longest example, say), which tells nothing of their use.

        Args:
            loss_fn: Gives the losses.
            chunk: All the micro-batches.
            found: A pass that had them in this order.
            order: See there.
            rows: Micro-batches to try.
            drawn: Whether that pass drew random numbers that could not be held still.
        """
        first = max(1, len(rows) // 4) if self.verifier.is_first else 1
        least = TRIES if found.by_place else first
        for tried, row in enumerate(rows[:TRIES], start=1):
            now = Randomness.now(self._devices)
            watch = AutocastWatch({device.type for device in self._devices})
            with watch as autocast, HostReads() as reads:
                batch = copied(chunk[row].batch)
                with found.uses.compared(order.index(row), self.parameters) as comparison:
                    backward(call(loss_fn, batch, chunk[row].size).mean(), self.scaler)
            suspect = comparison.suspect(autocast.seen)
            if drawn or now.moved(self._devices):
                return suspect is None  # a difference may be that of the numbers
            if suspect is not None:
                raise MismatchError(
                    "A single pass disagrees with the gradient of a micro-batch run alone, most of "
                    f"all for parameter {suspect!r}{module_of(self.model, suspect)}: the model "
                    "seems to mix examples, or to change from call to call."
                )
            self.verifier.spend(ALONE / len(chunk))
            if tried >= least and not (found.reads and reads.values == found.reads):
                break
        return True

    @torch.no_grad()
    def _settle(self, uses: _Uses, norms: Tensor, microbatches: Cuts) -> None:
        """Add a chunk's gradients up, so that nothing of it needs to be kept."""
        if self.tally.policy.nonfinite != "propagate":
            uses.leave_out(~norms.isfinite())
        domains = list(dict.fromkeys(microbatches.domains))
        for domain in domains:
            here = torch.tensor([d == domain for d in microbatches.domains], device=norms.device)
            sizes = uses.groups.sizes_like(norms)
            sum_ = self._sums.of(domain)
            shares = self._sums.shares(norms, sizes).masked_fill(~here, torch.nan)
            multiples = sum_.multiples(shares, norms) * here
            uses.add_to(sum_.gradients, multiples, self.parameters, last=domain == domains[-1])

    @torch.no_grad()
    def finish(self) -> Gradients:
        """Add up what is now known to be each gradient's share."""
        if not self._held:
            return self._sums.finish()
        if any(batch.were_edited for batch in self._batches):
            raise RuntimeError(
                "A batch was written to between fold() and finish(), while its rows are part of "
                "gradients that are not added up yet. Fold a copy (batch.clone()), or finish "
                "before the memory is used again."
            )
        rows = self.tally.leave_out()
        coefficients = self.tally.coefficients()
        if rows:
            left_out = torch.zeros_like(coefficients, dtype=torch.bool)
            left_out[rows] = True
        total: Gradients = {}
        start = 0
        for uses in self._held:
            stop = start + len(uses.groups)
            if rows:
                uses.leave_out(left_out[start:stop])
            uses.add_to(total, coefficients[start:stop], self.parameters, last=True)
            start = stop
        return total


@dataclass(frozen=True)
class _Pass:
    """What a forward and a backward pass have found."""

    uses: _Uses
    norms: Tensor
    means: Tensor  # of the losses of each micro-batch
    losses: Tensor
    trail: set[Any]
    reads: list[Any]  # values that the model looked at
    by_place: bool  # whether it chose examples by their place in the batch
    is_doubtful: bool  # whether it looked at what depends on several examples
    has_dropout: bool  # in attention, where no other operation shows it


class _Uses:
    """All that a backward pass delivered of a chunk; norms are taken as soon as they can be."""

    def __init__(self, recorder: Recorder, meter: Meter | None) -> None:
        self._meter = meter
        self.groups = recorder.groups
        self.device = recorder.anchor.device
        self._expected = recorder.expected
        self._derived = recorder.derived
        self._parameters = recorder.parameters
        self._of: dict[str, list[Use]] = {}
        self._small: dict[str, Formed] = {}  # the only uses of small parameters
        self._joined: Joined | None = None
        self._squares: dict[str, Tensor] = {}
        self.written_out: set[str] = set()  # parameters whose gradients are to be
        recorder.on_use = self.add

    def add(self, name: str, use: Use) -> None:
        """Take note of a use; with a parameter's last one its norms are known.

        Called from within the backward pass, so nothing here is recorded by autograd.
        """
        uses = self._of.setdefault(name, [])
        last = len(uses) + 1 == self._expected[name] and name not in self._derived
        if name in self.written_out:
            use = use.written_out(self.groups)
        use = use.kept(self.groups)
        uses.append(use)
        if self._meter:
            self._meter.keep(use.nbytes)
        if last:
            self._judge(name, uses)

    def _judge(self, name: str, uses: list[Use]) -> None:
        """Take the norms of a parameter whose uses are all there, or leave it to the others."""
        only = uses[0] if len(uses) == 1 else None
        if isinstance(only, Formed) and Joined.takes(only, self.device):
            self._small[name] = only
        else:
            uses[:] = merged(uses)
            self._squares[name] = squared_norms(uses, self.groups)

    @torch.no_grad()
    def complete(self, recorder: Recorder) -> None:
        """Follow derived tensors back, and make sure that nothing went past the recorder."""
        recorder.check_nothing_unseen()
        for origin, uses in recorder.pulled_back(self._of).items():
            self._of.setdefault(origin, []).extend(uses)
            self._squares.pop(origin, None)
            self._small.pop(origin, None)
        for name, uses in self._of.items():
            if name not in self._squares and name not in self._small:
                self._judge(name, uses)
        if self._small:
            self._joined = Joined(self._small)
            self._squares["small ones"] = self._joined.squared_norms(self.groups)
            self._of = {name: uses for name, uses in self._of.items() if name not in self._small}
        if not self._squares:
            raise CannotFuseError(
                "The single-pass engine saw no parameter take part in the losses."
            )

    @torch.no_grad()
    def norms(self) -> Tensor:
        """Return the norm of every micro-batch's gradient over all parameters."""
        found = [_on(self.device, squares) for squares in self._squares.values()]
        wide = multitensor.widest(self.device)
        total = found[0].to(wide) if len(found) == 1 else torch.stack(found).sum(0, dtype=wide)
        norms = total.clamp(min=0).sqrt()
        return self._with_exact_ends(norms) if multitensor.on_host(norms) else norms

    def _with_exact_ends(self, norms: Tensor) -> Tensor:
        """Take norms again that are so small or large that squares may have lost them."""
        doubtful = [j for j, n in enumerate(norms.tolist()) if not SMALLEST < n < LARGEST]
        if not doubtful:
            return norms
        if any(norms[j] == 0 for j in doubtful):  # most likely they are
            parts = [use.touched(self.groups) for uses in self._of.values() for use in uses]
            parts += [self._joined.touched(self.groups)] if self._joined else []
            touched = torch.stack([_on(self.device, part) for part in parts]).any(0).tolist()
            doubtful = [j for j in doubtful if touched[j]]
        for j in doubtful:
            gradients = list(self._of_one(j).values())
            norms[j] = multitensor.join(
                [multitensor.norm([each], each.device) for each in gradients], self.device
            )
        return norms

    def _of_one(self, microbatch: int) -> Gradients:
        """Return one micro-batch's gradients; complex ones as pairs of real numbers."""
        found = {} if self._joined is None else self._joined.of_one(microbatch)
        for name in self._of:
            gradient = self._gradient(name, microbatch)
            found[name] = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        return found

    def _gradient(self, name: str, microbatch: int) -> Tensor:
        uses = self._of[name]
        shape = self._parameters[name].shape
        return sum_of([use.of_one(self.groups, microbatch).reshape(shape) for use in uses])

    @contextmanager
    def compared(
        self, microbatch: int, parameters: dict[str, nn.Parameter]
    ) -> Iterator[Comparison]:
        """Compare a micro-batch's gradients with what a backward pass inside the block brings.

        Each is dropped as soon as it has been looked at, so that a check takes no memory.
        """
        comparison = Comparison()
        small = {} if self._joined is None else self._joined.of_one(microbatch)

        def mine(name: str) -> Tensor | None:
            return self._gradient(name, microbatch) if name in self._of else small.get(name)

        def compare(name: str) -> Callable[[nn.Parameter], None]:
            def hook(parameter: nn.Parameter) -> None:
                comparison.add(name, mine(name), parameter.grad)
                parameter.grad = None

            return hook

        handles = [
            parameter.register_post_accumulate_grad_hook(compare(name))  # type: ignore[no-untyped-call]
            for name, parameter in parameters.items()
        ]
        try:
            with set_aside(parameters):
                yield comparison
        finally:
            for handle in handles:
                handle.remove()
        for name in (*small, *self._of):
            if name not in comparison:
                comparison.add(name, mine(name), None)

    def leave_out(self, left_out: Tensor) -> None:
        """Blank the micro-batches that are not to count."""
        shares = self.groups.shares(left_out)
        for name, uses in self._of.items():
            self._of[name] = [use.without(shares) for use in uses]
        if self._joined:
            self._joined.leave_out(shares)

    def add_to(
        self,
        total: Gradients,
        coefficients: Tensor,
        parameters: dict[str, nn.Parameter],
        last: bool,
    ) -> None:
        """Add sum_j coefficient_j g_j; complex gradients as pairs of real numbers.

        The last time, what was kept of a parameter is let go as soon as its sum is there, so that
        the sums can take its place.
        """
        if multitensor.on_host(coefficients) and any(
            map(multitensor.is_extreme, coefficients.tolist())
        ):
            for microbatch, coefficient in enumerate(coefficients):
                add_multiple(total, self._of_one(microbatch), coefficient, keeps=False)
            return
        shares = self.groups.shares(coefficients)
        if self._joined:
            self._joined.add_to(total, shares)
        for name in reversed(list(self._of)):  # the last ones may still be in the caches
            uses = self._of.pop(name) if last else self._of[name]
            total[name] = self._added(total.get(name), uses, shares, parameters[name])

    def _added(
        self, found: Tensor | None, uses: list[Use], shares: Shares, parameter: nn.Parameter
    ) -> Tensor:
        """Return a parameter's total with these uses added."""
        if found is not None and parameter.is_complex():
            found = torch.view_as_complex(found)
        for use in uses:
            so_far = None if found is None else found.view(use.shape)
            found = use.add_to(so_far, shares)
        assert found is not None
        if found.shape != parameter.shape:
            found = found.view(parameter.shape)
        return torch.view_as_real(found) if found.is_complex() else found


class EditedBatchError(RuntimeError):
    """loss_fn wrote to its batch before a pass that has to be repeated."""

    def __init__(self) -> None:
        super().__init__(
            "loss_fn wrote to its batch in place, and the step has to be repeated on the batch as "
            "it was. Let loss_fn work on a copy (batch.clone()) or repeat the step."
        )


class _AdoptionError(Exception):
    """A constant that was taken for the examples' may not have been."""


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor if tensor.device == device else tensor.to(device)


def _check(model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse what is known to go wrong, before any work is done."""
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
                f"Parameter {name!r} has a hook, which would not see the gradients of single "
                'micro-batches in a single pass. Remove it or use engine="stream".'
            )
