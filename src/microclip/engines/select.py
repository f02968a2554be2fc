"""Selecting the engine for a step; with "auto", by a trial on a real batch.

The trial checks whether a single pass is exact and faster, and its result is remembered for batches
of a similar size. The single-pass engine is imported on first use: it would make up most of the
cost of `import microclip`. Sharded models bring their own engines (`ShardedEngines`).
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn
from torch.amp import GradScaler

from microclip.engines.base import (
    MEAN_LOSS,
    CannotFuseError,
    Engine,
    MeanLossError,
    MismatchError,
    ShardedEngines,
)
from microclip.engines.gradients import Gradients, LossFn, name_of, trainable
from microclip.engines.randomness import DropoutDisabled
from microclip.engines.snapshot import SideEffects, Snapshot
from microclip.engines.step_record import Policy, StepRecord
from microclip.engines.stream import Stream
from microclip.engines.two_pass import TwoPass
from microclip.microbatches import MicrobatchList
from microclip.rules import Rule
from microclip.user_warnings import warn

if TYPE_CHECKING:
    from microclip.engines.single_pass.verify import AutocastWatch, Verify

EngineName = Literal["auto", "stream", "two_pass", "fused"]
ENGINES: tuple[str, ...] = get_args(EngineName)
Scope = Literal["rank", "world"]
SCOPES: tuple[str, ...] = get_args(Scope)

# Of a trial.
UNDECIDED = (
    "Rounding decides about the gradient of the first batch, so a comparison with it proves "
    'nothing, and verify="never" rules out later ones.'
)
NOT_FINITE = "The first gradients are not finite, so nothing could be compared yet."
ROUNDS = 3  # the first warms up, the others count
MORE_ROUNDS = 6  # while the race is close:
CLOSE = 1.3  # one is at most this much faster,
PATIENCE = 20.0  # and no more than this many seconds have passed

logger = logging.getLogger("microclip")


def check(name: EngineName, rule: Rule) -> None:
    """Refuse an engine that cannot work with the rule."""
    if name == "stream" and not rule.streams:
        raise ValueError(
            f'{rule!r} needs all norms before it can weight any gradient, but engine="stream" does '
            'not have them. Use engine="two_pass" or "auto"'
            + (", or rescale=True." if hasattr(rule, "rescale") else ".")
        )


@dataclass(frozen=True)
class EngineReport:
    """Which engine `engine="auto"` uses, and why."""

    engine: str
    reason: str
    seconds: dict[str, float] = field(default_factory=dict)  # per step, by engine
    error: float | None = None  # of the single-pass gradient, relative to the other's norm
    suspect: str | None = None  # the parameter with the largest error, if too large
    refused: bool = False  # whether the model does something that a single pass cannot handle


@dataclass(frozen=True)
class _TrialKey:
    """The loss and the batch size that a trial was made with."""

    loss: str | None  # None: unknown
    examples: int
    microbatches: int

    def is_near(self, other: _TrialKey) -> bool:
        """Whether the result of this trial holds for the other batch as well."""
        if self.loss is not None and self.loss != other.loss:
            return False
        ratios = self.examples / other.examples, self.microbatches / other.microbatches
        return all(0.5 <= ratio <= 2 for ratio in ratios)


class EngineSelector:
    """Makes the engine for each step; with "auto" it finds out which one is fastest."""

    def __init__(
        self,
        name: EngineName,
        model: nn.Module,
        scaler: GradScaler | None,
        memory_budget: int | None,
        verify: Verify = "rarely",
        sharded: ShardedEngines | None = None,
    ) -> None:
        self.name = name
        self.verify = verify
        self._gave_up = False  # single passes turned out to be wrong
        self._communicates = ""  # the operation with which loss_fn waits for other ranks, if any
        self.model = model
        self.scaler = scaler
        self.memory_budget = memory_budget
        self._sharded = sharded
        self.side_effects = SideEffects(model)
        self.report: EngineReport | None = None
        self._state: dict[str, Any] = {}
        # by loss_fn, examples and micro-batches: the smaller last batch of an epoch gets its own
        # trial, and so does another loss, which may mix examples where the first did not
        self._trials: dict[_TrialKey, EngineReport] = {}

    def stay_in_step(self, operation: str) -> None:
        """Call `loss_fn` as often as the other ranks do, because it communicates with them."""
        if self.name == "fused":
            raise CannotFuseError(
                f"loss_fn communicates with other ranks ({operation}), and the single-pass engine "
                'would call it a different number of times. Use engine="auto" or "stream".'
            )
        self._communicates = operation

    def for_chunks(self, record: StepRecord) -> Engine:
        """Make the engine for a step that is folded in an unknown number of chunks."""
        if self._sharded is not None:
            return self._sharded.make(self.name, record, self.scaler)
        if self.name == "fused" and not self._gave_up:
            return self._single_pass(record)
        two_pass = self.name == "two_pass" or not record.policy.rule.streams
        if two_pass and self._communicates and record.policy.nonfinite == "skip":
            raise NotImplementedError(
                f"loss_fn communicates with other ranks ({self._communicates}), and two passes "
                "would not run a skipped micro-batch again, so the others would wait forever. Use "
                'nonfinite="propagate" or "raise", or a rule and engine that stream.'
            )
        return self._make(TwoPass if two_pass else Stream, record)

    def for_batch(
        self, record: StepRecord, loss_fn: LossFn, microbatches: MicrobatchList
    ) -> Engine:
        """Make the engine for a step that is one batch."""
        if self._sharded is not None:
            return self._sharded.make(self.name, record, self.scaler)
        if len(microbatches) == 1:
            # no second pass, no second buffer: streaming one micro-batch is a plain backward
            return self._make(Stream, record)
        if self.name != "auto":
            return self.for_chunks(record)
        if self._gave_up or self._communicates:
            return self.for_chunks(record)
        key = _TrialKey(name_of(loss_fn), microbatches.examples, len(microbatches))
        self.report = self._trial_near(key) or self._try(key, record, loss_fn, microbatches)
        if self.report.engine == "fused":
            return self._single_pass(record)
        return self.for_chunks(record)

    def must_probe_loss(self, loss_fn: LossFn, microbatches: MicrobatchList) -> bool:
        """Whether it is still unknown if `loss_fn` returns one loss per example."""
        if self.name != "auto" or self._sharded or self._gave_up or self._communicates:
            return False
        key = _TrialKey(name_of(loss_fn), microbatches.examples, len(microbatches))
        return len(microbatches) > 1 and self._trial_near(key) is None

    def note_untried(
        self, loss_fn: LossFn, microbatches: MicrobatchList, engine: str, unrepeatable: str = ""
    ) -> None:
        """Note that `loss_fn` returns a mean, or cannot be called for a trial."""
        key = _TrialKey(name_of(loss_fn), microbatches.examples, len(microbatches))
        reason = MEAN_LOSS
        if unrepeatable:
            reason = f"loss_fn reads {unrepeatable}, which cannot be read again for a trial."
        self.report = self._trials[key] = EngineReport(engine, reason)
        self._announce(self.report)

    def may_give_up(self, error: Exception) -> bool:
        """Whether to fall back to a reliable engine after a single pass failed."""
        return self.name == "auto" or isinstance(error, MismatchError)

    def give_up_single_passes(self, error: Exception) -> None:
        """Use a reliable engine from now on, and say why."""
        self._gave_up = True
        if isinstance(error, MismatchError):
            reason = str(error)
            warn(
                f"{reason} This step is redone micro-batch by micro-batch, and all later steps are "
                "done that way."
            )
        else:
            what = str(error) if isinstance(error, CannotFuseError) else repr(error)
            reason = f"A single pass failed on a later batch: {what}"
        if self.report is not None:
            (certain,) = (self.report.seconds.keys() or {"stream"}) - {"fused"}
            self.report = replace(self.report, engine=certain, reason=reason)
            self._trials = dict.fromkeys(self._trials, self.report)
            logger.warning('engine="auto" uses %s from now on: %s', certain, reason)

    def reliable_engine(self, record: StepRecord) -> Engine:
        """Make the engine that works for every model."""
        return self._make(reliable(record.policy), record)

    def trials(self) -> list[dict[str, Any]]:
        """Return all results for a checkpoint: measured again, they might differ."""
        return [
            {"loss": key.loss, "size": (key.examples, key.microbatches), **asdict(report)}
            for key, report in self._trials.items()
        ]

    def load_trials(self, trials: list[dict[str, Any]]) -> None:
        """Use the results from a checkpoint."""
        for trial in trials:
            found = {name: trial[name] for name in trial.keys() - {"loss", "size"}}
            # older checkpoints do not name the loss
            key = _TrialKey(trial.get("loss"), *trial["size"])
            self._trials[key] = EngineReport(**found)

    def _single_pass(self, record: StepRecord) -> Engine:
        from microclip.engines.single_pass.engine import Fused

        return self._make(Fused, record)

    def _make(self, engine: type[Engine], record: StepRecord) -> Engine:
        more = dict(self._single_pass_state()) if engine.name == "fused" else {}
        more["side_effects"] = self.side_effects
        return engine(self.model, trainable(self.model), record, self.scaler, **more)

    def _single_pass_state(self) -> dict[str, Any]:
        """Return what lasts from step to step: the memory budget and the verifier."""
        from microclip.engines.single_pass.memory import Budget
        from microclip.engines.single_pass.verify import Verifier

        if not self._state:
            budget, verifier = Budget(self.memory_budget), Verifier(self.verify)
            self._state = {"budget": budget, "verifier": verifier}
        return self._state

    def _trial_near(self, key: _TrialKey) -> EngineReport | None:
        """Return the result of a trial with a batch at most twice as large or small."""
        for past, report in self._trials.items():
            if past.is_near(key):
                return report
        return None

    def _try(
        self, key: _TrialKey, record: StepRecord, loss_fn: LossFn, microbatches: MicrobatchList
    ) -> EngineReport:
        verifier = self._single_pass_state()["verifier"]
        verifier.listens = True  # the trial is a check itself
        try:
            report = try_out(
                self.model,
                self._make,
                loss_fn,
                microbatches,
                record.policy,
                self.side_effects,
                is_last=self.verify == "never",
            )
        finally:
            verifier.listens = False
        if report.reason != NOT_FINITE:  # else try again with the next batch
            self._trials[key] = report
        self._announce(report)
        return report

    def _announce(self, report: EngineReport) -> None:
        level = logging.WARNING if report.refused else logging.INFO
        logger.log(level, 'engine="auto" uses %s: %s', report.engine, report.reason)
        if report.suspect is not None:
            warn(f"{report.reason} Using the {report.engine} engine, which is exact.")


def reliable(policy: Policy) -> type[Engine]:
    """Return the engine that works for every model."""
    return Stream if policy.rule.streams else TwoPass


def try_out(
    model: nn.Module,
    make: Callable[[type[Engine], StepRecord], Engine],
    loss_fn: LossFn,
    microbatches: MicrobatchList,
    policy: Policy,
    side_effects: SideEffects,
    is_last: bool = False,
) -> EngineReport:
    """Run a batch through the single-pass engine and the reliable one, and compare.

    Args:
        model: The model.
        make: Makes an engine.
        loss_fn: Returns the losses.
        microbatches: The batch.
        policy: How to clip.
        side_effects: What a pass changes besides gradients.
        is_last: Whether no check follows, so that rounding must not leave anything open.
    """
    from microclip.engines.single_pass.engine import Fused
    from microclip.engines.single_pass.verify import AutocastWatch

    policy = replace(policy, nonfinite="propagate")
    devices = {parameter.device for parameter in model.parameters()}
    before = side_effects.snapshot(loss_fn)
    edited: bool | None = None
    fallback = reliable(policy)
    autocast = AutocastWatch(model, {device.type for device in devices})

    def run(engine: type[Engine]) -> tuple[Gradients, float]:
        nonlocal edited
        before.restore()
        record = StepRecord(policy, step=0)
        own = microbatches.keep_copy().pristine.keep_copy()  # loss_fn may write to its batch
        start = time.perf_counter()
        with DropoutDisabled():
            made = make(engine, record)
            made.fold(loss_fn, own, final=True)
            gradients = made.finish()
        _wait_for(devices)
        before.learn()
        edited = bool(edited) or own.were_edited
        return gradients, time.perf_counter() - start

    try:
        with autocast:
            return _compare(run, Fused, fallback, before, autocast, is_last)
    except CannotFuseError as error:
        return EngineReport(fallback.name, str(error), refused=not isinstance(error, MeanLossError))
    except torch.OutOfMemoryError:
        return EngineReport(fallback.name, "A single pass does not fit into memory.")
    finally:
        before.restore()
        if edited is not None:
            side_effects.edits_batches = edited


def _compare(
    run: Callable[[type[Engine]], tuple[Gradients, float]],
    candidate: type[Engine],
    fallback: type[Engine],
    before: Snapshot,
    autocast: AutocastWatch,
    is_last: bool,
) -> EngineReport:
    from microclip.engines.single_pass.rounding import compared, rounding_explains

    seconds: dict[str, float] = {}
    rounds: list[tuple[float, float]] = []
    start = time.perf_counter()
    for turn in range(ROUNDS + MORE_ROUNDS):
        if turn >= ROUNDS and (
            max(seconds.values()) > CLOSE * min(seconds.values())
            or time.perf_counter() - start > PATIENCE
        ):
            break
        try:
            fused, single = run(candidate)
        except (CannotFuseError, torch.OutOfMemoryError):
            raise
        except Exception as failure:
            # If the mistake is the user's, the reliable engine will raise it as well.
            return EngineReport(fallback.name, f"A single pass failed: {failure!r}")
        still = not before.has_drawn()
        trusted, several = run(fallback)
        if turn:
            rounds.append((single, several))
            # within a round, both are slowed down equally by other load
            typical = median(several for _, several in rounds)
            ratio = median(single / several for single, several in rounds)
            seconds = {"fused": typical * ratio, fallback.name: typical}
    comparison = compared(fused, trusted)
    error, suspect = comparison.error, comparison.suspect(autocast.seen)
    if not math.isfinite(error):
        return EngineReport(fallback.name, NOT_FINITE)
    if suspect is not None and still:
        is_noise = rounding_explains(comparison, lambda: run(candidate)[0], autocast.seen)
        if is_noise and is_last:
            return EngineReport(fallback.name, UNDECIDED, seconds, error)
        suspect = None if is_noise else suspect
    if suspect is not None and not still:
        return EngineReport(
            fallback.name,
            "The model draws random numbers that cannot be fixed for a comparison.",
            seconds,
            error,
        )
    if suspect is not None:
        return EngineReport(
            fallback.name,
            f"A single pass gives a gradient that differs by {error:.1e} of its norm, most in "
            f"parameter {suspect!r}: the model seems to mix examples, or to change from call to "
            "call.",
            seconds,
            error,
            suspect,
        )
    faster = min(seconds, key=seconds.__getitem__)
    times = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items())
    return EngineReport(faster, f"Both are exact, and it is faster ({times}).", seconds, error)


def _wait_for(devices: set[torch.device]) -> None:
    """Wait for accelerators, so that the clock shows the actual work."""
    for device in devices:
        if device.type != "cpu":
            synchronize = torch.get_device_module(device).synchronize
            # that of MPS takes no argument
            synchronize(*([device] if inspect.signature(synchronize).parameters else []))
