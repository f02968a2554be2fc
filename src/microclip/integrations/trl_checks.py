"""What of TRL cannot be clipped exactly, each refused by name, with a remedy.

Knows the trainers and their options; nothing of losses or gradients.
"""

from __future__ import annotations

import warnings
from typing import Any

from transformers import Trainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_trainer import SFTTrainer

from microclip.outcome import Outcome
from microclip.rules import ExampleRule

KNOWN = (SFTTrainer, DPOTrainer, RewardTrainer)
OWN_LOOP = (
    "Use microclip.Clipper in a loop of your own: clipper.backward(loss_fn, rollouts), with one "
    "loss per rollout."
)
WHY_NOT = {
    "GRPOTrainer": "generates its examples during training, shuffles and buffers them over steps, "
    "and divides their losses by the tokens of a whole generation, so its batches are not examples "
    f"of the data set whose losses stand on their own. {OWN_LOOP}",
    "RLOOTrainer": "generates its examples during training, and shuffles and buffers them over "
    f"steps, so its batches are not examples of the data set. {OWN_LOOP}",
    "KTOTrainer": "compares every answer with a mean over its whole batch, so an answer alone has "
    "no loss. Use ClippedDPOTrainer with pairs of answers.",
    "DistillationTrainer": "generates texts during training, so its batches are not examples of "
    "the data set. Use ClippedSFTTrainer on texts that the teacher wrote beforehand.",
}
ROUNDING = 1e-6  # of the median norm: a shorter gradient of a pair is rounding noise
SORTING = ("aot", "aot_unpaired")  # losses of DPO that sort the scores of a batch


def check_trainer(cls: type) -> None:
    """Refuse a mixin in front of a trainer that it does not know."""
    for base in cls.__mro__:
        theirs = base.__module__.partition(".")[0] == "trl"
        if not theirs or not issubclass(base, Trainer) or base.__name__.startswith("_"):
            continue
        if base not in KNOWN:  # among them trainers of trl.experimental that extend a known one
            reason = WHY_NOT.get(base.__name__, "is not SFTTrainer, DPOTrainer or RewardTrainer.")
            raise TypeError(f"microclip cannot clip {base.__name__} exactly: it {reason}")
    if issubclass(cls, Trainer) and not issubclass(cls, KNOWN):
        raise TypeError(
            f"{cls.__name__} has none of TRL's trainers. Use ClippedTrainerMixin of "
            "microclip.integrations.transformers."
        )


def refuse_offloading(arguments: tuple[Any, ...]) -> None:
    """Refuse activation offloading, before the trainer sets it up."""
    if any(getattr(each, "activation_offloading", False) is True for each in arguments):
        raise NotImplementedError(
            "activation_offloading=True moves activations during a backward pass in an order that "
            "assumes a single one per step. Use gradient_checkpointing=True, or a smaller "
            "per_device_train_batch_size with gradient_accumulation_steps."
        )


def refuse_options(
    trainer: Any,
    size: int | None,
    columns: dict[str, str | None],
    rule: ExampleRule | None,
    loss_mean: str,
) -> None:
    """Refuse options under which examples cannot be told apart, or that are not exact."""
    one_by_one = size is not None or rule is not None or any(columns.values())
    if one_by_one and getattr(trainer, "_is_vision_dataset", False):
        raise NotImplementedError(
            "The patches of a batch's images are stacked without saying whose they are, so a batch "
            "of images and texts cannot be cut. Leave out microbatch_size and rules that weight "
            "examples: each batch is then one micro-batch."
        )
    sorting = [name for name in getattr(trainer, "loss_types", ()) if name in SORTING]
    if sorting and one_by_one:
        raise NotImplementedError(
            f"loss_type={sorting[0]!r} sorts the scores of a whole batch, so a pair alone has no "
            'loss. Use loss_type="sigmoid", or leave out microbatch_size and rules that weight '
            "examples: each batch is then one micro-batch."
        )
    if loss_mean != "microbatch" and isinstance(trainer, DPOTrainer | RewardTrainer):
        raise ValueError(
            f"loss_mean={loss_mean!r} is about losses that are means over tokens, but the loss of "
            "a pair is not. Leave it out."
        )
    if loss_mean == "step" and getattr(trainer, "aux_loss_enabled", False):
        raise NotImplementedError(
            'loss_mean="step" divides by the tokens of a step, but the model adds an auxiliary '
            'loss of its experts that is not a mean over tokens. Use loss_mean="microbatch".'
        )


def warn_of_equal_answers(outcome: Outcome) -> bool:
    """Warn if a pair without a gradient of its own sets the bound for all others."""
    norms = outcome.norms
    smallest = norms.min() if len(norms) > 1 else norms.new_zeros(())
    row = int(norms.argmin()) if bool(0 < smallest < ROUNDING * norms.median()) else -1
    if row < 0 or float(outcome.bounds[row]) > 2 * float(smallest):  # the bound is another one
        return False
    warnings.warn(
        f"In step {outcome.step}, the gradient of pair {', '.join(map(str, outcome.ids[row]))} has "
        f"the norm {float(smallest):.1e}, the median is {float(norms.median()):.1e}. Perhaps its "
        "two answers are equal, and this is rounding noise. All other pairs are clipped to this "
        "norm, so the step learns nothing. Remove such pairs (look at them after truncation, too), "
        "or use rules.Median().",
        RuntimeWarning,
        stacklevel=2,
    )
    return True
