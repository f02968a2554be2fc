"""Micro-batch clipping as a callback of Lightning's Trainer.

    trainer = Trainer(callbacks=[MicrobatchClip(microbatch_size=4)])

Every batch that the loader gives is cut into micro-batches, or is one itself if no size is given,
and those of `accumulate_grad_batches` batches make a step. `gradient_clip_val` then acts on the
clipped gradient. With Fabric, or manual optimization, use `microclip.Clipper` itself.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from microclip.clipper import Clipper
from microclip.engines.choose import check
from microclip.integrations.metrics import metrics
from microclip.microbatches import Ids, check_size
from microclip.rules import Nonfinite, Rule

try:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError as error:
    raise ImportError(
        "microclip.integrations.lightning needs lightning: pip install 'microclip[lightning]'"
    ) from error

from microclip.integrations.lightning_steps import Batches, Steps

if TYPE_CHECKING:
    from microclip.ledger import Ledger


class MicrobatchClip(pl.Callback):
    """Runs batches micro-batch by micro-batch, and clips when a window of accumulation ends.

    `training_step`, and the hooks around `backward`, then run once per micro-batch. What they leave
    in `.grad` is the micro-batch's gradient. All later hooks see the clipped one.

    Args:
        rule: How norms become weights, of those that stream; the default is `rules.MinNorm()`.
        nonfinite: As in `Clipper`.
        microbatch_size: b, the examples clipped together; None makes each batch one micro-batch,
            so that there is something to clip only with `accumulate_grad_batches` or several ranks.
        batch_dim: The dimension along which a batch has its examples, 1 if time is first; in
            tensors with fewer dimensions, the last. None is 0, with a warning if it seems wrong.
        size: Counts the examples of a batch that is not to be cut, if its tensors do not tell.
        ids: Finds the names of a batch's examples in it, one for each.
        domain: Finds the domain of a batch in it, or a list with that of each example.
        ledger: As in `Clipper`.
        log: Whether to log the figures of a step.
    """

    def __init__(
        self,
        rule: Rule | None = None,
        nonfinite: Nonfinite = "propagate",
        *,
        microbatch_size: int | None = None,
        batch_dim: int | None = None,
        size: Callable[[Any], int] | None = None,
        ids: Callable[[Any], Ids] | None = None,
        domain: Callable[[Any], Any] | None = None,
        ledger: Ledger | None = None,
        log: bool = True,
    ) -> None:
        if rule is not None and not isinstance(rule, Rule):
            raise TypeError(
                f"rule must be an instance of a Rule, such as microclip.rules.MinNorm(), but got "
                f"{rule!r}. Did you mean MicrobatchClip(microbatch_size={rule!r})?"
            )
        if rule is not None:
            check("stream", rule)
        if batch_dim is not None and (not isinstance(batch_dim, int) or batch_dim < 0):
            raise ValueError(f"batch_dim must be 0, 1, ... or None, but got {batch_dim!r}.")
        if size is not None and (microbatch_size is not None or batch_dim is not None):
            raise ValueError(
                "size counts the examples of batches that are not cut, so it does not go with "
                "microbatch_size or batch_dim, which find them out."
            )
        self._options: dict[str, Any] = {"rule": rule, "nonfinite": nonfinite, "ledger": ledger}
        self._batches = Batches(check_size(microbatch_size), batch_dim, size, ids, domain)
        self._log = log
        self._state: dict[str, Any] | None = None
        self._steps: Steps | None = None
        self.clipper: Clipper | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take hold of the model, if it can be clipped from here."""
        self._refuse(trainer, pl_module)
        model = trainer.strategy.model
        assert model is not None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.clipper = Clipper(model, engine="stream", grad_scaler=scaler, **self._options)
        state = dict(self._state or {})
        lost = state.pop("folded", 0)
        if state:  # of a checkpoint, or of the last fit
            self.clipper.load_state_dict(state)
        if lost:
            warnings.warn(
                f"The checkpoint was saved in the middle of a window of accumulation. What its "
                f"{lost} micro-batches had given is not in it (Lightning does not save gradients), "
                "so the first step is made of the rest of the window.",
                UserWarning,
                stacklevel=2,
            )
        self._steps = Steps(trainer, self.clipper, self._batches)

    def _refuse(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
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
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        count = sum(isinstance(callback, MicrobatchClip) for callback in callbacks)
        if count > 1:
            raise ValueError(
                f"The Trainer has {count} MicrobatchClip callbacks, but gradients can be clipped "
                "once. Keep one of them."
            )
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise NotImplementedError(
                "training_step(dataloader_iter) takes its batches itself, so they cannot be seen "
                "here. Let it take a batch, or use microclip.Clipper with manual optimization."
            )
        mine = {id(parameter) for parameter in pl_module.parameters()}
        for group in (
            group for optimizer in trainer.optimizers for group in optimizer.param_groups
        ):
            for tensor in group["params"]:
                if tensor.requires_grad and id(tensor) not in mine:
                    raise ValueError(
                        f"The optimizer trains a tensor of shape {tuple(tensor.shape)} that is no "
                        f"parameter of {type(pl_module).__name__}, so its gradient would not be "
                        "clipped with the others. Make it a torch.nn.Parameter of the module."
                    )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Log what a window did."""
        steps = self._steps
        if steps is not None and steps.unseen is not None:
            if self._log and not trainer.barebones:
                pl_module.log_dict(metrics(steps.unseen))
            steps.unseen = None

    def on_train_end(self, *args: Any) -> None:
        """Let nothing that is recorded be in memory only."""
        self._release()

    def on_exception(self, *args: Any) -> None:
        """Leave no half step behind, and the strategy as it was."""
        self._release()

    def _release(self) -> None:
        if self._steps is not None:
            self._steps.release()
            self._steps = None
            self._state = self.state_dict()  # the next fit goes on from here
        self._flush()

    def _flush(self) -> None:
        if self._options["ledger"] is not None:
            self._options["ledger"].flush()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds; in the middle of a window, what its start was."""
        if self.clipper is None:
            return self._state or {}
        self._flush()
        state = self.clipper.lasting_state()
        folded = 0 if self._steps is None else self._steps.folded
        return {**state, "folded": folded} if folded else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._state = state or None
