"""Choosing an engine for a step.

The single-pass engine and its trial are imported when they are first needed: most of what
`import microclip` would cost is theirs.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

from microclip.engines.base import MEAN_LOSS, CannotFuseError, Engine, MismatchError
from microclip.engines.gradients import is_sharded, sharded_modules, trainable
from microclip.engines.losses import LossFn, name_of
from microclip.engines.snapshot import Memory
from microclip.engines.stream import Stream
from microclip.engines.tally import Tally
from microclip.engines.two_pass import TwoPass
from microclip.microbatches import Cuts
from microclip.rules import Rule

if TYPE_CHECKING:
    from microclip.distributed.fsdp import Fsdp
    from microclip.distributed.ranks import Ranks
    from microclip.engines.single_pass.verify import Verify
    from microclip.engines.trial import EngineReport

EngineName = Literal["auto", "stream", "two_pass", "fused"]
ENGINES: tuple[str, ...] = get_args(EngineName)
Scope = Literal["rank", "world"]
SCOPES: tuple[str, ...] = get_args(Scope)

logger = logging.getLogger("microclip")


def check(name: EngineName, rule: Rule) -> None:
    """Refuse a pair of engine and rule that cannot work together."""
    if name == "stream" and not rule.streams:
        raise ValueError(
            f'{rule!r} needs all norms before it can weight any gradient, which engine="stream" '
            'cannot give it. Use engine="two_pass" or "auto"'
            + (", or rescale=True." if hasattr(rule, "rescale") else ".")
        )


def _sharded(model: nn.Module) -> Fsdp | None:
    """Return how a model is sharded over ranks; the question costs an import only if it is."""
    if not is_sharded(model):
        return None
    from microclip.distributed.fsdp import Fsdp

    return Fsdp.find(model)


@dataclass(frozen=True)
class _Tried:
    """What a trial was made with."""

    loss: str | None  # None: not known
    examples: int
    microbatches: int

    def is_near(self, other: _Tried) -> bool:
        """Whether what was found here holds there as well."""
        if self.loss is not None and self.loss != other.loss:
            return False
        ratios = self.examples / other.examples, self.microbatches / other.microbatches
        return all(0.5 <= ratio <= 2 for ratio in ratios)


class Chooser:
    """Makes the engine for each step; with "auto" it finds out which one is best."""

    def __init__(
        self,
        name: EngineName,
        model: nn.Module,
        scaler: GradScaler | None,
        memory_budget: int | None,
        scope: Scope = "rank",
        verify: Verify = "rarely",
    ) -> None:
        self.name = name
        self.verify = verify
        self._gave_up = False  # single passes turned out to be wrong
        self._communicates = ""  # the operation by which loss_fn waits for other ranks, if any
        self.model = model
        self.scaler = scaler
        self.memory_budget = memory_budget
        self._fsdp = _sharded(model)
        self._scope = scope
        if scope == "world" and self._fsdp is None:
            raise ValueError(
                'scope="world" is for models sharded with fully_shard(): others have their '
                "gradients rank by rank."
            )
        self.memory = Memory(model)
        self.report: EngineReport | None = None
        self._kept: dict[str, Any] = {}
        # by loss_fn, examples and micro-batches: the last batch of an epoch, being smaller, has its
        # own, and so has another loss, which may mix examples where the first did not
        self._trials: dict[_Tried, EngineReport] = {}

    @property
    def ranks(self) -> Ranks | None:
        """Return the ranks that a sharded model's micro-batches are spread over."""
        return self._fsdp.ranks if self._fsdp and self._scope == "rank" else None

    @property
    def is_sharded(self) -> bool:
        """Whether the model is sharded over ranks."""
        return self._fsdp is not None

    def reshard(self) -> None:
        """Let a sharded model have the parameters that its optimizer has, before they are listed.

        An evaluation leaves whole ones in their place.
        """
        if self._fsdp is not None:
            self._fsdp.reshard(self.model)
        elif dist.is_available() and dist.is_initialized():
            first = next(self.model.parameters(), None)
            if hasattr(first, "device_mesh") or sharded_modules(self.model):
                raise RuntimeError(
                    f"{type(self.model).__name__} is sharded, but the Clipper does not know how: "
                    "fully_shard() was called after the Clipper was made, or on a larger model "
                    "that this is a part of. Make the Clipper with the whole model, after "
                    "fully_shard()."
                )

    def tell_of_no_examples(self, tally: Tally) -> None:
        """Let the other ranks of a sharded model know, who would wait for this one's part."""
        assert self._fsdp is not None
        self._fsdp.ranks.describe(tally.policy, self.scaler, trainable(self.model))
        self._fsdp.ranks.agree(tally.step, 0)

    def stay_in_step(self, operation: str) -> None:
        """Call `loss_fn` as often as other ranks do, since it communicates with them."""
        if self.name == "fused":
            raise CannotFuseError(
                f"loss_fn communicates with other ranks ({operation}), which the single-pass "
                'engine would do another number of times. Use engine="auto" or "stream".'
            )
        self._communicates = operation

    def _for_shards(self, tally: Tally) -> Engine:
        """Make the engine for a sharded model; there is one for each scope."""
        from microclip.distributed.fsdp import RankScope, WorldScope

        assert self._fsdp is not None
        engine = WorldScope if self._scope == "world" else RankScope
        if self.name not in ("auto", engine.name):
            raise ValueError(
                f"engine={self.name!r} does not work on a sharded model with "
                f'scope={self._scope!r}: leave it at "auto".'
            )
        if engine is WorldScope and not tally.policy.rule.streams:
            raise ValueError(
                f"{tally.policy.rule!r} needs all norms before it can weight any gradient, but "
                'micro-batches over all ranks are streamed. Use scope="rank" or rescale=True.'
            )
        return engine(self.model, trainable(self.model), tally, self.scaler, fsdp=self._fsdp)

    def for_chunks(self, tally: Tally) -> Engine:
        """Make the engine for a step of several parts, whose number is not known."""
        if self._fsdp is not None:
            return self._for_shards(tally)
        if self.name == "fused" and not self._gave_up:
            return self._single_pass(tally)
        two_pass = self.name == "two_pass" or not tally.policy.rule.streams
        if two_pass and self._communicates and tally.policy.nonfinite == "skip":
            raise NotImplementedError(
                f"loss_fn communicates with other ranks ({self._communicates}), and two passes "
                "would not go back through a skipped micro-batch, for which the others wait. Use "
                'nonfinite="propagate" or "raise", or a rule and engine that stream.'
            )
        return self._make(TwoPass if two_pass else Stream, tally)

    def for_batch(self, tally: Tally, loss_fn: LossFn, cuts: Cuts) -> Engine:
        """Make the engine for a step that consists of one batch."""
        if self._fsdp is not None:
            return self._for_shards(tally)
        if len(cuts) == 1:
            # needs no second pass and no second buffer: streaming it is a plain backward
            return self._make(Stream, tally)
        if self.name != "auto":
            return self.for_chunks(tally)
        if self._gave_up or self._communicates:
            return self.for_chunks(tally)
        tried = _Tried(name_of(loss_fn), cuts.examples, len(cuts))
        self.report = self._trial_near(tried) or self._try(tried, tally, loss_fn, cuts)
        if self.report.engine == "fused":
            return self._single_pass(tally)
        return self.for_chunks(tally)

    def wants_to_know(self, loss_fn: LossFn, cuts: Cuts) -> bool:
        """Whether it is not known yet if a loss is given example by example."""
        if self.name != "auto" or self._fsdp or self._gave_up or self._communicates:
            return False
        tried = _Tried(name_of(loss_fn), cuts.examples, len(cuts))
        return len(cuts) > 1 and self._trial_near(tried) is None

    def note_certain(
        self, loss_fn: LossFn, cuts: Cuts, engine: str, unrepeatable: str = ""
    ) -> None:
        """Take note that a loss is a mean, or that it cannot be called for a trial."""
        from microclip.engines.trial import EngineReport

        tried = _Tried(name_of(loss_fn), cuts.examples, len(cuts))
        reason = MEAN_LOSS
        if unrepeatable:
            reason = f"loss_fn reads {unrepeatable}, which cannot be read again for a trial."
        self.report = self._trials[tried] = EngineReport(engine, reason)
        self._announce(self.report)

    def may_give_up(self, error: Exception) -> bool:
        """Whether to do a batch with a certain engine, after a single pass failed."""
        return self.name == "auto" or isinstance(error, MismatchError)

    def give_up_single_passes(self, error: Exception) -> None:
        """Stay with an engine that is certain, and say why."""
        self._gave_up = True
        if isinstance(error, MismatchError):
            reason = str(error)
            warnings.warn(
                f"{reason} The step is redone, micro-batch by micro-batch, and so are all that "
                "follow.",
                RuntimeWarning,
                stacklevel=6,
            )
        else:
            what = str(error) if isinstance(error, CannotFuseError) else repr(error)
            reason = f"A later batch could not be done in a single pass: {what}"
        if self.report is not None:
            (certain,) = (self.report.seconds.keys() or {"stream"}) - {"fused"}
            self.report = replace(self.report, engine=certain, reason=reason)
            self._trials = dict.fromkeys(self._trials, self.report)
            logger.warning('engine="auto" uses %s from now on: %s', certain, reason)

    def certain_engine(self, tally: Tally) -> Engine:
        """Make an engine that works for every model."""
        return self._make(Stream if tally.policy.rule.streams else TwoPass, tally)

    def trials(self) -> list[dict[str, Any]]:
        """Return what was found out, for a checkpoint: timed anew, it could be something else."""
        return [
            {"loss": tried.loss, "size": (tried.examples, tried.microbatches), **asdict(report)}
            for tried, report in self._trials.items()
        ]

    def take_trials(self, trials: list[dict[str, Any]]) -> None:
        """Rely on what was found out before a checkpoint."""
        from microclip.engines.trial import EngineReport

        for trial in trials:
            found = {name: trial[name] for name in trial.keys() - {"loss", "size"}}
            # older checkpoints do not say which loss it was
            tried = _Tried(trial.get("loss"), *trial["size"])
            self._trials[tried] = EngineReport(**found)

    def _single_pass(self, tally: Tally) -> Engine:
        from microclip.engines.single_pass.engine import Fused

        return self._make(Fused, tally)

    def _make(self, engine: type[Engine], tally: Tally) -> Engine:
        more = dict(self._kept_for_single_passes()) if engine.name == "fused" else {}
        more["memory"] = self.memory
        return engine(self.model, trainable(self.model), tally, self.scaler, **more)

    def _kept_for_single_passes(self) -> dict[str, Any]:
        """Return what goes on from step to step: what is known of the memory they need."""
        from microclip.engines.single_pass.budget import Budget
        from microclip.engines.single_pass.verify import Verifier

        if not self._kept:
            budget, verifier = Budget(self.memory_budget), Verifier(self.verify)
            self._kept = {"budget": budget, "verifier": verifier}
        return self._kept

    def _trial_near(self, tried: _Tried) -> EngineReport | None:
        """Return what a trial with a batch at most twice as large or small has shown."""
        for past, report in self._trials.items():
            if past.is_near(tried):
                return report
        return None

    def _try(self, tried: _Tried, tally: Tally, loss_fn: LossFn, cuts: Cuts) -> EngineReport:
        from microclip.engines.trial import NOT_FINITE, try_out

        verifier = self._kept_for_single_passes()["verifier"]
        verifier.listens = True  # the trial is a check itself
        try:
            report = try_out(self.model, self._make, loss_fn, cuts, tally.policy, self.memory)
        finally:
            verifier.listens = False
        if report.reason != NOT_FINITE:  # else the next batch may tell
            self._trials[tried] = report
        self._announce(report)
        return report

    def _announce(self, report: EngineReport) -> None:
        level = logging.WARNING if report.refused else logging.INFO
        logger.log(level, 'engine="auto" uses %s: %s', report.engine, report.reason)
        if report.suspect is not None:
            warnings.warn(
                f"{report.reason} The {report.engine} engine is used, which is exact.",
                RuntimeWarning,
                stacklevel=6,
            )
