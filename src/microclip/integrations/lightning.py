"""Micro-batch clipping as a callback of Lightning's Trainer.

    trainer = Trainer(callbacks=[MicrobatchClip()], accumulate_grad_batches=8)

Every batch that the loader gives is a micro-batch, and `accumulate_grad_batches` of them make a
step. `gradient_clip_val` then acts on the clipped gradient. With Fabric, or manual optimization,
use `microclip.Clipper` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import Tensor

from microclip.clipper import Clipper
from microclip.engines.losses import unscale
from microclip.integrations.metrics import metrics
from microclip.microbatches import Ids, count_examples
from microclip.rules import Nonfinite, Rule

try:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError as error:
    raise ImportError(
        "microclip.integrations.lightning needs lightning: pip install 'microclip[lightning]'"
    ) from error

if TYPE_CHECKING:
    from microclip.ledger import Ledger


class MicrobatchClip(pl.Callback):
    """Folds every batch's gradient, and clips when a window of accumulation ends.

    Args:
        rule: How norms become weights, of those that stream; the default is `rules.MinNorm()`.
        nonfinite: As in `Clipper`.
        ids: Finds the names of a batch's examples in it, one for each.
        domain: Finds the domain of a batch in it; all its examples are then of that domain.
        ledger: As in `Clipper`.
        log: Whether to log the figures of a step.
    """

    def __init__(
        self,
        rule: Rule | None = None,
        nonfinite: Nonfinite = "propagate",
        *,
        ids: Callable[[Any], Ids] | None = None,
        domain: Callable[[Any], Hashable] | None = None,
        ledger: Ledger | None = None,
        log: bool = True,
    ) -> None:
        self._options: dict[str, Any] = {"rule": rule, "nonfinite": nonfinite, "ledger": ledger}
        self._find_ids, self._find_domain = ids, domain
        self._log = log
        self._state: dict[str, Any] | None = None
        self._batch: dict[str, Any] = {}  # what is known of the batch at hand
        self._local = ExitStack()  # what keeps gradients on their rank during a batch
        self.clipper: Clipper | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take hold of the model, if it can be clipped from here."""
        if not pl_module.automatic_optimization:
            raise NotImplementedError(
                "With manual optimization a callback does not see when a step ends. Call "
                "microclip.Clipper(self, microbatch_size).backward(...) in training_step instead."
            )
        known = isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy)
        if not known or trainer.strategy.handles_gradient_accumulation:  # DeepSpeed's is a DDP's
            raise NotImplementedError(
                f"{type(trainer.strategy).__name__} reduces gradients before a callback sees them. "
                "Use DDP, or microclip.Clipper with manual optimization."
            )
        model = trainer.strategy.model
        assert model is not None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.clipper = Clipper(model, engine="stream", grad_scaler=scaler, **self._options)
        if self._state is not None:
            self.clipper.load_state_dict(self._state)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Look at the batch; under DDP, keep its gradient on its rank."""
        assert self.clipper is not None
        self._batch = {"size": count_examples(batch)}
        if self._find_ids is not None:
            self._batch["ids"] = self._find_ids(batch)
        if self._find_domain is not None:
            self._batch["domain"] = self._find_domain(batch)
        self._local.enter_context(self.clipper.local())

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Give a micro-batch the mean loss of its own back.

        Lightning has divided it by the length of a full window, also in a shorter one. In place: it
        is the tensor that will be differentiated.
        """
        assert self.clipper is not None
        if trainer.accumulate_grad_batches > 1:
            loss.mul_(trainer.accumulate_grad_batches)
        self._batch["loss"] = unscale(loss.detach(), self.clipper.grad_scaler)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Fold; with the last batch of a window clip, before precision plugins unscale."""
        assert self.clipper is not None
        self.clipper.fold(**self._batch)
        ends = (trainer.fit_loop.epoch_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if ends or trainer.is_last_batch:
            outcome = self.clipper.finish()
            if self._log:
                pl_module.log_dict(metrics(outcome))

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Let the wrapper do as it likes again."""
        self._local.close()

    def on_train_end(self, *args: Any) -> None:
        """Let nothing that is recorded be in memory only."""
        self._flush()

    def on_exception(self, *args: Any) -> None:
        """Leave no half step behind, and the wrapper as it was."""
        self._local.close()
        if self.clipper is not None:
            self.clipper.discard()
        self._flush()

    def _flush(self) -> None:
        if self._options["ledger"] is not None:
            self._options["ledger"].flush()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds; in the middle of a window, what its start was."""
        if self.clipper is None:
            return self._state or {}
        self._flush()
        return self.clipper.lasting_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._state = state or None
