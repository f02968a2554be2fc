"""Cross-entropy over a large vocabulary, one loss per example, without a table of all logits.

The logits of a few tokens at a time are enough to get their losses and gradients, so B x T x V
numbers never exist at once. Losses and gradients are those of `torch.nn.functional.cross_entropy`.
Knows nothing of engines; the single pass has a handler for `token_losses`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

ELEMENTS = 2**22  # logits at once, unless the caller decides
WIDE = (torch.float32, torch.float64)

Reduction = Literal["mean", "sum", "none"]


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: Reduction = "mean",
    shift: bool = False,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return one loss per example: the cross-entropy of `hidden @ weight.T + bias`.

    Args:
        hidden: What the head gets, (examples, tokens, width) or (examples, width).
        weight: The head's weight, (vocabulary, width); it may be that of the embeddings.
        labels: (examples, tokens) or (examples,).
        bias: The head's bias.
        reduction: Over the tokens of each example: "mean" over those that have a label, "sum", or
            "none" for a loss per token. An example without labels has a loss of 0.
        shift: Whether token t predicts label t + 1, as in language models.
        ignore_index: The label of tokens that have no loss.
        label_smoothing: As in `torch.nn.functional.cross_entropy`.
        softcap: Logits become softcap * tanh(logits / softcap), as in Gemma 2.
        chunk: Tokens whose logits are computed at once; None: about 4 million logits.

    >>> hidden, head = torch.randn(2, 5, 8), torch.nn.Linear(8, 1000, bias=False)
    >>> labels = torch.randint(0, 1000, (2, 5))
    >>> chunked_cross_entropy(hidden, head.weight, labels).shape
    torch.Size([2])
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", but got {reduction!r}.')
    if shift:
        if labels.dim() < 2:
            raise ValueError(
                f"shift=True needs labels of shape (examples, tokens), but got {labels.dim()} "
                "dimension."
            )
        hidden, labels = hidden[:, :-1], labels[:, 1:]
    losses = token_losses(
        hidden, weight, labels, bias, ignore_index=ignore_index, label_smoothing=label_smoothing,
        softcap=softcap, chunk=chunk,
    )  # fmt: skip
    if reduction == "none" or losses.dim() < 2:
        return losses
    losses = losses.flatten(1)
    if reduction == "sum":
        return losses.sum(1)
    return losses.sum(1) / (labels != ignore_index).flatten(1).sum(1).clamp(min=1)


def token_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return the cross-entropy of every token, in the shape of the labels."""
    head = Head(ignore_index, label_smoothing, softcap, chunk)
    if has_torch_function((hidden, weight, labels)):
        found: Tensor = handle_torch_function(
            token_losses, (hidden, weight, labels), hidden, weight, labels, bias,
            ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap,
            chunk=chunk,
        )  # fmt: skip
        return found
    head.check(hidden, weight, labels, bias)
    dtype = head.product_dtype(hidden)
    # as a matrix: what comes out of a custom function must not be a view
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    losses: Tensor = _TokenLosses.apply(flat, weight, bias, targets, head, dtype)  # type: ignore[no-untyped-call]
    return losses.view(labels.shape)


