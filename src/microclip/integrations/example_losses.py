"""Per-example losses for models of transformers, which return the mean of them.

A single pass needs one loss per example. For classifiers, language models and CTC these follow
from the logits. They are used only if the loss is transformers' own, and only if their mean has
the value and the gradient of the Trainer's loss (`trainer_checks`): compared on the first batch,
the 2nd, 4th, 8th ... and whenever model, settings or inputs change. All other losses are streamed.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from microclip.integrations.trainer_checks import DryRun, loss_fingerprint, why_not_stock_loss
from microclip.microbatches import Domains, cut
from microclip.user_warnings import warn

IGNORE_INDEX = -100  # labels that transformers' losses leave out
LOSS_ONLY_FROM = 8  # from this batch on, checks compare losses but no longer gradients
SCALE = "microclip_scale"  # travels with the examples of a batch, wherever they are cut

LossMean = Literal["microbatch", "example", "step"]  # whose labels a loss is the mean over
LOSS_MEANS = ("microbatch", "example", "step")

logger = logging.getLogger("microclip")


class LossKind(Protocol):
    """A loss that a model averages over its batch."""

    def sums(self, outputs: Any, inputs: dict[str, Any]) -> Tensor:
        """Return, per example, the sum of the terms that are averaged."""

    def counts(self, labels: Tensor) -> Tensor | None:
        """Return, per example, the number of these terms; None if the model sums them."""


class CrossEntropy:
    """Cross-entropy with one label per example or one per token.

    Args:
        shifted: Whether each token predicts the next one.
        virtual_tokens: How many tokens the model puts before each text (prompt tuning). The last
            of them predicts the text's first token, which is then a label like all others.
    """

    def __init__(self, shifted: bool, virtual_tokens: int = 0) -> None:
        self.shifted, self.virtual_tokens = shifted, virtual_tokens

    def sums(self, outputs: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the cross-entropy of each example, summed over its labels."""
        logits, labels = outputs["logits"], self._targets(inputs["labels"])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.shifted:
            logits = logits[:, :-1]
        if labels.dim() == 1:
            return self._terms(logits, labels)
        logits = logits[:, logits.shape[1] - labels.shape[1] :] if self.virtual_tokens else logits
        losses = self._terms(logits.flatten(0, 1), labels.flatten())
        return losses.view(labels.shape).sum(1)

    def counts(self, labels: Tensor) -> Tensor:
        """Return how many labels of each example count."""
        return (self._targets(labels) != IGNORE_INDEX).reshape(len(labels), -1).sum(1)

    def _terms(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")

    def _targets(self, labels: Tensor) -> Tensor:
        return labels[:, 1:] if self.shifted and not self.virtual_tokens else labels


class Ctc:
    """Connectionist temporal classification, averaged per symbol of the transcript or summed."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config

    def sums(self, outputs: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the loss of each utterance."""
        logits, labels = outputs["logits"], inputs["labels"]
        real = (labels != IGNORE_INDEX) & (labels != self.config.pad_token_id)
        lengths = real.sum(1)
        losses = F.ctc_loss(
            F.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1),
            labels.masked_select(real),
            self._frames(inputs, logits),
            lengths,
            blank=self.config.pad_token_id,
            reduction="none",
            zero_infinity=self.config.ctc_zero_infinity,
        )
        return losses if self.counts(labels) is None else losses / lengths.clamp(min=1)

    def counts(self, labels: Tensor) -> Tensor | None:
        """Return 1 per utterance, or None if the model sums over utterances."""
        return None if self.config.ctc_loss_reduction == "sum" else torch.ones_like(labels[:, 0])

    def _frames(self, inputs: dict[str, Any], logits: Tensor) -> Tensor:
        mask = inputs.get("attention_mask")
        if mask is None:
            return torch.full((len(logits),), logits.shape[1], device=logits.device)
        frames: Tensor = self.model._get_feat_extract_output_lengths(mask.sum(-1)).long()
        return frames


