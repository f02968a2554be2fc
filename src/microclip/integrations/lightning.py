"""Micro-batch clipping as a callback for Lightning's Trainer.

    trainer = Trainer(callbacks=[MicrobatchClip(microbatch_size=4)])

Every batch from the loader is cut into micro-batches, or is one micro-batch if no size is given.
The micro-batches of `accumulate_grad_batches` batches make one step. `gradient_clip_val` then acts
on the clipped gradient. With Fabric or manual optimization, use `microclip.Clipper` directly.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from microclip.clipper import Clipper
from microclip.engines.select import check
from microclip.integrations.metrics import metrics
from microclip.microbatches import Ids, check_size
from microclip.rules import ExampleRule, Nonfinite, Rule
from microclip.user_warnings import warn

try:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError as error:
    raise ImportError(
        "microclip.integrations.lightning needs lightning: pip install 'microclip[lightning]'"
    ) from error

from microclip.integrations.lightning_recording import RecordExamples as RecordExamples
from microclip.integrations.lightning_steps import BatchCutter, ClippedSteps

if TYPE_CHECKING:
    from microclip.ledger import Ledger


class MicrobatchClip(pl.Callback):
    """Runs each batch micro-batch by micro-batch, and clips when an accumulation window ends.

    `training_step` and the hooks around `backward` run once per micro-batch, and see its gradient
    alone in `.grad`. All later hooks see the clipped gradient.

    Args:
        rule: How norms become weights; must be a rule that streams. Default: `rules.MinNorm()`.
            Rules that weight examples, such as `rules.LossHistory()`, take a `training_step` that
            returns one loss per example, and learn from the Trainer how long it trains.
        nonfinite: As in `Clipper`.
        microbatch_size: b, how many examples are clipped together. None makes each batch one
            micro-batch, which clips only with `accumulate_grad_batches` or several ranks.
        batch_dim: The dimension that counts examples: 1 if time comes first. Tensors with fewer
            dimensions use their last one. None means 0, with a warning if that looks wrong.
        size: Returns the number of examples in a batch. For batches that should not be cut and
            whose tensors do not show how many examples they hold.
        ids: Returns the ids of a batch's examples, one per example, which rules that remember
            examples need.
        domain: Returns the domain of a batch, or a list with one domain per example.
        ledger: As in `Clipper`.
        log: Whether to log the metrics of each step.
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
                f"rule must be a Rule instance, such as microclip.rules.MinNorm(), but got "
                f"{rule!r}. Did you mean MicrobatchClip(microbatch_size={rule!r})?"
            )
        if rule is not None:
            check("stream", rule)
        if isinstance(rule, ExampleRule) and rule.needs_ids and ids is None:
            raise ValueError(
                f"{type(rule).__name__} remembers every example, but the examples have no ids. Let "
                "__getitem__(i) of your Dataset return i as well, and pass a function that finds "
                "it in a batch, such as MicrobatchClip(rule, ids=lambda batch: batch[2])."
            )
        # whether to tell the rule how long training takes, because the user has not
        self._tells_steps = isinstance(rule, ExampleRule) and rule.total_steps is None
        if batch_dim is not None and (not isinstance(batch_dim, int) or batch_dim < 0):
            raise ValueError(f"batch_dim must be 0, 1, ... or None, but got {batch_dim!r}.")
        if size is not None and (microbatch_size is not None or batch_dim is not None):
            raise ValueError(
                "size counts the examples of batches that are not cut, so it cannot be combined "
                "with microbatch_size or batch_dim, which count them from the tensors. Drop one."
            )
        self._options: dict[str, Any] = {"rule": rule, "nonfinite": nonfinite, "ledger": ledger}
        self._cutter = BatchCutter(check_size(microbatch_size), batch_dim, size, ids, domain)
        self._log = log
        self._state: dict[str, Any] | None = None
        self._steps: ClippedSteps | None = None
        self.clipper: Clipper | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that this setup can be clipped, and take over the strategy's steps."""
        self._refuse_unsupported(trainer, pl_module)
        model = trainer.strategy.model
        assert model is not None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        size = self._cutter.microbatch_size
        self.clipper = Clipper(model, size, engine="stream", grad_scaler=scaler, **self._options)
        state = dict(self._state or {})
        lost = state.pop("folded", 0)
        if state:  # from a checkpoint or the previous fit
            self.clipper.load_state_dict(state)
        if lost:
            warn(
                f"The checkpoint was saved in the middle of an accumulation window. The gradients "
                f"of its {lost} micro-batches are not in it (Lightning does not save gradients), "
                "so the first step uses only the rest of the window.",
                UserWarning,
            )
        self._steps = ClippedSteps(trainer, self.clipper, self._cutter)
        self._tell_steps(trainer)

    def _tell_steps(self, trainer: pl.Trainer) -> None:
        """Tell a rule that weights examples how long training takes."""
        rule, steps = self._options["rule"], trainer.estimated_stepping_batches
        if self._tells_steps and self.clipper is not None and steps < math.inf:
            # the clipper has counted the steps of earlier fits, too
            rule.total_steps = self.clipper.step + max(1, int(steps) - trainer.global_step)

    def _refuse_unsupported(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise NotImplementedError(
                "With manual optimization, a callback cannot see where a step ends. Call "
                "microclip.Clipper(self, microbatch_size).backward(...) in training_step instead."
            )
        known = isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy)
        # DeepSpeedStrategy subclasses DDPStrategy
        if not known or trainer.strategy.handles_gradient_accumulation:
            raise NotImplementedError(
                f"{type(trainer.strategy).__name__} reduces gradients before a callback can see "
                "them. Use DDP, or microclip.Clipper with manual optimization."
            )
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        count = sum(isinstance(callback, MicrobatchClip) for callback in callbacks)
        if count > 1:
            raise ValueError(
                f"The Trainer has {count} MicrobatchClip callbacks, but gradients can be clipped "
                "only once. Keep one of them."
            )
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise NotImplementedError(
                "training_step(dataloader_iter) fetches its own batches, so the callback cannot "
                "cut them. Take a batch instead: training_step(batch, batch_idx), or use "
                "microclip.Clipper with manual optimization."
            )
        known_ids = {id(parameter) for parameter in pl_module.parameters()}
        for group in (
            group for optimizer in trainer.optimizers for group in optimizer.param_groups
        ):
            for tensor in group["params"]:
                if tensor.requires_grad and id(tensor) not in known_ids:
                    raise ValueError(
                        f"The optimizer trains a tensor of shape {tuple(tensor.shape)} that is not "
                        f"a parameter of {type(pl_module).__name__}, so its gradient would not be "
                        "clipped with the others. Make it a torch.nn.Parameter of the module."
                    )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Log the metrics of a finished window."""
        steps = self._steps
        if steps is not None and steps.unlogged is not None:
            if self._log and not trainer.barebones:
                pl_module.log_dict(metrics(steps.unlogged))
            steps.unlogged = None

    def on_train_end(self, *args: Any) -> None:
        """Put the strategy back and write the ledger to disk."""
        self._release()

    def on_exception(self, *args: Any) -> None:
        """Drop the unfinished step and put the strategy back."""
        self._release()

    def _release(self) -> None:
        if self._steps is not None:
            self._steps.release()
            self._steps = None
            self._state = self.state_dict()  # the next fit continues from here
        self._flush()

    def _flush(self) -> None:
        if self._options["ledger"] is not None:
            self._options["ledger"].flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; in mid-window, the state when the window started."""
        if self.clipper is None:
            return self._state or {}
        self._flush()
        state = self.clipper.lasting_state()
        folded = 0 if self._steps is None else self._steps.folded
        return {**state, "folded": folded} if folded else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._state = state or None
