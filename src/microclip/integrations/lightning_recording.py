"""`RecordExamples`: a callback for Lightning's Trainer that records the loss of every example.

Training is not changed in any way. What is recorded is for `microclip.find_issues` and
`microclip.spikes`: per-example losses and, for classifiers, predictions. Knows nothing of clipping.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise ImportError(
        "microclip.integrations.lightning needs lightning: pip install 'microclip[lightning]'"
    ) from error

from torch import Tensor

from microclip.dataset_ids import LABELS_ERROR, are_labels, have_repeats, ids_of
from microclip.user_warnings import warn

if TYPE_CHECKING:
    from microclip.ledger import Ledger
    from microclip.ledger.loss_calls import LossCall
    from microclip.microbatches import Domains, Ids

GIVEN = ("losses", "logits", "labels")  # what training_step may return besides its loss
REMEDY = 'Let training_step return one loss per example: {"loss": loss, "losses": losses}.'
LOOKED_AT = 10  # batches whose ids are read, to see that they are none of something else


class RecordExamples(pl.Callback):
    """Records the loss of every example of plain training: `Trainer(callbacks=[...])`.

    The losses are those of the loss function of torch that `training_step` calls (see
    `Ledger.recording`), of which the loss that it returns must consist. If it calls several, or
    none, or adds something else, let it return a dictionary with `losses`, one per example, next to
    `loss`; and `logits` and `labels`, if it classifies.

    A step of the ledger is a batch, also if gradients are accumulated over several.

    Args:
        ledger: Where to record, `microclip.Ledger(folder)`.
        ids: Returns the ids of a batch's examples. By default they are where `microclip.with_ids`
            puts them: at the end of a tuple or list, or in the entry "id" of a dictionary.
        domains: Returns a label of each example's origin.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        ids: Callable[[Any], Ids] | None = None,
        domains: Callable[[Any], Domains] | None = None,
    ) -> None:
        if not hasattr(ledger, "recording"):
            raise TypeError(
                f"RecordExamples needs a microclip.Ledger, but got {ledger!r}. Pass "
                "RecordExamples(microclip.Ledger(path))."
            )
        self._ledger, self._ids, self._domains = ledger, ids or ids_of, domains
        self._batch = -1  # Lightning's number of the last one
        self._to_look_at = LOOKED_AT
        self._release: Callable[[], None] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at every batch from now on."""
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise NotImplementedError(
                "training_step(dataloader_iter) fetches its own batches, so the callback does not "
                "see them. Call ledger.record(ids, losses) in training_step instead."
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if type(callback).__name__ == "MicrobatchClip":
                raise ValueError(
                    "MicrobatchClip records what it clips by itself: pass it the ledger, "
                    "MicrobatchClip(ledger=ledger), and leave RecordExamples out."
                )
        self._batch, self._to_look_at = -1, LOOKED_AT
        strategy: Any = trainer.strategy
        before, step = vars(strategy).get("training_step"), strategy.training_step

        def training_step(batch: Any, *rest: Any) -> Any:
            loop = trainer.fit_loop
            number = loop.epoch_loop.total_batch_idx
            # a batch may be evaluated again by its optimizer, or for statistics only
            if number == self._batch or getattr(loop, "_skip_backward", False):
                return step(batch, *rest)
            self._batch = number
            return self._recorded(trainer, step, batch, rest)

        def release() -> None:
            with suppress(AttributeError):
                del strategy.training_step
            if before is not None:
                strategy.training_step = before

        strategy.training_step, self._release = training_step, release

    def _recorded(
        self, trainer: pl.Trainer, step: Callable[..., Any], batch: Any, rest: tuple[Any, ...]
    ) -> Any:
        from microclip.ledger.loss_calls import LossCalls
        from microclip.ledger.plain_step import one_each

        automatic, updates = trainer.lightning_module.automatic_optimization, trainer.global_step
        found = self._ids(batch)
        ids = one_each(found, "ids")
        with LossCalls() as seen:
            output = step(batch, *rest)
        idle = automatic or (not seen.calls and trainer.global_step == updates)
        if output is None and idle:  # a batch that training leaves out
            return None
        given = {name: output[name] for name in GIVEN if _has(output, name)}
        if "losses" not in given:
            call = seen.of(len(ids), _loss(output), REMEDY)
            if not automatic:  # whatever it returns, it may have differentiated all of them
                seen.of(len(ids), remedy=REMEDY)
            given = {name: getattr(call, name) for name in GIVEN} | {"where": call.counts}
        if self._ids is ids_of:
            self._expect_ids(found, seen.calls)
        domains = None if self._domains is None else self._domains(batch)
        self._ledger.record(ids, given.pop("losses"), domains=domains, **given)
        return output

    def _expect_ids(self, ids: Any, calls: list[LossCall]) -> None:
        """Make sure that nobody forgot `with_ids`: the last entry of a batch may be its labels."""
        look = self._to_look_at > 0  # which waits for the device
        self._to_look_at -= 1
        targets = [call.target for call in calls if call.target is not None]
        if any(are_labels(ids, target, look) for target in targets):
            raise ValueError(LABELS_ERROR)
        if look and have_repeats(ids):
            self._to_look_at = 0
            warn(
                "Some ids occur several times in one batch. That is right if examples are drawn "
                "with replacement. Otherwise these are not the ids of examples: use a loader of "
                "microclip.with_ids(dataset), or pass ids=, a function that finds them in a batch."
            )

    def on_train_end(self, *args: Any) -> None:
        """Stop looking, and write the ledger to disk."""
        if self._release is not None:
            self._release()
            self._release = None
        self._ledger.flush()

    def on_exception(self, *args: Any) -> None:
        """Do the same after an error."""
        self.on_train_end()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, and write the ledger to disk."""
        return self._ledger.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._ledger.load_state_dict(state)


def _has(output: Any, name: str) -> bool:
    return isinstance(output, Mapping) and output.get(name) is not None


def _loss(output: Any) -> Tensor | None:
    found = output.get("loss") if isinstance(output, Mapping) else output
    return found if isinstance(found, Tensor) else None
