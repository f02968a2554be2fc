"""Micro-batch clipping in a loop that Accelerate drives.

    clipper = AcceleratedClipper(accelerator, model, microbatch_size=4)    # after prepare()

    for batch in loader:
        with accelerator.accumulate(model):
            clipper.backward(loss_fn, batch)           # was: accelerator.backward(loss_fn(batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

Every batch is cut into micro-batches; with the last one of an accumulation window the rule speaks,
and `.grad` holds the clipped gradient of the whole window. Do not divide the loss yourself.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from microclip.clipper import Clipper
from microclip.distributed.ddp import Ddp
from microclip.engines.gradients import is_sharded
from microclip.engines.losses import LossFn
from microclip.integrations.metrics import metrics
from microclip.microbatches import Domains, Ids
from microclip.outcome import Outcome

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError(
        "microclip.integrations.accelerate needs accelerate: pip install 'microclip[hf]'"
    ) from error


class AcceleratedClipper:
    """A `Clipper` that knows when a window of gradient accumulation ends.

    Args:
        accelerator: What drives the loop.
        model: As it came out of `accelerator.prepare`.
        microbatch_size: b, the examples clipped together; None: all that is seen at once.
        options: All that `Clipper` takes. The loss scaler is found by itself.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        microbatch_size: int | None = None,
        **options: Any,
    ) -> None:
        if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise NotImplementedError(
                f"{accelerator.distributed_type.value} reduces gradients before they can be "
                "clipped. Use DDP or FSDP2."
            )
        _check_prepared(accelerator, model)
        self.accelerator = accelerator
        scaler: Any = accelerator.scaler
        self.clipper = Clipper(model, microbatch_size, grad_scaler=scaler, **options)
        self._window = _Window(accelerator, model)
        accelerator.register_for_checkpointing(self)

    @property
    def outcome(self) -> Outcome | None:
        """What the last finished window did."""
        return self.clipper.outcome

    def backward(
        self, loss_fn: LossFn, batch: Any, *, ids: Ids | None = None, domains: Domains | None = None
    ) -> Outcome | None:
        """Differentiate a batch; at the end of a window, clip, and return what was done."""
        self._window.check()
        whole = self.accelerator.gradient_accumulation_steps == 1 and not self._window.is_open
        if whole and self.accelerator.sync_gradients:
            outcome = self.clipper.backward(loss_fn, batch, ids=ids, domains=domains)
            self._window.close()
            return outcome
        self._window.is_open = False  # in case of an error, after which nothing is folded
        self.clipper.fold(loss_fn, batch, ids=ids, domains=domains)
        self._window.is_open = True
        if not self.accelerator.sync_gradients:
            return None
        outcome = self.clipper.finish()
        self._window.close()
        return outcome

    def discard(self) -> None:
        """Drop what the window holds so far, for instance after an error in it."""
        self.clipper.discard()
        self._window.is_open = False

    def metrics(self) -> dict[str, float]:
        """Return the figures of the last window, for `accelerator.log`."""
        return {} if self.outcome is None else metrics(self.outcome)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold; `accelerator.save_state` asks for it."""
        return self.clipper.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, and drop a window that is open."""
        self.discard()
        self._window.counted = ()
        self.clipper.load_state_dict(state)


class _Window:
    """What batches make a step, and whether the loop does with them what Accelerate expects."""

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        self.is_open = False
        self._accelerator, self._model = accelerator, model
        self._left: tuple[nn.Parameter, Tensor, int] | None = None  # a gradient as it was given
        self._watched: nn.Parameter | None = None  # whose gradient that is
        self.counted: tuple[Any, ...] = ()  # where the accelerator was with the last batch
        self._zeroes = False

    def check(self) -> None:
        """Refuse a loop that would add up windows, or parts of one, without a common bound."""
        if getattr(getattr(self._model, "_join_config", None), "enable", False):
            raise NotImplementedError(
                "Inside accelerator.join_uneven_inputs ranks without batches answer "
                "DistributedDataParallel, but not the clipper, which would wait for them forever. "
                "Prepare the loader with even_batches=True, or give such ranks empty batches."
            )
        times = self._accelerator.gradient_accumulation_steps
        if times > 1 and not self._is_counted():
            raise RuntimeError(
                f"gradient_accumulation_steps is {times}, but clipper.backward was called outside "
                "accelerator.accumulate(model), or twice within one, so nobody counts the batches "
                "of a window. Write `with accelerator.accumulate(model):` around each batch, and "
                "add up all losses of a batch in one loss_fn."
            )
        if not self.is_open and self._is_left_over():
            raise RuntimeError(
                "The clipped gradient of the last window is still in .grad, so another would be "
                "added to it without a common bound. Call optimizer.zero_grad() after "
                "optimizer.step(). To accumulate, say "
                "Accelerator(gradient_accumulation_steps=...) and write `with "
                "accelerator.accumulate(model):` around each batch instead of no_sync; to train on "
                "two losses, add them up in one loss_fn."
            )
        self._left = None

    def close(self) -> None:
        """Remember one gradient that was handed out and that an optimizer will take away again."""
        self.is_open = False
        if self._watched is None or self._watched.grad is None:
            self._watched = self._held()
        if self._watched is not None and self._watched.grad is not None:
            gradient = self._watched.grad
            self._left = self._watched, gradient, gradient._version

    def _held(self) -> nn.Parameter | None:
        """Return a parameter with a gradient that a prepared optimizer holds, if there is one.

        The gradients of others are nobody's: `optimizer.zero_grad()` leaves them where they are.
        """
        groups = [g for o in self._accelerator._optimizers for g in o.param_groups]
        held = {id(parameter) for group in groups for parameter in group["params"]}
        found = (p for p in self._model.parameters() if p.grad is not None and id(p) in held)
        return next(found, None)

    def _is_counted(self) -> bool:
        """Whether `accumulate` was entered since the last batch."""
        accelerator, state = self._accelerator, self._accelerator.gradient_state
        if state.end_of_dataloader:  # the counter starts anew
            self.counted = ()
            return True
        loader = state.active_dataloader
        counted = accelerator.step, id(loader), getattr(loader, "iteration", None)
        before, self.counted = self.counted, counted
        return accelerator.step > 0 and counted != before

    def _is_left_over(self) -> bool:
        if self._left is None:
            return False
        parameter, gradient, version = self._left
        if parameter.grad is not gradient:
            return False
        if gradient._version != version and not self._zeroes:
            # by zero_grad(set_to_none=False), or by clip_grad_norm_: reading it once tells
            self._zeroes = not bool(gradient.any())
        return gradient._version == version or not self._zeroes


def _check_prepared(accelerator: Accelerator, model: nn.Module) -> None:
    if accelerator.num_processes == 1 or is_sharded(model) or Ddp.find(model) is not None:
        return
    if accelerator.distributed_type == DistributedType.FSDP:
        raise NotImplementedError(
            "FSDP's first version keeps gradients in flat parameters of its own. Say "
            "FullyShardedDataParallelPlugin(fsdp_version=2)."
        )
    raise ValueError(
        f"There are {accelerator.num_processes} processes, but {type(model).__name__} is neither "
        "wrapped in DistributedDataParallel nor sharded, so each process would train a model of "
        "its own. Give AcceleratedClipper what accelerator.prepare(model) returns, and call that "
        "in loss_fn."
    )
