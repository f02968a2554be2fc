"""Per-example losses of code that averages them: which of torch's loss functions did it call?

Inside a block, the calls of torch's loss functions are seen and made just as they are. The same
function, with reduction="none" and without a graph, then gives the losses of the examples. Knows
nothing of ids or ledgers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

CLASSES = (F.cross_entropy, F.nll_loss)
NUMBERS = (
    F.binary_cross_entropy_with_logits,
    F.binary_cross_entropy,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.kl_div,
)
SIGNATURES = {function: inspect.signature(function) for function in (*CLASSES, *NUMBERS)}


@dataclass(frozen=True)
class LossCall:
    """One call of a loss function: a loss per row, and what a classifier predicted."""

    name: str
    losses: Tensor
    logits: Tensor | None
    labels: Tensor | None


class LossCalls(TorchFunctionMode):
    """Inside the block, collects the calls of torch's loss functions that are differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LossCall] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if func in SIGNATURES and isinstance(result, Tensor) and result.requires_grad:
            with torch.no_grad():
                found = _read(func, SIGNATURES[func].bind(*args, **(kwargs or {})))
            if found is not None:
                self.calls.append(found)
        return result

    def of(self, count: int) -> LossCall:
        """Return the only call that has a loss for each of so many examples."""
        found = [call for call in self.calls if len(call.losses) == count]
        if len(found) == 1:
            return found[0]
        seen = ", ".join(f"{call.name} of {len(call.losses)} rows" for call in self.calls)
        raise ValueError(
            f"The losses of {count} examples must come from one call of a loss function of torch "
            f"(cross_entropy, mse_loss, ...), but {seen or 'none'} was called here, with a result "
            "to differentiate. Compute one loss per example and record it: ledger.record(ids, "
            "losses)."
        )


def _read(func: Callable[..., Any], bound: inspect.BoundArguments) -> LossCall | None:
    """Return what a call says about each row; None if it has no rows."""
    given = bound.arguments
    scores, target = given["input"].detach(), given["target"].detach()
    if scores.dim() == 0 or len(scores) != len(target):
        return None
    for name in ("size_average", "reduce"):  # deprecated; they would override the reduction
        given.pop(name, None)
    given |= {"input": scores, "target": target, "reduction": "none"}
    each: Tensor = func(*bound.args, **bound.kwargs)
    logits = labels = None
    if func in CLASSES:
        if not target.is_floating_point():
            counts = (target != given.get("ignore_index", -100)).reshape(len(target), -1).sum(1)
            losses = each.reshape(len(each), -1).sum(1) / counts.clamp(min=1)
            if scores.dim() == 2:
                logits, labels = scores, target
        else:
            losses = each.reshape(len(each), -1).mean(1)
    else:
        losses = each.reshape(len(each), -1).mean(1)
        if func is F.binary_cross_entropy_with_logits and losses.numel() == target.numel():
            logits, labels = scores, target
    return LossCall(func.__name__, losses, logits, labels)
