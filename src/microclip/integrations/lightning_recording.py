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

from microclip.dataset_ids import ids_of

if TYPE_CHECKING:
    from microclip.ledger import Ledger
    from microclip.microbatches import Domains, Ids

GIVEN = ("losses", "logits", "labels")  # what training_step may return besides its loss


class RecordExamples(pl.Callback):
    """Records the loss of every example of plain training: `Trainer(callbacks=[...])`.

    The losses are those of the loss function of torch that `training_step` calls (see
    `Ledger.recording`). If it calls several, or none, let it return a dictionary with `losses`, one
    per example, next to `loss`; and `logits` and `labels`, if it classifies.

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
        self._batch = -1
        strategy: Any = trainer.strategy
        before, step = vars(strategy).get("training_step"), strategy.training_step

        def training_step(batch: Any, *rest: Any) -> Any:
            loop = trainer.fit_loop
            number = loop.epoch_loop.total_batch_idx
            # a batch may be evaluated again by its optimizer, or for statistics only
            if number == self._batch or getattr(loop, "_skip_backward", False):
                return step(batch, *rest)
            self._batch = number
            return self._recorded(step, batch, rest)

        def release() -> None:
            with suppress(AttributeError):
                del strategy.training_step
            if before is not None:
                strategy.training_step = before

        strategy.training_step, self._release = training_step, release

    def _recorded(self, step: Callable[..., Any], batch: Any, rest: tuple[Any, ...]) -> Any:
        from microclip.ledger.loss_calls import LossCalls

        ids = self._ids(batch)
        with LossCalls() as seen:
            output = step(batch, *rest)
        if output is None:  # a batch that training leaves out
            return None
        given = {name: output[name] for name in GIVEN if _has(output, name)}
        if "losses" in given:
            losses = given.pop("losses")
        else:
            call = seen.of(len(ids))
            losses, given = call.losses, {"logits": call.logits, "labels": call.labels}
        domains = None if self._domains is None else self._domains(batch)
        self._ledger.record(ids, losses, domains=domains, **given)
        return output

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
