"""Micro-batch clipping in a training loop with Accelerate.

    clipper = AcceleratedClipper(accelerator, model, microbatch_size=4)    # after prepare()

    for batch in loader:
        with accelerator.accumulate(model):
            clipper.backward(loss_fn, batch)           # was: accelerator.backward(loss_fn(batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

Every batch is cut into micro-batches. With the last batch of an accumulation window, the rule is
applied and `.grad` holds the clipped gradient of the whole window. Do not divide the loss yourself.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from microclip.clipper import Clipper
from microclip.distributed.ddp import Ddp
from microclip.engines.gradients import LossFn
from microclip.integrations.metrics import metrics
from microclip.microbatches import Domains, Ids
from microclip.outcome import Outcome
from microclip.wrappers import is_sharded

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError(
        "microclip.integrations.accelerate needs accelerate: pip install 'microclip[hf]'"
    ) from error


class AcceleratedClipper:
    """A `Clipper` that knows when an accumulation window ends.

    Args:
        accelerator: The accelerator of the loop.
        model: The model that `accelerator.prepare` returned.
        microbatch_size: b, how many examples are clipped together. None: a whole batch.
        options: Further arguments of `Clipper`. The loss scaler is the accelerator's. Rules that
            weight examples need `total_steps` from you: Accelerate does not know it.
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
        """What clipping did in the last finished window."""
        return self.clipper.outcome

    def backward(
        self, loss_fn: LossFn, batch: Any, *, ids: Ids | None = None, domains: Domains | None = None
    ) -> Outcome | None:
        """Differentiate a batch; at the end of a window, clip and return the outcome."""
        self._window.check()
        whole = self.accelerator.gradient_accumulation_steps == 1 and not self._window.is_open
        if whole and self.accelerator.sync_gradients:
            outcome = self.clipper.backward(loss_fn, batch, ids=ids, domains=domains)
            self._window.close()
            return outcome
        self._window.is_open = False  # if folding fails, nothing is left in the window
        self.clipper.fold(loss_fn, batch, ids=ids, domains=domains)
        self._window.is_open = True
        if not self.accelerator.sync_gradients:
            return None
        outcome = self.clipper.finish()
        self._window.close()
        return outcome

    def discard(self) -> None:
        """Drop what the window holds so far, for instance after an error."""
        self.clipper.discard()
        self._window.is_open = False

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last window, for `accelerator.log`."""
        return {} if self.outcome is None else metrics(self.outcome)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; `accelerator.save_state` calls this."""
        return self.clipper.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, and drop an open window."""
        self.discard()
        self._window.last_count = ()
        self.clipper.load_state_dict(state)


class _Window:
    """The accumulation window, and checks that the loop uses it as Accelerate expects."""

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        self.is_open = False
        self._accelerator, self._model = accelerator, model
        self._handed_out: tuple[nn.Parameter, Tensor, int] | None = None  # a gradient and version
        self._watched: nn.Parameter | None = None  # the parameter whose gradient that is
        self.last_count: tuple[Any, ...] = ()  # the accelerator's position at the last batch
        self._zeroes_in_place = False

    def check(self) -> None:
        """Refuse a loop that would add up windows, or parts of one, clipped separately."""
        if getattr(getattr(self._model, "_join_config", None), "enable", False):
            raise NotImplementedError(
                "Inside accelerator.join_uneven_inputs, ranks that have run out of batches still "
                "answer DistributedDataParallel but not the clipper, which would wait for them "
                "forever. Prepare the loader with even_batches=True, or give such ranks empty "
                "batches."
            )
        times = self._accelerator.gradient_accumulation_steps
        if times > 1 and not self._entered_accumulate():
            raise RuntimeError(
                f"gradient_accumulation_steps is {times}, but clipper.backward was called outside "
                "accelerator.accumulate(model), or twice inside one, so Accelerate cannot tell "
                "where a window ends. Put `with accelerator.accumulate(model):` around each batch, "
                "and add up all losses of a batch in one loss_fn."
            )
        if not self.is_open and self._is_still_there():
            raise RuntimeError(
                "The clipped gradient of the last window is still in .grad, so the next one would "
                "be added to it, although the two were clipped separately. Call "
                "optimizer.zero_grad() after optimizer.step(). To accumulate, use "
                "Accelerator(gradient_accumulation_steps=...) and put `with "
                "accelerator.accumulate(model):` around each batch instead of no_sync; to train on "
                "two losses, add them up in one loss_fn."
            )
        self._handed_out = None

    def close(self) -> None:
        """Remember one gradient that an optimizer is going to clear."""
        self.is_open = False
        if self._watched is None or self._watched.grad is None:
            self._watched = self._optimized_parameter()
        if self._watched is not None and self._watched.grad is not None:
            gradient = self._watched.grad
            self._handed_out = self._watched, gradient, gradient._version

    def _optimized_parameter(self) -> nn.Parameter | None:
        """Return a parameter that has a gradient and belongs to a prepared optimizer, if any.

        `optimizer.zero_grad()` does not clear the gradients of other parameters.
        """
        groups = [g for o in self._accelerator._optimizers for g in o.param_groups]
        held = {id(parameter) for group in groups for parameter in group["params"]}
        found = (p for p in self._model.parameters() if p.grad is not None and id(p) in held)
        return next(found, None)

    def _entered_accumulate(self) -> bool:
        """Whether `accumulate` was entered since the last batch."""
        accelerator, state = self._accelerator, self._accelerator.gradient_state
        if state.end_of_dataloader:  # the counter restarts
            self.last_count = ()
            return True
        loader = state.active_dataloader
        count = accelerator.step, id(loader), getattr(loader, "iteration", None)
        before, self.last_count = self.last_count, count
        return accelerator.step > 0 and count != before

    def _is_still_there(self) -> bool:
        if self._handed_out is None:
            return False
        parameter, gradient, version = self._handed_out
        if parameter.grad is not gradient:
            return False
        if gradient._version != version and not self._zeroes_in_place:
            # changed in place, by zero_grad(set_to_none=False) or clip_grad_norm_? Read it once
            self._zeroes_in_place = not bool(gradient.any())
        return gradient._version == version or not self._zeroes_in_place


def _check_prepared(accelerator: Accelerator, model: nn.Module) -> None:
    if accelerator.num_processes == 1 or is_sharded(model) or Ddp.find(model) is not None:
        return
    if accelerator.distributed_type == DistributedType.FSDP:
        raise NotImplementedError(
            "FSDP version 1 keeps gradients in flattened parameters, which cannot be clipped "
            "here. Use FullyShardedDataParallelPlugin(fsdp_version=2)."
        )
    raise ValueError(
        f"There are {accelerator.num_processes} processes, but {type(model).__name__} is neither "
        "wrapped in DistributedDataParallel nor sharded, so each process would train its own "
        "model. Pass AcceleratedClipper what accelerator.prepare(model) returns, and call that "
        "model in loss_fn."
    )
