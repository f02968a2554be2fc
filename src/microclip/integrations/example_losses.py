"""The losses of single examples, where a model of transformers gives their mean.

A single pass needs one loss per example. For classifiers, language models and CTC they follow from
the logits. Whether their mean is what the model itself says is tried out on a batch now and then,
so a model with a loss of its own is streamed, and never trained on another one.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from microclip.microbatches import Domains, cut

IGNORED = -100  # a label that transformers' losses leave out
SHARE = "microclip_share"  # goes with the examples of a batch, wherever they are cut
TOLERANCE, HALF_TOLERANCE = 1e-5, 1e-2  # of a loss in 32 bits, and in 16

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
        self._seen = 0

    @classmethod
    def find(cls, trainer: Any, model: Any, inputs: dict[str, Any]) -> ExampleLosses | None:
        """Return them, if the loss that a Trainer asks of a model is of a known kind."""
        labels = inputs.get("labels")
        own_loss = trainer.compute_loss_func is not None or trainer.label_smoother is not None
        sharded = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
        if own_loss or sharded or not isinstance(labels, Tensor) or labels.is_floating_point():
            return None
        if hasattr(getattr(model, "config", None), "ctc_loss_reduction") and labels.dim() == 2:
            return cls(Ctc(model)) if type(model).__name__.endswith("ForCTC") else None
        return cls(Labels(shifted=trainer._loss_shifts_labels and labels.dim() == 2))

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

    @torch.no_grad()
    def agree(self, model: nn.Module, inputs: dict[str, Any]) -> bool:
        """Whether the model says so too; asked at the 1st, 2nd, 4th, 8th ... batch.

        Not only at the first: a head of zeros makes many losses equal.
        """
        self._seen += 1
        if self._seen & (self._seen - 1):
            return True
        training = [module for module in model.modules() if module.training]
        model.eval()  # what is drawn at random would differ
        try:
            given = model(**inputs)["loss"]
            tolerance = HALF_TOLERANCE if given.element_size() == 2 else TOLERANCE
            probe = dict(inputs)
            self.share(probe, None, None)
            found = self(model, probe).mean()
            return bool(torch.isclose(found, given.float(), rtol=tolerance, equal_nan=True))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            logger.info("The losses of single examples could not be had: %s", error)
            return False
        finally:
            for module in training:
                module.training = True


def _without_labels(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs such that a model does not calculate a loss of its own beside ours."""
    rest = {name: value for name, value in inputs.items() if name != "labels"}
    inner = getattr(model, "module", model)
    shift = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
    if shift is not None and "decoder_input_ids" not in rest:
        rest["decoder_input_ids"] = shift(labels=inputs["labels"])
    return rest
