"""The engine of a step: its record, and the fallback if a single pass fails.

It does not cut batches, weight examples or handle wrappers: `Step` has done so before anything is
folded here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from microclip.checks import check_same_parameters
from microclip.engines.base import CannotFuseError, Engine, MismatchError
from microclip.engines.gradients import LossFn, LossPerExampleError, MeansOnly, take, trainable
from microclip.engines.select import EngineSelector
from microclip.engines.snapshot import Snapshot
from microclip.engines.step_record import Policy, StepRecord
from microclip.engines.stream import Stream
from microclip.microbatches import Microbatch, MicrobatchList
from microclip.multitensor import accumulation_dtype

if TYPE_CHECKING:
    from microclip.distributed.detection import LossCommunication
    from microclip.distributed.ranks import Ranks
    from microclip.step_predictions import StepPredictions


class EngineStep:
    """Folds micro-batches into one step, with the engine that the selector makes for it."""

    def __init__(
        self,
        number: int,
        policy: Policy,
        selector: EngineSelector,
        ranks: Ranks | None,
        predictions: StepPredictions | None = None,
        wants_domain_norms: bool = False,
    ) -> None:
        self.number = number
        self.policy = policy
        self.engine: Engine | None = None  # None: nothing was folded yet
        self.notes: list[str] = []  # for the outcome
        self._selector = selector
        self._model: nn.Module = selector.model
        self._ranks = ranks
        self._predictions = predictions  # None: nobody records them
        self._wants_domain_norms = wants_domain_norms
        self.record = self._new_record()

    def note_size(self, examples: int, final: bool) -> None:
        """Note a batch or chunk that does not match the micro-batch size."""
        b = self.policy.microbatch_size
        if b is not None and final and examples < b:
            self.notes.append(
                f"microbatch_size {b} is larger than the batch of {examples}: one micro-batch."
            )
        elif b is not None and not final and examples % b:
            self.notes.append(
                f"A chunk of {examples} examples is not a multiple of microbatch_size {b}: its "
                "last micro-batch is smaller."
            )

    def fold(
        self,
        loss_fn: LossFn,
        microbatches: MicrobatchList,
        final: bool,
        communication: LossCommunication | None,
    ) -> None:
        """Add micro-batches; `final`: no others will follow.

        `communication` detects whether `loss_fn` communicates with other ranks, if there are any.
        """

        def fold(loss_fn: LossFn) -> None:
            (self._fold_whole if final else self._fold_chunk)(loss_fn, microbatches)

        if communication is None:
            fold(loss_fn)
            return
        before = self.engine
        if communication.run(fold, loss_fn):
            return
        self._selector.stay_in_step(communication.found)
        if before is None:
            self.restart()
        if self._ranks is not None:
            self._ranks.describe(self.policy, self._selector.scaler, trainable(self._model))
            self._ranks.agree(self.number, len(microbatches))
        fold(loss_fn)

    def restart(self) -> StepRecord:
        """Forget the micro-batches so far; return the new record."""
        self.engine, self.record = None, self._new_record()
        return self.record

    def _new_record(self) -> StepRecord:
        record = StepRecord(self.policy, self.number, self._ranks)
        record.wants_domain_norms = self._wants_domain_norms
        if self._predictions is not None:
            self._predictions.start()
            record.on_examples = self._predictions.accept
        return record

    def _fold_chunk(self, loss_fn: LossFn, microbatches: MicrobatchList) -> None:
        first = self.engine is None
        self.engine = self.engine or self._selector.for_chunks(self.record)
        check_same_parameters(self._model, self.engine.parameters)
        microbatches = self._guarded(microbatches)
        before = self._snapshot(loss_fn)
        try:
            self.engine.fold(loss_fn, microbatches, final=False)
        except MismatchError as error:
            self._selector.give_up_single_passes(error)
            if before is not None:
                before.restore()
            if not first:
                raise
            self.engine = self._selector.for_chunks(self.restart())
            self.engine.fold(loss_fn, microbatches.pristine, final=False)
        else:
            self._learn(before)

    def _fold_whole(self, loss_fn: LossFn, microbatches: MicrobatchList) -> None:
        if self._selector.must_probe_loss(loss_fn, microbatches):
            guarded = microbatches.keep_copy()
            if self._fold_means(loss_fn, microbatches.keep_copy()):
                return
            microbatches = guarded.reverted()
        self.engine = self._selector.for_batch(self.record, loss_fn, microbatches)
        microbatches = self._guarded(microbatches)
        before = self._snapshot(loss_fn)
        try:
            self.engine.fold(loss_fn, microbatches, final=True)
        except Exception as error:
            if before is not None and isinstance(error, CannotFuseError | MismatchError):
                before.restore()
            # a rare branch of the model, or a batch too large, must not end a training run; if the
            # model itself fails, it will fail again
            if (
                self.engine.name != "fused"
                or not self._selector.may_give_up(error)
                or not microbatches.can_be_repeated
            ):
                raise
            if before is not None:
                before.restore()  # the pass that failed leaves no trace
            self.engine = self._selector.reliable_engine(self.restart())
            self.engine.fold(loss_fn, microbatches.pristine, final=True)
            self._selector.give_up_single_passes(error)
        else:
            self._learn(before)

    def _fold_means(self, loss_fn: LossFn, microbatches: MicrobatchList) -> bool:
        """Fold with the reliable engine if `loss_fn` returns means; return whether it does.

        So `loss_fn` is called no more often than without "auto". If it returns one loss per
        example, that single call is undone. If it reads something that cannot be read again, there
        is no trial, whatever it returns.
        """
        before = self._selector.side_effects.snapshot(loss_fn)
        self.engine = self._selector.reliable_engine(self.record)
        try:
            function = loss_fn if before.unrepeatable else MeansOnly(loss_fn)
            self.engine.fold(function, microbatches, final=True)
        except LossPerExampleError:
            before.restore()
            self.restart()
            return False
        self._selector.note_untried(loss_fn, microbatches, self.engine.name, before.unrepeatable)
        return True

    def _snapshot(self, loss_fn: LossFn) -> Snapshot | None:
        """Return the state before a single pass, which may have to be redone by streaming.

        Taken where a check is to come, and in every step if the model is known to change tensors.
        """
        effects, engine = self._selector.side_effects, self.engine
        if engine is None or engine.name != "fused":
            return None
        if not engine.expects_check and not effects.changing:
            return None
        return effects.in_every_step(loss_fn)

    def _learn(self, before: Snapshot | None) -> None:
        """Note which tensors a single pass changes, so that later snapshots copy only those."""
        if before is not None:
            before.learn()

    def _guarded(self, microbatches: MicrobatchList) -> MicrobatchList:
        """Return micro-batches that can be restored, if the engine calls `loss_fn` twice."""
        if self.engine is None or self.engine.name == "stream":
            return microbatches
        return self._selector.side_effects.guarded(microbatches)

    def stream(self, parameters: dict[str, nn.Parameter]) -> Stream:
        """Return the engine that takes gradients of the user's own backward passes."""
        engine = self.engine or Stream(self._model, parameters, self.record, self._selector.scaler)
        assert isinstance(engine, Stream)
        check_same_parameters(self._model, engine.parameters)
        self.engine = engine
        return engine

    def add_gradients(
        self,
        engine: Stream,
        parameters: dict[str, nn.Parameter],
        microbatch: Microbatch,
        loss: Tensor | None,
        loss_scale: float,
    ) -> None:
        """Take what is in `.grad` as the gradient of a micro-batch, and clear it."""
        mean_loss = None if loss is None else loss.detach().mean() / loss_scale
        each = None
        if loss is not None and loss.shape == (microbatch.size,):
            each = loss.detach() / loss_scale
        gradients = take(parameters)
        if loss_scale != 1:
            gradients = {
                name: gradient.to(accumulation_dtype(gradient)) / loss_scale
                for name, gradient in gradients.items()
            }
        # their memory may belong to the user, who may write the next gradients to it
        engine.add(gradients, microbatch, mean_loss, each, is_lent=loss_scale == 1)