@dataclass(frozen=True)
class Head:
    """How logits become losses; see `chunked_cross_entropy`."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    chunk: int | None = None

    def check(self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
        """Raise if the tensors do not go together."""
        if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
            raise ValueError(
                "weight must have shape (vocabulary, width) with the width of hidden, but hidden "
                f"has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}."
            )
        if hidden.shape[:-1] != labels.shape:
            raise ValueError(
                f"labels must have shape {tuple(hidden.shape[:-1])}, one for each row of hidden, "
                f"but got {tuple(labels.shape)}."
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(
                f"bias must have shape {tuple(weight.shape[:1])}, but got {tuple(bias.shape)}."
            )
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk must be a positive number of tokens, but got {self.chunk}.")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(
                f"label_smoothing must be between 0 and 1, but got {self.label_smoothing}."
            )
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap must be positive, but got {self.softcap}.")

    @staticmethod
    def product_dtype(hidden: Tensor) -> torch.dtype:
        """Return the precision of the product, which autocast may lower, but not from float64."""
        kind = hidden.device.type
        if hidden.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
            return hidden.dtype
        return torch.get_autocast_dtype(kind)

    def logits(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return (..., words), in single precision or wider."""
        found = rows @ weight.mT
        if bias is not None:
            found = found + bias
        found = found if found.dtype in WIDE else found.float()
        return found if self.softcap is None else (found / self.softcap).tanh_() * self.softcap

    def losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each row, and the logarithm of what its softmax divides by."""
        totals = logits.logsumexp(-1)
        real = labels != self.ignore_index
        own = logits.gather(-1, labels.where(real, 0).unsqueeze(-1)).squeeze(-1)
        found = totals - own
        if self.label_smoothing:
            even = totals - logits.mean(-1)
            found = found.lerp(even, self.label_smoothing)
        return found.where(real, 0.0), totals

    def deltas(
        self,
        logits: Tensor,
        totals: Tensor,
        labels: Tensor,
        scale: Tensor,
        words: int,
        start: int = 0,
        hits: Tensor | None = None,
    ) -> Tensor:
        """Return the gradient by the product, of losses times `scale`; overwrites the logits.

        Args:
            logits: (..., some words).
            totals: As `losses` returned them.
            labels: One for each row.
            scale: One number for each row; 0 for rows without a loss.
            words: The size of the vocabulary.
            start: The first of these words.
            hits: Where a word is the label, if they do not follow one another.
        """
        slope = None if self.softcap is None else 1 - (logits / self.softcap).square_()
        found = logits.sub_(totals.unsqueeze(-1)).exp_()
        if self.label_smoothing:
            found -= self.label_smoothing / words
        if hits is not None:
            found.sub_(hits, alpha=1 - self.label_smoothing)
        else:
            place, here = labels - start, found.shape[-1]
            hit = ((place >= 0) & (place < here)).to(found.dtype) * (self.label_smoothing - 1)
            found.scatter_add_(-1, place.clamp(0, here - 1).unsqueeze(-1), hit.unsqueeze(-1))
        if slope is not None:
            found *= slope
        return found.mul_(scale.unsqueeze(-1))

    def chunks(self, rows: int, words: int) -> Iterator[slice]:
        """Yield slices of rows whose logits are computed at once."""
        step = max(1, ELEMENTS // max(1, words)) if self.chunk is None else self.chunk
        return (slice(start, min(start + step, rows)) for start in range(0, rows, step))

    def forward(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, slopes: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the losses of rows, their totals and, if wanted, their gradients by hidden."""
        words = len(weight)
        found, slope = [], torch.empty_like(hidden) if slopes else None
        for part in self.chunks(len(hidden), words):
            logits = self.logits(hidden[part], weight, bias)
            losses, totals = self.losses(logits, labels[part])
            found.append((losses, totals))
            if slope is not None:
                real = (labels[part] != self.ignore_index).to(logits.dtype)
                deltas = self.deltas(logits, totals, labels[part], real, words)
                torch.matmul(deltas.to(hidden.dtype), weight, out=slope[part])
        if not found:
            nothing = hidden.new_zeros(0, dtype=hidden.dtype if hidden.dtype in WIDE else None)
            return nothing, nothing, slope
        losses, totals = (torch.cat(each) for each in zip(*found, strict=True))
        return losses, totals, slope


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        head: Head,
        dtype: torch.dtype,
    ) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            h, w = hidden.to(dtype), weight.to(dtype)
            b = None if bias is None else bias.to(dtype)
            losses, totals, slope = head.forward(h, w, b, labels, ctx.needs_input_grad[0])
        # of a frozen head, the rest is known already
        again = (h, w, b) if any(ctx.needs_input_grad[1:3]) else (None, None, None)
        ctx.save_for_backward(*again, labels, totals, slope)
        ctx.head, ctx.types = head, [None if t is None else t.dtype for t in (hidden, weight, bias)]
        return losses

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph=True: these gradients would be constants
            raise RuntimeError(
                "chunked_cross_entropy cannot be differentiated twice, as create_graph=True asks "
                "for (gradient penalties, Hessians). Use torch.nn.functional.cross_entropy with a "
                "table of logits there."
            )
        hidden, weight, bias, labels, totals, slope = ctx.saved_tensors
        by_hidden, by_weight, by_bias = ctx.needs_input_grad[:3]
        found: list[Tensor | None] = [None, None, None]
        if by_hidden:
            found[0] = slope.mul(d.unsqueeze(1)).to(ctx.types[0])
        if by_weight or by_bias:
            head, words = ctx.head, len(weight)
            wide = totals.dtype
            sums = torch.zeros(weight.shape, dtype=wide, device=weight.device)
            shifts = sums.new_zeros(words)
            for part in head.chunks(len(hidden), words):
                logits = head.logits(hidden[part], weight, bias)
                scale = (d[part] * (labels[part] != head.ignore_index)).to(wide)
                deltas = head.deltas(logits, totals[part], labels[part], scale, words)
                sums.addmm_(deltas.mT, hidden[part].to(wide))
                shifts += deltas.sum(0)
            found[1] = sums.to(ctx.types[1]) if by_weight else None
            found[2] = shifts.to(ctx.types[2]) if by_bias else None
        return (*found, None, None, None)
