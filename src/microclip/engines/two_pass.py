"""The two-pass engine: norms first, without keeping a gradient; then the weighted sum.

In both passes a hook takes every parameter's gradient as soon as autograd has it: the first pass
computes its norm and drops it, the second adds weight x gradient to what becomes `.grad`. So there
is never a second buffer of the model's size, and any rule works, at the price of a second forward
and backward pass. The weight multiplies the gradient, not the loss: scaling the loss would make
models that compute partly in lower precision round differently in the two passes.

The second pass starts from a snapshot of everything that the first one changed, and its losses and
norms are compared with the first. If they differ, the norms belong to other gradients: an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from microclip import multitensor
from microclip.engines.base import Engine
from microclip.engines.gradients import (
    Gradients,
    LossFn,
    OutsideParameterCheck,
    TakenGradientError,
    add_multiple,
    backward,
    evaluate,
    gradient_hooks,
    set_aside,
    take,
    unscale,
)
from microclip.engines.randomness import Randomness, RandomState
from microclip.engines.snapshot import Snapshot
from microclip.microbatches import Microbatch, MicrobatchList

# how much a loss or norm may differ between passes: kernels may sum in another order
SAME = {torch.float64: 1e-9, torch.float32: 1e-4}
SAME_ROUNDED = 2e-2  # in half precision, or under autocast


class PassesDifferError(RuntimeError):
    """The second pass over a micro-batch gave a different gradient than the first."""


@dataclass(frozen=True)
class _Visit:
    """What the second pass over a micro-batch needs from the first."""

    loss_fn: LossFn
    microbatch: Microbatch
    random_state: RandomState
    autocast: _Autocast
    before: Snapshot | None  # only for the first micro-batch of a fold
    loss: Tensor
    norm: Tensor


class TwoPass(Engine):
    """Runs every micro-batch twice."""

    name = "two_pass"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._devices = {parameter.device for parameter in self.parameters.values()}
        self._visits: list[_Visit] = []
        self._touched: set[str] = set()
        self._loss_fns: list[LossFn] = []
        self._is_whole = False  # whether the step is one batch, folded and finished at once
        self._at_work = False  # whether this engine runs the current backward pass

    def fold(self, loss_fn: LossFn, microbatches: MicrobatchList, final: bool) -> None:
        """First pass: compute the norms of these micro-batches."""
        norms: dict[str, Tensor] = {}

        def take_norm(name: str, gradient: Tensor) -> None:
            if name in norms:
                raise NotImplementedError(
                    f"Autograd delivered the gradient of parameter {name!r} in several parts, as "
                    "reentrant checkpointing does for a shared parameter, so its norm cannot be "
                    'computed without keeping it. Use engine="stream" or use_reentrant=False.'
                )
            norms[name] = multitensor.norm([gradient], gradient.device)

        self._expect_no_doubts()
        self._is_whole = final
        # for every fold: the user may change things in between
        before: Snapshot | None = self.side_effects.in_every_step(loss_fn)
        if not any(known is loss_fn for known in self._loss_fns):
            self._loss_fns.append(loss_fn)
        outside = OutsideParameterCheck(self.parameters, self.record.step, len(microbatches), final)
        # the first pass gets the copy, so that the batch ends up as after a single pass
        first = microbatches.pristine
        with set_aside(self.parameters), self._each_gradient(take_norm):
            for microbatch, original in zip(first, microbatches, strict=True):
                state, autocast = RandomState.now(self._devices), _Autocast.now(self._devices)
                loss, each = evaluate(loss_fn, microbatch)
                outside.check(loss)
                if each is None:
                    self.record.on_loss(loss, microbatch.size)
                self._differentiate(loss, take_norm)
                norm = unscale(multitensor.join(norms.values(), self.device), self.scaler)
                self.record.add(microbatch, norm, loss.detach(), each)
                self._touched.update(norms)
                norms.clear()
                found = loss.detach(), norm
                visit = _Visit(loss_fn, original, state, autocast, before, *found)
                self._visits.append(visit)
                before = None
        self.side_effects.note_edits(microbatches)

    def finish(self) -> Gradients:
        """Second pass: add up the gradients, with coefficients that are now known."""
        coefficients = self.record.coefficients()
        left_out = set(self.record.leave_out())
        sums: Gradients = {}
        firsts = [visit.before for visit in self._visits if visit.before is not None]
        for before in firsts:
            before.learn()
        # a second pass over one batch ends in the same state as the first; after a fold, the user
        # may have changed something since
        after = None if self._is_whole else self.side_effects.in_every_step(*self._loss_fns)
        randomness = Randomness.now(self._devices)
        comparison = _Comparison(self.record.step, len(self._visits))
        norms: list[Tensor] = []
        share: Tensor | None = None

        def add(name: str, gradient: Tensor) -> None:
            if comparison.is_due:
                norms.append(multitensor.norm([gradient], gradient.device))
            if name not in sums:  # which keeps it, while autograd may reuse its memory
                gradient = gradient.clone()
            assert share is not None
            add_multiple(sums, {name: gradient}, share)

        try:
            with set_aside(self.parameters), self._each_gradient(add):
                for row, visit in enumerate(self._visits):
                    loss = self._run_again(visit, comparison)
                    if row in left_out:  # run only for its side effects
                        continue
                    share = coefficients[row]
                    comparison.add("loss", visit.loss, loss.detach())
                    self._differentiate(loss, add)
                    if comparison.is_due:
                        norm = unscale(multitensor.join(norms, self.device), self.scaler)
                        comparison.add("norm of its gradient", visit.norm, norm)
                    norms.clear()
            self.side_effects.doubts = comparison.pending
        except PassesDifferError as error:
            if after is None:  # back to before the step
                firsts[0].restore()
            for place in sorted(set().union(*(before.unforeseen() for before in firsts))):
                error.add_note(f"microclip: the forward pass writes to {place}.")
            self.side_effects.look_again()
            raise
        finally:
            # random states and side effects were already advanced by the first pass
            if after is not None:
                after.restore()
            randomness.restore()
        for name in self._touched - set(sums):  # every micro-batch that uses it was skipped
            zero = torch.zeros_like(self.parameters[name])
            sums[name] = torch.view_as_real(zero) if zero.is_complex() else zero
        return sums

    def _run_again(self, visit: _Visit, comparison: _Comparison) -> Tensor:
        """Return the loss of a micro-batch, starting from the same state as the first pass."""
        if visit.before is not None:
            visit.before.restore()
        visit.random_state.restore()
        with visit.autocast.again():
            loss, _ = evaluate(visit.loss_fn, visit.microbatch)
        comparison.begin(visit.microbatch, visit.autocast.is_on)
        return loss

    def _differentiate(self, loss: Tensor, receive: Callable[[str, Tensor], None]) -> None:
        """Differentiate, with hooks in place that pass every gradient to `receive`.

        If `loss_fn` has run a backward pass itself, what is in `.grad` is passed on as well.
        """
        self._at_work = True
        try:
            backward(loss, self.scaler)
        finally:
            self._at_work = False
        with torch.no_grad():
            for name, gradient in take(self.parameters).items():
                receive(name, gradient)

    def _each_gradient(
        self, receive: Callable[[str, Tensor], None]
    ) -> AbstractContextManager[None]:
        """Inside the block, pass every gradient to `receive` instead of keeping it in `.grad`."""

        def hook_for(name: str) -> Callable[[nn.Parameter], None]:
            @torch.no_grad()
            def hook(parameter: nn.Parameter) -> None:
                if not self._at_work:
                    return
                if parameter.grad is None:
                    raise TakenGradientError(name)
                for gradient in take({name: parameter}).values():
                    receive(name, gradient)

            return hook

        return gradient_hooks(self.parameters, hook_for)

    def _expect_no_doubts(self) -> None:
        """Raise if the previous step turned out wrong, which was not read until now."""
        doubts, self.side_effects.doubts = self.side_effects.doubts, []
        if not doubts:
            return
        same = torch.stack([each.to(self.device) for each, _ in doubts])
        if not bool(same.all()):  # one read, however many there are
            _, message = doubts[same.tolist().index(False)]
            raise PassesDifferError(message)


class _Autocast:
    """The autocast settings, by device type."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self._settings = [
            (k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in kinds
        ]
        self.is_on = any(enabled for _, _, enabled in self._settings)

    @classmethod
    def now(cls, devices: set[torch.device]) -> _Autocast:
        """Read the current settings."""
        return cls(tuple(sorted({device.type for device in devices})))

    def again(self) -> AbstractContextManager[None]:
        """Inside the block, these settings apply again."""
        if not self.is_on and not any(torch.is_autocast_enabled(k) for k, _, _ in self._settings):
            return nullcontext()
        return self._set()

    @contextmanager
    def _set(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype, enabled in self._settings:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield


@dataclass
class _Comparison:
    """Compares the second pass with the first.

    Losses are always compared; norms of all micro-batches at steps 0, 1, 3, 7, ..., and of one
    micro-batch at other steps. On accelerators, all results are read at once, in the next step.
    """

    step: int
    visits: int
    _row: int = -1
    _rounded: bool = False
    _microbatch: Microbatch | None = None
    pending: list[tuple[Tensor, str]] = field(default_factory=list)

    def begin(self, microbatch: Microbatch, rounded: bool) -> None:
        """Move on to the next micro-batch."""
        self._row += 1
        self._microbatch, self._rounded = microbatch, rounded

    @property
    def is_due(self) -> bool:
        """Whether to compare the norms of this micro-batch."""
        return self.step & (self.step + 1) == 0 or self._row == self.step % self.visits

    def add(self, what: str, first: Tensor, second: Tensor) -> None:
        """Compare a number from both passes."""
        tolerance = SAME.get(first.dtype, SAME_ROUNDED)
        if what != "loss":  # norms are float64, of gradients that are not
            tolerance = SAME[torch.float32]
        tolerance = SAME_ROUNDED if self._rounded else tolerance
        if multitensor.on_host(first):
            one, other = first.item(), second.item()
            same = one == other or math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-12)
            if not same and not (math.isnan(one) and math.isnan(other)):
                raise PassesDifferError(self._message(what, one, other))
            return
        close = torch.isclose(first, second, rtol=tolerance, atol=1e-12, equal_nan=True)
        self.pending.append((close, self._message(what)))

    def _message(self, what: str, one: float = math.nan, other: float = math.nan) -> str:
        assert self._microbatch is not None
        ids = ", ".join(map(repr, self._microbatch.ids[:8]))
        values = "" if math.isnan(one) else f" ({one:.9g}, then {other:.9g})"
        return (
            f"Step {self.step}: the two passes over the micro-batch of examples {ids} gave "
            f"different values for the {what}{values}, so the gradient is not the one whose norm "
            "was computed. loss_fn depends on something that changes from call to call and cannot "
            "be restored (a custom object, a file, a generator). Use a rule and an engine that "
            'need one pass (engine="stream").'
        )