class ExampleLosses:
    """Per-example losses whose mean over a micro-batch is the loss the model returns for it.

    Args:
        kind: The loss of the model.
        settings: Further arguments of the model's forward.
    """

    def __init__(self, kind: LossKind, **settings: Any) -> None:
        self.kind, self.settings = kind, settings

    def add_scales(
        self,
        inputs: dict[str, Any],
        b: int | None,
        domains: Domains | None,
        mean: LossMean = "microbatch",
        step: float = 1.0,
    ) -> None:
        """Add to a batch the factor of each example's sum, given how the batch will be cut.

        A micro-batch of n examples with c labels that count has the loss sum / c, which is the
        mean over its examples of their sums times n / c. If an example's own mean is wanted, the
        factor is 1 over its number of labels; with a mean over the step it is the same for all.
        """
        labels = inputs["labels"]
        wide = torch.float32 if labels.device.type == "mps" else torch.float64
        scales = torch.full((len(labels),), step, device=labels.device, dtype=wide)
        counts = self.kind.counts(labels)
        if mean != "microbatch":
            if mean == "example" and counts is not None:
                scales = scales / counts.clamp(min=1)
            inputs[SCALE] = scales
            return
        microbatches = cut(labels, b, domains=domains)
        place = {row: j for j, microbatch in enumerate(microbatches) for row in microbatch.ids}
        groups = torch.tensor([place[row] for row in range(len(labels))], device=labels.device)
        sizes = [float(m.size) for m in microbatches]
        scales = torch.tensor(sizes, device=labels.device, dtype=wide)
        if counts is not None:
            scales /= torch.zeros_like(scales).index_add_(0, groups, counts.to(wide)).clamp(min=1)
        inputs[SCALE] = scales[groups]

    def shares(self, inputs: dict[str, Any]) -> Tensor | None:
        """Return each example's labels relative to the mean over the step, if that is its scale."""
        scales: Tensor = inputs[SCALE]
        counts = self.kind.counts(inputs["labels"])
        return None if counts is None else scales * counts

    def factors(self, inputs: dict[str, Any]) -> Tensor:
        """Return what an example's own mean loss is multiplied by, after `add_scales`.

        Long texts have larger shares of the loss, which says nothing about how wrong they are.
        """
        scales: Tensor = inputs[SCALE]
        counts = self.kind.counts(inputs["labels"])
        return scales if counts is None else scales * counts.clamp(min=1)

    def __call__(self, model: nn.Module, inputs: dict[str, Any], ledger: Any = None) -> Tensor:
        """Return one loss per example; the ledger, if any, gets what a classifier predicts."""
        inputs = dict(inputs)
        scales: Tensor = inputs.pop(SCALE)
        outputs = model(**_without_labels(model, inputs), **self.settings)
        if ledger is not None and inputs["labels"].dim() == 1:
            ledger.record_predictions(outputs["logits"], inputs["labels"])
        sums = self.kind.sums(outputs, inputs)
        return sums * scales.to(sums.dtype)


