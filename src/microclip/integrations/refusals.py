"""Refuses Trainer setups that would not clip, or would clip the wrong thing, before they train."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainerCallback

from microclip.integrations.columns import PACKING_KEYS
from microclip.microbatches import tensors_of
from microclip.wrappers import is_sharded


def check_base_classes(cls: type, mixin: type) -> None:
    """Refuse a Trainer before the mixin, or one after it whose training_step would be lost."""
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
                "replaces it. Move its code to compute_loss or a callback, or to a class before "
                f"{mixin.__name__} whose training_step calls super().training_step(...)."
            )


def refuse_unsupported(trainer: Any) -> None:
    """Refuse setups that reduce or use gradients before they can be clipped."""
    if trainer.accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise NotImplementedError(
            "DeepSpeed reduces gradients before they can be clipped. Use DDP or FSDP2."
        )
    if trainer.args.n_gpu > 1:
        raise NotImplementedError(
            "nn.DataParallel adds up the gradients of its GPUs before they can be clipped. Start "
            "with torchrun, which runs one process per GPU."
        )
    optimizer = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        raise NotImplementedError(
            f"optim={optimizer!r} updates weights during the backward pass, before gradients can "
            "be clipped. Use an optimizer that updates them in step()."
        )
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    for kind in ("cp", "sp"):
        if getattr(parallelism, f"{kind}_enabled", False):
            raise NotImplementedError(
                "With context or sequence parallelism every rank has a part of each text, so no "
                "rank has whole examples to make micro-batches of. Use DDP or FSDP2."
            )


def not_examples_message(examples: int, inputs: dict[str, Any], size: int | None) -> str:
    """Explain what is wrong with a batch whose rows are not examples."""
    rows = max(len(leaf) for _, leaf in tensors_of(inputs))
    made = f"The data collator made a batch of {rows} row{'s' * (rows > 1)} out of {examples} "
    made += f"example{'s' * (examples > 1)} of the data set"
    if rows <= examples or any(name in inputs for name in PACKING_KEYS):
        return (
            f"{made}, whose rows are not examples (perhaps it packs them without padding), so it "
            f"cannot be cut into micro-batches of {size}. Use a collator that pads, or "
            "microbatch_size=None, which makes each batch one micro-batch."
        )
    return (
        f"{made}, so microclip cannot know which rows belong together, and cannot cut it into "
        f"micro-batches of {size}. If the data set yields whole batches, let it yield single "
        "examples and set per_device_train_batch_size, or return "
        "DataLoader(data, batch_size=None) from get_train_dataloader: each row then counts as an "
        "example. If an example has several rows, such as a pair of answers, stack them along a "
        "second dimension and flatten it in the model. Or use microbatch_size=None, which makes "
        "each batch one micro-batch."
    )


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a sharded model where the clipper does not run the backward pass itself."""
    if is_sharded(model):
        raise NotImplementedError(
            "The gradients of a sharded model are reduced over ranks during the backward pass, so "
            "a micro-batch must be part of one batch. Set microbatch_size to at most "
            "per_device_train_batch_size, and use a collator that pads."
        )


class RequireClipped(TrainerCallback):
    """Raises if the optimizer is about to use a gradient that was not clipped."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Check that the clipper has finished this step."""
        if not self.trainer._clipped:
            raise RuntimeError(
                "The optimizer was about to step with a gradient that was not clipped, because "
                f"{type(self.trainer).__name__}.training_step does not call the one of "
                "ClippedTrainerMixin. Call super().training_step(model, inputs, "
                "num_items_in_batch) in it."
            )
        self.trainer._clipped = False
