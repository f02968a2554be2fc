"""Trainers that would not clip, or clip something else: they are refused before they train."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainerCallback

from microclip.engines.gradients import is_sharded
from microclip.integrations.columns import PACKED
from microclip.microbatches import tensors_of


def check_order(cls: type, mixin: type) -> None:
    """Refuse a class whose Trainer goes before the mixin, or has a training step that is lost."""
    order = cls.__mro__
    place = order.index(mixin)
    for base in order[:place]:
        if issubclass(base, Trainer) and not issubclass(base, mixin):
            raise TypeError(
                f"{cls.__name__} would not clip anything, because {base.__name__} comes before "
                f"{mixin.__name__}. Write class {cls.__name__}({mixin.__name__}, {base.__name__})."
            )
    for base in order[place + 1 :]:
        theirs = base.__module__.partition(".")[0] == "transformers"
        if issubclass(base, Trainer) and not theirs and "training_step" in vars(base):
            raise TypeError(
                f"{base.__name__}.training_step would never be called, because {mixin.__name__} "
                "replaces it. Put what it does into compute_loss or a callback, or into a class "
                f"before {mixin.__name__} whose training_step calls super().training_step(...)."
            )


def refuse_early_use(trainer: Any) -> None:
    """Refuse what mixes or uses gradients before they can be clipped."""
    if trainer.accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise NotImplementedError(
            "DeepSpeed reduces gradients before they can be clipped. Use DDP or FSDP2."
        )
    if trainer.args.n_gpu > 1:
        raise NotImplementedError(
            "nn.DataParallel mixes the gradients of its GPUs. Start with torchrun, which gives "
            "each GPU a process of its own."
        )
    optimizer = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        raise NotImplementedError(
            f"optim={optimizer!r} updates weights during the backward pass, before gradients can "
            "be clipped. Use an optimizer that waits for step()."
        )
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    for kind in ("cp", "sp"):
        if getattr(parallelism, f"{kind}_enabled", False):
            raise NotImplementedError(
                "With context or sequence parallelism every rank has a part of each text, so there "
                "are no micro-batches of one rank's examples. Use DDP or FSDP2."
            )


def packed_message(examples: int, inputs: dict[str, Any], size: int | None) -> str:
    """Say what is wrong with a batch whose rows are not examples."""
    rows = max(len(leaf) for _, leaf in tensors_of(inputs))
    made = f"The data collator made a batch of {rows} row{'s' * (rows > 1)} out of {examples} "
    made += f"example{'s' * (examples > 1)} of the data set"
    if rows <= examples or any(name in inputs for name in PACKED):
        return (
            f"{made}, whose rows are not examples (it packs them without padding, perhaps), so "
            f"micro-batches of {size} cannot be cut out of it. Use a collator that pads, or "
            "microbatch_size=None, which makes each batch one micro-batch."
        )
    return (
        f"{made}, so it is not known which rows belong together, and micro-batches of {size} "
        "cannot be cut out of it. If the data set yields whole batches, let it yield their "
        "examples and say per_device_train_batch_size, or return "
        "DataLoader(data, batch_size=None) from get_train_dataloader, whose rows are taken for "
        "examples. If an example has several rows, as a pair of answers has, put them along a "
        "second dimension and flatten it in the model. Or say microbatch_size=None, which makes "
        "each batch one micro-batch."
    )


def refuse_shards(model: nn.Module) -> None:
    """Refuse a sharded model where the backward pass is not the clipper's."""
    if is_sharded(model):
        raise NotImplementedError(
            "The gradients of a sharded model are added up over ranks during the backward pass, so "
            "micro-batches must be parts of what the model sees at once. Let microbatch_size be at "
            "most per_device_train_batch_size, and use a collator that pads."
        )


class OnlyClipped(TrainerCallback):
    """Stops an optimizer that is about to use a gradient that was not clipped."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Look whether the clipper has finished this step."""
        if not self.trainer._clipped:
            raise RuntimeError(
                "The optimizer was about to step with a gradient that was not clipped: "
                f"{type(self.trainer).__name__}.training_step does not call that of "
                "ClippedTrainerMixin. Call super().training_step(model, inputs, "
                "num_items_in_batch) in it."
            )
        self.trainer._clipped = False