class ExampleLossFinder:
    """Finds out how to compute a Trainer's loss per example, and keeps checking that it holds."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.reason = ""  # why there are no per-example losses
        self._found: ExampleLosses | None = None
        self._fingerprint: tuple[Any, ...] | None = None  # of the loss that was checked
        self._decided = False  # a check has said yes or no
        self._seen = 0

    def find(self, model: nn.Module, inputs: dict[str, Any]) -> ExampleLosses | None:
        """Return the per-example losses if their mean is what the Trainer trains on."""
        inner = self.trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
        reason = self.why_not(model, inner, inputs)
        if reason is not None:
            self._fingerprint = None
            self._give_up(reason)
            return None
        fingerprint = self.fingerprint(inner, inputs)
        if not _equal(fingerprint, self._fingerprint):
            self._found, self._decided, self._seen = None, False, 0
        self._seen += 1
        if not self._decided or (self._found and not self._seen & (self._seen - 1)):
            self._check(inner, inputs)
            fingerprint = self.fingerprint(inner, inputs)  # a first pass may fill in settings
        self._fingerprint = fingerprint
        return self._found

    def why_not(self, model: nn.Module, inner: nn.Module, inputs: dict[str, Any]) -> str | None:
        """Return why the loss may be one whose examples' losses are not known, or None."""
        return why_not_stock_loss(self.trainer, model, inner, inputs)

    def fingerprint(self, inner: nn.Module, inputs: dict[str, Any]) -> tuple[Any, ...]:
        """Return what the loss depends on besides weights."""
        return loss_fingerprint(inner, inputs)

    def stock_loss(self, dry: DryRun, inputs: dict[str, Any]) -> Tensor:
        """Return the Trainer's own loss of a batch."""
        return dry.stock_loss(inputs)

    def candidates(self, inner: nn.Module, inputs: dict[str, Any]) -> list[ExampleLosses]:
        """Return the per-example losses to try; the check decides which one it is."""
        return [ExampleLosses(kind) for kind in self._kinds(inner, inputs)]

    def _check(self, inner: nn.Module, inputs: dict[str, Any]) -> None:
        with_gradient = self._found is None or self._seen < LOSS_ONLY_FROM
        try:
            dry = DryRun(self.trainer, inner)
            theirs = dry.run(partial(self.stock_loss, dry, inputs), with_gradient)
        except Exception as error:  # the step itself will report it
            self._decide(None, f"the Trainer's own loss could not be computed: {error}")
            return
        if not theirs.is_finite:  # wait for another batch
            return
        if dry.extra_losses:
            self._decide(None, f"the model adds {dry.extra_losses[0]!r} to its loss")
            return
        reason = "their mean differs from the loss that the Trainer trains on"
        for each in [self._found] if self._found else self.candidates(inner, inputs):
            try:
                ours = dry.run(partial(_mean, each, inner, inputs), with_gradient, theirs.loss)
            except Exception as error:  # usually shapes of logits and labels that do not match
                reason = f"they cannot be computed from the logits: {error}"
                continue
            if ours.agrees_with(theirs, dry.bits):
                self._decide(each, "")
                return
        self._decide(None, reason)

    def _decide(self, found: ExampleLosses | None, reason: str) -> None:
        if found is None and self._found is not None:
            warn(
                f"Per-example losses agreed with the Trainer's loss on earlier batches but no "
                f"longer do: {reason}. They are not used from here on, but some steps since the "
                "last check may have been taken on a loss other than the Trainer's."
            )
        self._decided = True
        if found is None:
            self._give_up(reason)
        self._found = found

    def _give_up(self, reason: str) -> None:
        self._found = None
        if reason != self.reason:
            logger.info("Per-example losses are not available: %s.", reason)
        self.reason = reason

    def _kinds(self, model: Any, inputs: dict[str, Any]) -> list[LossKind]:
        """Return the kinds of loss to try; the check decides which one it is."""
        if inputs["labels"].dim() == 1:
            return [CrossEntropy(shifted=False)]
        if hasattr(getattr(model, "config", None), "ctc_loss_reduction"):
            return [Ctc(model)] if type(model).__name__.endswith("ForCTC") else []
        # the Trainer knows from the class name whether a model shifts labels, but not for every one
        likely = bool(getattr(self.trainer, "_loss_shifts_labels", False))
        virtual = virtual_tokens(model)
        return [CrossEntropy(shifted, virtual) for shifted in (likely, not likely)]


def virtual_tokens(model: nn.Module) -> int:
    """Return how many tokens an adapter of peft puts before each text, into the logits as well."""
    config: Any = getattr(model, "active_peft_config", None)
    kind = str(getattr(getattr(config, "peft_type", None), "value", ""))
    in_front = kind in ("PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING")
    return int(config.num_virtual_tokens) if in_front else 0


def may_lack_labels(inputs: dict[str, Any]) -> bool:
    """Whether an example has no label that counts, so that a whole micro-batch may have none."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return False
    if any("label" in name for name in inputs if name != "labels"):
        return False
    return not bool(_counted(labels).any(1).all())


def zero_if_no_labels(loss: Tensor, labels: Tensor, model: nn.Module) -> Tensor:
    """Return a micro-batch's loss, or 0 where a mean over no labels at all came out as NaN."""
    if bool(_counted(labels).any()) or bool(loss.isfinite().all()):
        return loss
    zeros = [parameter.sum() * 0.0 for parameter in model.parameters() if parameter.requires_grad]
    return torch.stack([zero.to(loss.device, loss.dtype) for zero in zeros]).sum()


def _counted(labels: Tensor) -> Tensor:
    # Leave out the first label of a text: if the model shifts labels no token predicts it, and if
    # it does not, the loss is finite anyway.
    labels = labels[:, 1:] if labels.dim() == 2 else labels
    return (labels != IGNORE_INDEX).reshape(len(labels), -1)


def _mean(each: ExampleLosses, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    inputs = dict(inputs)
    each.add_scales(inputs, None, None)
    return each(model, inputs).mean()


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # a tensor or an array among the settings
        return False


def _without_labels(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs without labels, so that the model does not compute its own loss as well."""
    rest = {name: value for name, value in inputs.items() if name != "labels"}
    inner = getattr(model, "module", model)
    shift = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
    if shift is not None and "decoder_input_ids" not in rest:
        rest["decoder_input_ids"] = shift(labels=inputs["labels"])
    return rest
