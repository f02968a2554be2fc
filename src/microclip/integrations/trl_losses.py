"""Per-example losses of TRL's trainers: a text's, or that of a pair of answers.

TRL stacks the chosen answers of a batch on top of the rejected ones. Here the two of a pair stay
together, in tensors of shape (pairs, 2, tokens), so that a batch can be cut between pairs. The
formulas are used only where they agree with TRL's own loss (`example_losses`); all else is
streamed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from microclip.integrations.example_losses import (
    IGNORE_INDEX,
    CrossEntropy,
    ExampleLosses,
    ExampleLossFinder,
    LossMean,
    virtual_tokens,
)
from microclip.integrations.trainer_checks import DryRun, loss_settings, why_not_stock_parts
from microclip.microbatches import Domains

PAIRED = ("input_ids", "attention_mask", "completion_mask")  # two rows per pair, in TRL's batches
REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")


class PairCollator:
    """Calls one of TRL's collators for pairs, and puts the two answers of each pair together."""

    def __init__(self, collator: Callable[[Any], Any]) -> None:
        self.collator = collator

    def __call__(self, features: Any) -> Any:
        """Make a batch."""
        batch, pairs = dict(self.collator(features)), len(features)
        for name, value in batch.items():
            if not isinstance(value, Tensor):
                continue
            if name in PAIRED and len(value) == 2 * pairs:
                batch[name] = value.view(2, pairs, *value.shape[1:]).transpose(0, 1)
            elif name in PAIRED or len(value) != pairs:
                raise NotImplementedError(
                    f"The data collator made {len(value)} rows of {name!r} out of {pairs} pairs, "
                    "so microclip cannot know which belong to which. Use TRL's own collator, or "
                    "one that stacks all chosen answers on top of all rejected ones."
                )
        return batch


