"""Mistakes in training loops that give a wrong gradient without an error, noticed and named.

Each is warned of once per Clipper, with its remedy. Nothing here runs a model, and nothing changes
a result: it looks at `.grad`, at the graphs of losses and at the shapes that modules get.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from microclip import multitensor, time_first
from microclip.microbatches import Cuts, tensors_of

# what a sum may be over that is not over examples, by what it is made of
NO_EXAMPLES = frozenset(f"{name}Backward0" for name in ("Stack", "Cat", "Mul"))
SUM = 2  # what graphs have for reduction="sum"

# what the gradient of a mean is called in graphs
MEANS = frozenset(
    f"{name}Backward0"
    for name in (
        "Mean", "NllLoss", "NllLoss2D", "MseLoss", "SmoothL1Loss", "HuberLoss",
        "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "SoftMarginLoss",
        "MultiMarginLoss", "MultilabelMarginLoss",
    )
)  # fmt: skip


class Mistakes:
    """Looks for mistakes in the steps of one Clipper."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._told: set[str] = set()
        self._repeats = False  # whether the batch has one example several times
        self._smallest: nn.Parameter | None = None  # a parameter, to look at its gradient
        self._deposited: Tensor | None = None  # that, as it was put there

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(message, RuntimeWarning, stacklevel=5)

    def at_start(self, step: int) -> None:
        """Notice gradients of the step before, to which this step's would be added."""
        if step == 0 or step & (step + 1) or self._smallest is None:
            return
        gradient = self._smallest.grad
        if gradient is None or gradient is not self._deposited:
            return
        if multitensor.on_host(gradient) and bool(gradient.any()):
            self._tell(
                "not empty",
                "`.grad` still holds the gradient of the step before, and this step's is added to "
                "it. Call optimizer.zero_grad() before each backward(). To put several batches "
                "into one step, call fold(loss_fn, batch) for each and finish() once: only then "
                "are they clipped together.",
            )

    def after(self, parameters: dict[str, nn.Parameter]) -> None:
        """Remember a gradient that was put into `.grad`, of a parameter that takes no memory."""
        if self._smallest is None or self._smallest.grad is None:
            reached = [p for p in parameters.values() if p.grad is not None]
            self._smallest = min(reached, key=Tensor.numel, default=None)
        self._deposited = None if self._smallest is None else self._smallest.grad

    def equal_losses(self, losses: Tensor | None, norms: Tensor, step: int) -> None:
        """Notice micro-batches that all have the same loss and gradient."""
        if step & (step + 1) or losses is None or len(norms) < 2 or not multitensor.on_host(norms):
            return
        same_losses = bool((losses == losses[0]).all())
        close = (norms - norms[0]).abs() <= 1e-9 * norms[0]
        if same_losses and float(norms[0]) > 0 and bool(close.all()) and not self._repeats:
            self._tell(
                "equal",
                f"All {len(norms)} micro-batches have the same loss ({float(losses[0]):.6g}) and "
                "the same gradient norm. Does loss_fn use the whole batch instead of its "
                "argument? It is called with one micro-batch at a time.",
            )

    def divided(self, loss: Tensor, parts: int | None = None) -> None:
        """Notice a mean loss that was divided by a number of steps, or of parts if it is given."""
        inner, divisor = _division(loss)
        if inner is None or inner.name() not in MEANS or _is_sum(inner):
            return
        if parts is not None and divisor != parts:
            return
        shown = "" if divisor is None else f" by {divisor:.6g}"
        self._tell(
            "divided",
            f"The loss is a mean that was divided{shown}. If that is the number of accumulation "
            "steps, the gradient comes out too small by it, since the mean over micro-batches is "
            "taken by finish(). Do not divide, or say fold(loss_scale=1 / steps).",
        )

    def in_batch(self, cuts: Cuts, step: int) -> None:
        """Notice what is handed on whole though it seems to belong to the examples."""
        if step & (step + 1) or len(cuts) < 2:
            return
        one, other = (list(tensors_of(each.batch)) for each in cuts[:2])
        pairs = zip(one, other, strict=True)
        self._repeats = all(
            multitensor.on_host(a) and torch.equal(a, b) for (_, a), (_, b) in pairs
        )
        for name, count in cuts.numbers_per_example:
            self._tell(
                "whole",
                f"{name} holds {count} numbers, as many as there are examples, but is no tensor: "
                "loss_fn gets all of them with every micro-batch. Make it a tensor, which is cut "
                "with the examples.",
            )

    def in_loss(self, loss: Tensor, size: int, cuts: Cuts) -> None:
        """Notice a loss that is no mean over the examples it was given.

        Args:
            loss: Of a micro-batch.
            size: Its size.
            cuts: All micro-batches.
        """
        examples = cuts.examples
        self.divided(loss, len(cuts))
        inner, divisor = _division(loss)
        is_sum = size > 1 and _is_sum(loss.grad_fn, size)
        if inner is not None and divisor == examples != size and _is_sum(inner, size):
            is_sum = True
        if is_sum:
            self._tell(
                "sum",
                f"The loss of a micro-batch of {size} examples is a sum over them"
                + ("" if inner is None else f", divided by the {examples} of the whole batch")
                + ". It must be the mean over the examples that loss_fn is given, or one loss per "
                'example: use reduction="mean" or "none".',
            )

    def watching(self, cuts: Cuts, step: int) -> AbstractContextManager[None]:
        """Inside the block, in the first step, notice sequences whose time was cut."""
        if step or len(cuts) < 2:
            return nullcontext()
        counts = {*cuts.sizes, cuts.examples}
        return time_first.watching(self._model, counts, partial(self._tell, "time first"))


def _division(loss: Tensor) -> tuple[Any, float | None]:
    """Return what a loss was divided from, and by which number; None where it was not."""
    node: Any = loss.grad_fn
    if node is None or node.name() != "DivBackward0":
        return None, None
    try:
        divisor = getattr(node, "_saved_other", None)
    except RuntimeError:  # after a backward pass, graphs do not tell
        divisor = None
    number = divisor.item() if isinstance(divisor, Tensor) and divisor.numel() == 1 else None
    return node.next_functions[0][0], number


def _is_sum(node: Any, size: int | None = None) -> bool:
    """Whether a node of a graph adds up; over so many examples, if that is asked."""
    if getattr(node, "_saved_reduction", None) == SUM:
        return True
    if node is None or node.name() != "SumBackward0" or size is None:
        return False
    inner = node.next_functions[0][0]
    if inner is None or inner.name() in NO_EXAMPLES:
        return False  # losses of several tasks, or weights that add up to one
    if inner.name() == "MeanBackward1" and 0 in inner._saved_dim:
        return False  # the mean over examples was taken before
    sizes: Any = getattr(node, "_saved_self_sym_sizes", None)
    return bool(sizes) and sizes[0] == size
