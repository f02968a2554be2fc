"""The losses of single examples, where a model of transformers gives their mean.

A single pass needs one loss per example. For classifiers, language models and CTC they follow from
the logits. That is done only where the loss is transformers' own (`stock`), and only if it has the
value and the gradient of what the Trainer would train on (`loss_check`): tried on the first batch,
the 2nd, 4th, 8th ... and whenever model, settings or inputs change. Anything else is streamed.
"""

from __future__ import annotations

import logging
import warnings
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from microclip.integrations.loss_check import Passes
from microclip.integrations.stock import loss_state, why_unknown
from microclip.microbatches import Domains, cut

IGNORED = -100  # a label that transformers' losses leave out
VALUES_ALONE = 8  # from this batch on, checks compare losses and leave out their gradients
SHARE = "microclip_share"  # goes with the examples of a batch, wherever they are cut

logger = logging.getLogger("microclip")


class Kind(Protocol):
    """A loss that a model takes the mean of."""

    def sums(self, outputs: Any, inputs: dict[str, Any]) -> Tensor:
        """Return, per example, the sum of what the mean is over."""

    def counts(self, labels: Tensor) -> Tensor | None:
        """Return, per example, how much that is; None: the model gives the sum itself."""


class Labels:
    """Cross-entropy, of one label per example or of one per token."""

    def __init__(self, shifted: bool) -> None:
        self.shifted = shifted  # a token's label is the next one

    def sums(self, outputs: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the cross-entropies of each example's labels, added up."""
        logits, labels = outputs["logits"].float(), self._counted(inputs["labels"])
        if self.shifted:
            logits = logits[:, :-1]
        if labels.dim() == 1:
            return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        flat = logits.flatten(0, 1), labels.flatten()
        losses = F.cross_entropy(*flat, ignore_index=IGNORED, reduction="none")
        return losses.view(labels.shape).sum(1)

    def counts(self, labels: Tensor) -> Tensor:
        """Return how many labels of each example count."""
        return (self._counted(labels) != IGNORED).reshape(len(labels), -1).sum(1)

    def _counted(self, labels: Tensor) -> Tensor:
        return labels[:, 1:] if self.shifted else labels


class Ctc:
    """Connectionist temporal classification, per symbol of the transcript or summed up."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config

    def sums(self, outputs: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the loss of each utterance."""
        logits, labels = outputs["logits"], inputs["labels"]
        real = (labels != IGNORED) & (labels != self.config.pad_token_id)
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
        """Return 1 for each utterance, unless the model adds them up."""
        return None if self.config.ctc_loss_reduction == "sum" else torch.ones_like(labels[:, 0])

    def _frames(self, inputs: dict[str, Any], logits: Tensor) -> Tensor:
        mask = inputs.get("attention_mask")
        if mask is None:
            return torch.full((len(logits),), logits.shape[1], device=logits.device)
        frames: Tensor = self.model._get_feat_extract_output_lengths(mask.sum(-1)).long()
        return frames


class ExampleLosses:
    """A model's loss, example by example: the mean over a micro-batch is what the model gives."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def share(self, inputs: dict[str, Any], b: int | None, domains: Domains | None) -> None:
        """Put into a batch what each example's sum is multiplied with, as micro-batches are cut.

        The mean over a micro-batch of size n, with c labels that count, is that of its sums n / c.
        """
        labels = inputs["labels"]
        microbatches = cut(labels, b, domains=domains)
        place = {row: j for j, microbatch in enumerate(microbatches) for row in microbatch.ids}
        groups = torch.tensor([place[row] for row in range(len(labels))], device=labels.device)
        sizes = torch.tensor([float(m.size) for m in microbatches], device=labels.device)
        counts = self.kind.counts(labels)
        if counts is not None:
            sizes /= torch.zeros_like(sizes).index_add_(0, groups, counts.float()).clamp(min=1)
        inputs[SHARE] = sizes[groups]

    def __call__(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return one loss per example."""
        inputs = dict(inputs)
        shares: Tensor = inputs.pop(SHARE)
        outputs = model(**_without_labels(model, inputs))
        return self.kind.sums(outputs, inputs) * shares


class ExampleLossFinder:
    """Finds out, and keeps an eye on, how a Trainer's loss follows from its examples' losses."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.reason = ""  # why there are none
        self._found: ExampleLosses | None = None
        self._state: tuple[Any, ...] | None = None  # what they were found for
        self._settled = False  # a check has told yes or no
        self._seen = 0

    def find(self, model: nn.Module, inputs: dict[str, Any]) -> ExampleLosses | None:
        """Return the losses of single examples, if their mean is what the Trainer trains on."""
        inner = self.trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
        unknown = why_unknown(self.trainer, model, inner, inputs)
        if unknown is not None:
            self._state = None
            self._give_up(unknown)
            return None
        state = loss_state(inner, inputs)
        if not _equal(state, self._state):
            self._found, self._settled, self._seen = None, False, 0
        self._seen += 1
        if not self._settled or (self._found and not self._seen & (self._seen - 1)):
            self._check(inner, inputs)
            state = loss_state(inner, inputs)  # a first pass may settle what was left open
        self._state = state
        return self._found

    def _check(self, inner: nn.Module, inputs: dict[str, Any]) -> None:
        by_gradient = self._found is None or self._seen < VALUES_ALONE
        try:
            passes = Passes(self.trainer, inner)
            theirs = passes.of(partial(passes.stock_loss, inputs), by_gradient)
        except Exception as error:  # the step itself will say what is wrong
            self._settle(None, f"the Trainer's own loss could not be had: {error}")
            return
        if not theirs.is_finite:  # another batch may tell
            return
        if passes.extra_losses:
            self._settle(None, f"the model adds {passes.extra_losses[0]!r} to its loss")
            return
        reason = "their mean is another loss than the Trainer trains on"
        for kind in [self._found.kind] if self._found else self._kinds(inner, inputs):
            each = ExampleLosses(kind)
            try:
                ours = passes.of(partial(_mean, each, inner, inputs), by_gradient, theirs.loss)
            except Exception as error:  # logits and labels of other shapes, most often
                reason = f"they do not follow from the logits: {error}"
                continue
            if ours.is_same(theirs, passes.bits):
                self._settle(each, "")
                return
        self._settle(None, reason)

    def _settle(self, found: ExampleLosses | None, reason: str) -> None:
        if found is None and self._found is not None:
            warnings.warn(
                f"Since an earlier batch something has changed: {reason}. The losses of single "
                "examples are not used any more, but some steps since the last check may have been "
                "taken on another loss than the Trainer's.",
                RuntimeWarning,
                stacklevel=8,
            )
        self._settled = True
        if found is None:
            self._give_up(reason)
        self._found = found

    def _give_up(self, reason: str) -> None:
        self._found = None
        if reason != self.reason:
            logger.info("There are no losses of single examples: %s.", reason)
        self.reason = reason

    def _kinds(self, model: Any, inputs: dict[str, Any]) -> list[Kind]:
        """Return what the loss may be; a check tells which one it is."""
        if inputs["labels"].dim() == 1:
            return [Labels(shifted=False)]
        if hasattr(getattr(model, "config", None), "ctc_loss_reduction"):
            return [Ctc(model)] if type(model).__name__.endswith("ForCTC") else []
        # the Trainer knows by the name of a model's class whether it shifts labels, but not of all
        likely = bool(getattr(self.trainer, "_loss_shifts_labels", False))
        return [Labels(shifted=likely), Labels(shifted=not likely)]


def _mean(each: ExampleLosses, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    inputs = dict(inputs)
    each.share(inputs, None, None)
    return each(model, inputs).mean()


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # a tensor or an array among the settings
        return False


def _without_labels(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs such that a model does not calculate a loss of its own beside ours."""
    rest = {name: value for name, value in inputs.items() if name != "labels"}
    inner = getattr(model, "module", model)
    shift = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
    if shift is not None and "decoder_input_ids" not in rest:
        rest["decoder_input_ids"] = shift(labels=inputs["labels"])
    return rest


def has_gaps(inputs: dict[str, Any]) -> bool:
    """Whether some example has no label that counts, so that a micro-batch may have none."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return False
    if any("label" in name for name in inputs if name != "labels"):
        return False
    return not bool(_counting(labels).any(1).all())


def zero_for_nothing(loss: Tensor, labels: Tensor, model: nn.Module) -> Tensor:
    """Return a micro-batch's loss, or 0 if no label counts: a mean over nothing is not a number."""
    if bool(_counting(labels).any()) or bool(loss.isfinite().all()):
        return loss
    zeros = [parameter.sum() * 0.0 for parameter in model.parameters() if parameter.requires_grad]
    return torch.stack([zero.to(loss.device, loss.dtype) for zero in zeros]).sum()


def _counting(labels: Tensor) -> Tensor:
    # a text's first label is one that no token predicts, or its loss is finite
    labels = labels[:, 1:] if labels.dim() == 2 else labels
    return (labels != IGNORED).reshape(len(labels), -1)