def stacked(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch of pairs as TRL has it: all chosen answers, then all rejected ones."""
    return {
        name: value.transpose(0, 1).flatten(0, 1) if name in PAIRED else value
        for name, value in batch.items()
    }


class DftEntropy(CrossEntropy):
    """Cross-entropy weighted by the probability of each token: SFT's loss_type="dft"."""

    def _terms(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = super()._terms(logits, labels)
        return losses * (-losses).exp().detach()


class PairLosses(ExampleLosses):
    """The losses of pairs; their mean is that of TRL's trainers for pairs."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def add_scales(
        self,
        inputs: dict[str, Any],
        b: int | None,
        domains: Domains | None,
        mean: LossMean = "microbatch",
        step: float = 1.0,
    ) -> None:
        """Do nothing: a pair's loss counts as it is."""

    def factors(self, inputs: dict[str, Any]) -> Tensor:
        """Return 1 for each pair."""
        return torch.ones(len(inputs["input_ids"]), device=inputs["input_ids"].device)


class RewardLosses(PairLosses):
    """-log sigmoid(chosen reward - rejected reward - margin), and RewardTrainer's centering."""

    def __call__(self, model: nn.Module, inputs: dict[str, Any], ledger: Any = None) -> Tensor:
        """Return one loss per pair."""
        rows = {name: inputs[name].flatten(0, 1) for name in PAIRED if name in inputs}
        rewards: Tensor = model(**rows, use_cache=False).logits.view(-1, 2)
        gap = rewards[:, 0] - rewards[:, 1]
        losses = -F.logsigmoid(gap - inputs["margin"] if "margin" in inputs else gap)
        center = self.trainer.args.center_rewards_coefficient
        if center is not None:
            losses = losses + center * rewards.sum(1).square()
        self.trainer.note(
            accuracy=(gap > 0).float(), margin=gap, mean_reward=rewards,
            min_reward=rewards.min(), max_reward=rewards.max(),
        )  # fmt: skip
        return losses


class PreferenceLosses(PairLosses):
    """Losses of the log-probabilities of a pair, compared with the reference model's: DPO."""

    def add_scales(
        self,
        inputs: dict[str, Any],
        b: int | None,
        domains: Domains | None,
        mean: LossMean = "microbatch",
        step: float = 1.0,
    ) -> None:
        """Add the log-probabilities of the reference model to a batch."""
        if not all(name in inputs for name in REFERENCE):
            trainer = self.trainer
            reference = trainer.model if trainer.ref_model is None else trainer.ref_model
            found = trainer.compute_ref_log_probs(reference, stacked(inputs))
            inputs.update(zip(REFERENCE, found, strict=True))

    def __call__(self, model: nn.Module, inputs: dict[str, Any], ledger: Any = None) -> Tensor:
        """Return one loss per pair."""
        trainer = self.trainer
        ids, mask = (inputs[name].flatten(0, 1) for name in ("input_ids", "completion_mask"))
        padding = inputs["attention_mask"].flatten(0, 1)
        outputs = model(input_ids=ids, attention_mask=padding, use_cache=False)
        labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
        # an adapter's virtual tokens come first, and no label is theirs
        logits = {"logits": outputs.logits[:, -ids.shape[1] :]}
        logps = -CrossEntropy(shifted=True).sums(logits, {"labels": labels})
        policy = logps.view(-1, 2)
        ratios = policy - torch.stack([inputs[name] for name in REFERENCE], dim=1)
        losses = sum(
            weight * PAIR_LOSSES[name](trainer, ratios, inputs["completion_mask"].sum(2))
            for name, weight in zip(trainer.loss_types, trainer.loss_weights, strict=True)
        )
        rewards = trainer.beta * ratios
        gap = rewards[:, 0] - rewards[:, 1]
        trainer.note(**{
            "rewards/chosen": rewards[:, 0], "rewards/rejected": rewards[:, 1],
            "rewards/accuracies": (gap > 0).float(), "rewards/margins": gap,
            "logps/chosen": policy[:, 0], "logps/rejected": policy[:, 1],
        })  # fmt: skip
        assert isinstance(losses, Tensor)
        return losses


def _robust(trainer: Any, ratios: Tensor, lengths: Tensor) -> Tensor:
    gap, smoothing = float(trainer.beta) * _gap(ratios), float(trainer.label_smoothing)
    kept, flipped = (1 - smoothing) * F.logsigmoid(gap), smoothing * F.logsigmoid(-gap)
    return (flipped - kept) / (1 - 2 * smoothing)


def _gap(ratios: Tensor) -> Tensor:
    return ratios[:, 0] - ratios[:, 1]


def _per_token(ratios: Tensor, lengths: Tensor) -> Tensor:
    return _gap(ratios / lengths.clamp(min=1))


# DPOConfig(loss_type=...): of the log-ratios (pairs, 2) and the lengths of the answers (pairs, 2)
PAIR_LOSSES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "sigmoid": lambda trainer, r, n: -F.logsigmoid(trainer.beta * _gap(r)),
    "hinge": lambda trainer, r, n: F.relu(1 - trainer.beta * _gap(r)),
    "ipo": lambda trainer, r, n: (_per_token(r, n) - 1 / (2 * trainer.beta)).square(),
    "sigmoid_norm": lambda trainer, r, n: -F.logsigmoid(trainer.beta * _per_token(r, n)),
    "robust": _robust,
    "bco_pair": lambda trainer, r, n: (
        -F.logsigmoid(trainer.beta * r[:, 0]) - F.logsigmoid(-trainer.beta * r[:, 1])
    ),
    "apo_zero": lambda trainer, r, n: (
        1 - torch.sigmoid(trainer.beta * r[:, 0]) + torch.sigmoid(trainer.beta * r[:, 1])
    ),
}
SETTINGS = (  # of a trainer, that its loss depends on
    "beta", "loss_types", "loss_weights", "label_smoothing", "ld_alpha", "use_weighting",
    "f_divergence_type", "f_alpha_divergence_coef", "precompute_ref_logps", "aux_loss_enabled",
)  # fmt: skip


class TrlLossFinder(ExampleLossFinder):
    """Finds out how to compute the loss of one of TRL's trainers per text or per pair."""

    def why_not(self, model: nn.Module, inner: nn.Module, inputs: dict[str, Any]) -> str | None:
        """Return why per-example losses are not known, or None."""
        trainer = self.trainer
        reason = why_not_stock_parts(trainer, model, inner)
        if reason is not None:
            return reason
        if getattr(trainer, "aux_loss_enabled", False):
            return "the model adds an auxiliary loss of its experts"
        if trainer.args.use_liger_kernel:
            return "use_liger_kernel is on"
        usual = {*PAIRED, *REFERENCE, "margin"} if trainer.pairs else {*PAIRED[:2], "labels"}
        other = next((name for name in inputs if name not in usual), None)
        if other is not None:
            return f"the batches have an input {other!r}"
        return self._why_not_pairs() if hasattr(trainer, "loss_types") else None

    def _why_not_pairs(self) -> str | None:
        trainer = self.trainer
        for name in trainer.loss_types:
            if name not in PAIR_LOSSES:
                return f"loss_type={name!r} is not one of {', '.join(PAIR_LOSSES)}"
        for name, usual in (
            ("f_divergence_type", "reverse_kl"), ("ld_alpha", None), ("use_weighting", False)
        ):  # fmt: skip
            if getattr(trainer, name) != usual:
                return f"{name} is {getattr(trainer, name)!r}"
        return None

    def fingerprint(self, inner: nn.Module, inputs: dict[str, Any]) -> tuple[Any, ...]:
        """Return what the loss depends on besides weights."""
        trainer, args = self.trainer, self.trainer.args
        chosen = [getattr(args, "loss_type", None), getattr(args, "center_rewards_coefficient", 0)]
        names = frozenset(inputs) - set(REFERENCE)
        settings = [repr(getattr(trainer, name, None)) for name in SETTINGS]
        return (*loss_settings(inner), names, repr(chosen), *settings)

    def stock_loss(self, dry: DryRun, inputs: dict[str, Any]) -> Tensor:
        """Return TRL's own loss of a batch."""
        loss: Tensor = self.trainer.stock_loss(dry.model, inputs)
        return loss

    def candidates(self, inner: nn.Module, inputs: dict[str, Any]) -> list[ExampleLosses]:
        """Return the per-example losses of the trainer."""
        trainer = self.trainer
        if trainer.pairs:
            return [(PreferenceLosses if hasattr(trainer, "loss_types") else RewardLosses)(trainer)]
        kind = DftEntropy if trainer.args.loss_type == "dft" else CrossEntropy
        return [ExampleLosses(kind(True, virtual_tokens(inner)), use_cache=False)]

    def _check(self, inner: nn.Module, inputs: dict[str, Any]) -> None:
        with self.trainer.leaving_no_trace():
            super()._check(inner, inputs)
