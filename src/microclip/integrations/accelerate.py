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

from torch import nn

from microclip.clipper import Clipper
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
        self.accelerator = accelerator
        scaler: Any = accelerator.scaler
        self.clipper = Clipper(model, microbatch_size, grad_scaler=scaler, **options)
        accelerator.register_for_checkpointing(self.clipper)

    @property
    def outcome(self) -> Outcome | None:
        """What the last finished window did."""
        return self.clipper.outcome

    def backward(
        self, loss_fn: LossFn, batch: Any, *, ids: Ids | None = None, domains: Domains | None = None
    ) -> Outcome | None:
        """Differentiate a batch; at the end of a window, clip, and return what was done."""
        if self.accelerator.gradient_accumulation_steps == 1:
            return self.clipper.backward(loss_fn, batch, ids=ids, domains=domains)
        self.clipper.fold(loss_fn, batch, ids=ids, domains=domains)
        return self.clipper.finish() if self.accelerator.sync_gradients else None

    def metrics(self) -> dict[str, float]:
        """Return the figures of the last window, for `accelerator.log`."""
        return {} if self.outcome is None else metrics(self.outcome)
