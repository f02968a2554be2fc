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
LOSSES = (
    *CLASSES,
    F.binary_cross_entropy_with_logits,
    F.binary_cross_entropy,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.kl_div,
    F.gaussian_nll_loss,
    F.poisson_nll_loss,
    F.soft_margin_loss,
    F.multi_margin_loss,
    F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss,
    F.hinge_embedding_loss,
    F.cosine_embedding_loss,
    F.margin_ranking_loss,
    F.triplet_margin_loss,
    F.triplet_margin_with_distance_loss,
    F.ctc_loss,
)
SIGNATURES = {function: inspect.signature(function) for function in LOSSES}
REMEDY = "Compute one loss per example and record it: ledger.record(ids, losses)."


@dataclass(frozen=True, eq=False)
class LossCall:
    """One call of a loss function: a loss per row, and what a classifier predicted.

    Attributes:
        name: Of the function.
        losses: What it would return for each row alone, with reduction="mean".
        counts: Which rows have targets that count; None if all do.
        target: As it was passed, None if the function has none.
        logits: Of a classifier with one class per row.
        labels: The same.
        shape: Of what was returned with reduction="none", if it has several values per row.
        node: Of the result, in the graph.
    """

    name: str
    losses: Tensor
    counts: Tensor | None = None
    target: Tensor | None = None
    logits: Tensor | None = None
    labels: Tensor | None = None
    shape: tuple[int, ...] | None = None
    node: Any = None


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
                bound = SIGNATURES[func].bind(*args, **(kwargs or {}))
                found = _read(func, bound, result.grad_fn)
            if found is not None:
                self.calls.append(found)
        return result

    def of(self, count: int, loss: Tensor | None = None, remedy: str = REMEDY) -> LossCall:
        """Return the only call, which must have a loss for each of so many examples.

        Given the loss that is differentiated, calls that it does not depend on are left out, and
        it must not have parts that are no call.
        """
        if not count:
            return LossCall("nothing", torch.empty(0))
        calls, whole = self.calls, True
        if loss is not None and loss.grad_fn is not None:
            calls, whole = _parts(loss, calls)
        if whole and len(calls) == 1 and len(calls[0].losses) == count:
            if calls[0].shape is None:
                return calls[0]
            raise ValueError(
                f'{calls[0].name} was called with reduction="none" and returned several values per '
                f"example, shape {calls[0].shape}: which of them count, such as those that are not "
                f"padding, is decided later. {remedy}"
            )
        seen = ", ".join(f"{call.name} of {len(call.losses)} rows" for call in calls) or "none"
        if calls and not whole:
            seen = "the loss also has parts that do not, and " + seen
        raise ValueError(
            f"The losses of {count} examples must come from one call of a loss function of torch "
            f"(cross_entropy, mse_loss, ...), but {seen} was called here, with a result to "
            f"differentiate. {remedy}"
        )


def _parts(loss: Tensor, calls: list[LossCall]) -> tuple[list[LossCall], bool]:
    """Return the calls that a loss depends on, and whether everything else in it is constant."""
    of_node = {call.node: call for call in calls}
    waiting, visited, whole = [loss.grad_fn], set(), True
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node not in of_node:
            whole = whole and bool(node.next_functions)  # without any: a parameter
            waiting.extend(following for following, _ in node.next_functions)
    return [call for call in calls if call.node in visited], whole


def _read(func: Callable[..., Any], bound: inspect.BoundArguments, node: Any) -> LossCall | None:
    """Return what a call says about each row; None if it has no rows."""
    given = bound.arguments
    for name, value in given.items():
        if isinstance(value, Tensor):
            given[name] = value.detach()
    reduction = "none" if given.get("reduce") is False else given.get("reduction", "mean")
    for name in ("size_average", "reduce"):  # deprecated; they would override the reduction
        given.pop(name, None)
    scores, target = given.get("input"), given.get("target")
    if func in CLASSES and given["input"].dim() == 1:  # one example, not a batch
        scores, target = given["input"][None], given["target"][None]
        given |= {"input": scores, "target": target}
    if not _alike(scores, target):
        return None
    given["reduction"] = "none"
    each: Tensor = func(*bound.args, **bound.kwargs)
    if each.dim() == 0 or not each.numel():
        return None
    rows = each.to(torch.promote_types(each.dtype, torch.float32)).reshape(len(each), -1)
    several = reduction == "none" and rows.shape[1] > 1
    losses, counts, logits, labels = rows.mean(1), None, None, None
    if func in CLASSES and target is not None and not target.is_floating_point():
        shares = _shares(target, given).reshape(len(target), -1).to(rows).sum(1)
        counts = shares > 0
        losses = rows.sum(1) / torch.where(counts, shares, 1)
        if scores is not None and scores.dim() == 2:
            logits, labels = scores, target
    elif func is F.ctc_loss:
        lengths = torch.as_tensor(given["target_lengths"], device=rows.device)
        losses = losses / lengths.clamp(min=1)
    elif func is F.binary_cross_entropy_with_logits and len(rows) == rows.numel():
        logits, labels = given["input"].flatten(), given["target"].flatten()
    return LossCall(
        func.__name__, losses, counts, target, logits, labels,
        tuple(each.shape) if several else None, node,
    )  # fmt: skip


def _alike(scores: Tensor | None, target: Tensor | None) -> bool:
    """Whether these have rows, and as many as each other; None is what a function does not take."""
    lengths = {each.shape[:1] for each in (scores, target) if each is not None}
    return len(lengths) < 2 and torch.Size() not in lengths


def _shares(target: Tensor, given: dict[str, Any]) -> Tensor:
    """Return how much each class counts in the mean: its weight, nothing if it is ignored."""
    counted = target.ne(given.get("ignore_index", -100))
    weight: Tensor | None = given.get("weight")
    return counted if weight is None else weight[counted * target].mul(counted)
