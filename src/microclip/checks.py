"""Checks of how a Clipper is used: its settings, the arguments of `fold()`, the training loop.

What cannot be right is refused, with the value found and the remedy. `Mistakes` detects what gives
a wrong gradient without an error, and warns about each once per Clipper: it looks at `.grad`, at
the graphs of losses and at the shapes that modules receive. Nothing here runs a model or changes a
result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from microclip import multitensor
from microclip.batches import tensors_of
from microclip.microbatches import Ids, MicrobatchList, check_size
from microclip.rules import ExampleRule, Rule
from microclip.user_warnings import warn

if TYPE_CHECKING:
    from microclip.engines.single_pass.verify import Verify

# a sum over one of these is not a sum over examples
NO_EXAMPLES = frozenset(f"{name}Backward0" for name in ("Stack", "Cat", "Mul"))
SUM = 2  # how autograd saves reduction="sum"

# nodes of autograd graphs that take a mean
MEANS = frozenset(
    f"{name}Backward0"
    for name in (
        "Mean", "NllLoss", "NllLoss2D", "MseLoss", "SmoothL1Loss", "HuberLoss",
        "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "SoftMarginLoss",
        "MultiMarginLoss", "MultilabelMarginLoss",
    )
)  # fmt: skip


def check_model(model: object) -> None:
    """Refuse what is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Clipper needs the model, a torch.nn.Module, but got {type(model).__name__}. "
            "Put several modules into one torch.nn.ModuleList."
        )


def check_rule(rule: object) -> None:
    """Refuse what is not an instance of a rule, such as its class."""
    if not isinstance(rule, Rule):
        raise TypeError(
            f"rule must be an instance of a Rule, such as microclip.rules.MinNorm(), but got "
            f"{rule!r}."
        )


def check_example_rule(rule: Rule, microbatch_size: object, scope: str) -> None:
    """Refuse settings that do not work with a rule that weights examples."""
    if not isinstance(rule, ExampleRule):
        return
    name = type(rule).__name__
    if rule.needs_norms and microbatch_size != 1:
        raise ValueError(
            f"{name} needs the gradient norm of every example: pass microbatch_size=1 instead of "
            f"{microbatch_size!r}, or use LossHistory."
        )
    if scope == "world":
        raise ValueError(
            f'{name} weights the examples of each rank, but with scope="world" a micro-batch spans '
            'all ranks. Use scope="rank".'
        )


def check_ledger(ledger: object) -> None:
    """Refuse what cannot record, such as a path."""
    if ledger is not None and not hasattr(ledger, "record"):
        raise TypeError(
            f"ledger must be a microclip.Ledger, but got {ledger!r}. "
            "Pass ledger=microclip.Ledger(path)."
        )


def check_choice(what: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not one of a few."""
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{what} must be one of {choices}, but got {value!r}.")


def check_budget(memory_budget: object) -> int | None:
    """Return a valid number of bytes, or None."""
    if memory_budget is None:
        return None
    if not isinstance(memory_budget, int) or isinstance(memory_budget, bool) or memory_budget <= 0:
        raise ValueError(
            f"memory_budget must be a positive number of bytes or None, but got {memory_budget!r}. "
            "For two gibibytes, pass 2 * 2**30."
        )
    return memory_budget


def check_verify(verify: object) -> Verify:
    """Return a valid frequency of checks."""
    if verify in ("rarely", "always", "never"):
        return cast("Verify", verify)
    if isinstance(verify, int) and not isinstance(verify, bool) and verify > 0:
        return verify
    raise ValueError(
        f'verify must be "rarely", "always", "never" or a positive number of steps, but got '
        f"{verify!r}."
    )


def check_loss_fn(loss_fn: object) -> None:
    """Refuse what cannot be called, such as a loss."""
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn must be a function from a micro-batch to its loss, but got "
            f"{type(loss_fn).__name__}. Clipping needs the loss of every micro-batch, not that of "
            "the whole batch: call backward(loss_fn, batch) instead of backward(loss)."
        )


def check_fold_arguments(
    loss_fn: object,
    chunk: object,
    domains: object,
    size: object,
    loss: object,
    loss_scale: object,
    domain: object,
) -> None:
    """Refuse arguments of one way to call `fold()` together with those of the other."""
    if loss_fn is None:
        if chunk is not None or domains is not None:
            raise TypeError("fold() with a chunk or domains needs loss_fn: fold(loss_fn, chunk).")
    elif size is not None or loss is not None or domain is not None or loss_scale != 1:
        raise TypeError(
            "size, loss, loss_scale and domain are for fold() after your own backward; "
            "fold(loss_fn, chunk) works them out itself. Did you mean domains=?"
        )


def check_own_backward(
    size: object, loss: Any, loss_scale: object, domain: object
) -> Tensor | None:
    """Check the arguments of `fold()` after a backward pass; return the loss as a tensor."""
    if not isinstance(loss_scale, int | float) or not 0 < loss_scale < math.inf:
        raise ValueError(
            f"loss_scale must be the positive number that the loss was multiplied by, but got "
            f"{loss_scale!r}. For a loss divided by 8 it is 1 / 8."
        )
    if isinstance(loss, int | float):
        loss = torch.tensor(float(loss))
    if loss is not None and not isinstance(loss, Tensor):
        raise TypeError(f"loss must be a tensor or a number, but got {type(loss).__name__}.")
    if not isinstance(domain, Hashable):
        raise TypeError(
            f"domain must be a hashable label, such as a string or a number, but got {domain!r}."
        )
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ValueError(
            f"size must be a positive integer, the number of examples folded, but got {size!r}."
        )
    return loss


def check_streams(rule: Rule, engine: str) -> None:
    """Refuse rules and engines that need the examples, where there are only gradients."""
    if engine in ("two_pass", "fused") or not rule.streams:
        raise RuntimeError(
            f"These gradients were computed by a backward pass of their own, but {rule!r} with "
            f'engine={engine!r} needs the examples. Use engine="stream" or "auto" with a rule that '
            "streams, or backward(loss_fn, batch) or fold(loss_fn, chunk). In a Trainer, this "
            "happens to packed batches and to micro-batches of several batches."
        )


def size_and_ids(size: int | None, ids: Ids | None) -> tuple[int, tuple[Hashable, ...]]:
    """Return the size of a micro-batch and its ids, which may both have been left out."""
    names = () if ids is None else tuple(ids.tolist() if isinstance(ids, Tensor) else ids)
    count = check_size(size) or len(names) or 1
    if names and len(names) != count:
        raise ValueError(f"The micro-batch has {count} examples, but ids has {len(names)}.")
    return count, names


def check_shape(loss: Tensor | None, size: int) -> None:
    """Refuse a loss that is neither a mean nor one loss per example."""
    if loss is not None and loss.numel() != 1 and loss.shape != (size,):
        raise ValueError(
            f"loss must be the mean, or one loss for each of {size} examples, but has the shape "
            f"{tuple(loss.shape)}."
        )


def check_losses(losses: object, ids: Ids | None) -> tuple[Hashable, ...]:
    """Return the ids of examples, if given; refuse what is not one loss per example."""
    if not isinstance(losses, Tensor) or losses.dim() != 1 or not len(losses):
        shown = tuple(losses.shape) if isinstance(losses, Tensor) else repr(losses)
        raise ValueError(
            "weighted_loss() needs a vector with one loss per example, as with "
            f'reduction="none", but got {shown}.'
        )
    return size_and_ids(len(losses), ids)[1]


def check_gradients_exist(parameters: dict[str, nn.Parameter]) -> None:
    """Refuse a `fold()` before any backward pass."""
    if all(parameter.grad is None for parameter in parameters.values()):
        raise RuntimeError(
            "fold() found no gradient: every parameter's .grad is None. Call loss.backward() "
            "first, and fold() once after each."
        )


def check_same_parameters(model: nn.Module, trained: dict[str, nn.Parameter]) -> None:
    """Refuse a part of a step that trains other parameters than the first part."""
    now = {id(p) for p in model.parameters() if p.requires_grad}
    if now == {id(parameter) for parameter in trained.values()}:
        return
    changed = [name for name, p in model.named_parameters() if p.requires_grad != (name in trained)]
    raise RuntimeError(
        f"requires_grad of parameter {changed[0]!r} has changed since the first fold() of this "
        "step, so its gradient would not be clipped with the others. Freeze and unfreeze between "
        "finish() and the next fold()."
        if changed
        else "The model's parameters were replaced after the first fold() of this step. Change "
        "the model between finish() and the next fold()."
    )


class Mistakes:
    """Detects mistakes in the steps of one Clipper."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._told: set[str] = set()
        self._repeats = False  # whether the batch repeats an example
        self._smallest: nn.Parameter | None = None  # the parameter whose gradient is checked
        self._deposited: Tensor | None = None  # its gradient after the last step

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warn(message)

    def at_start(self, step: int) -> None:
        """Detect gradients of the previous step, to which this step's would be added."""
        if step == 0 or step & (step + 1) or self._smallest is None:
            return
        gradient = self._smallest.grad
        if gradient is None or gradient is not self._deposited:
            return
        if multitensor.on_host(gradient) and bool(gradient.any()):
            self._tell(
                "not empty",
                "`.grad` still holds the gradient of the previous step, and this step's is added "
                "to it. Call optimizer.zero_grad() before each backward(). To combine several "
                "batches into one step, call fold(loss_fn, batch) for each and finish() once: only "
                "then are they clipped together.",
            )

    def after(self, parameters: dict[str, nn.Parameter]) -> None:
        """Remember the gradient of the smallest parameter, which takes little memory."""
        if self._smallest is None or self._smallest.grad is None:
            reached = [p for p in parameters.values() if p.grad is not None]
            self._smallest = min(reached, key=Tensor.numel, default=None)
        self._deposited = None if self._smallest is None else self._smallest.grad

    def equal_losses(self, losses: Tensor | None, norms: Tensor, step: int) -> None:
        """Detect micro-batches that all have the same loss and gradient norm."""
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
        """Detect a mean loss that was divided by a number of steps, or by `parts` if given."""
        inner, divisor = _division(loss)
        if inner is None or inner.name() not in MEANS or _is_sum(inner):
            return
        if parts is not None and divisor != parts:
            return
        shown = "" if divisor is None else f" by {divisor:.6g}"
        self._tell(
            "divided",
            f"The loss is a mean that was divided{shown}. If that is the number of accumulation "
            "steps, the gradient comes out too small by that factor, because finish() already "
            "takes the mean over micro-batches. Do not divide, or pass fold(loss_scale=1 / steps).",
        )

    def in_batch(self, microbatches: MicrobatchList, step: int) -> None:
        """Detect values that are passed on whole but seem to belong to the examples."""
        if step & (step + 1) or len(microbatches) < 2:
            return
        one, other = (list(tensors_of(each.batch)) for each in microbatches[:2])
        pairs = zip(one, other, strict=True)
        self._repeats = all(
            multitensor.on_host(a) and torch.equal(a, b) for (_, a), (_, b) in pairs
        )
        for name, count in microbatches.numbers_per_example:
            self._tell(
                "whole",
                f"{name} holds {count} numbers, one per example, but is not a tensor, so loss_fn "
                "gets all of them with every micro-batch. Make it a tensor, which is cut together "
                "with the examples.",
            )

    def in_loss(self, loss: Tensor, size: int, microbatches: MicrobatchList) -> None:
        """Detect a loss that is not the mean over the examples of its micro-batch.

        Args:
            loss: The loss of a micro-batch.
            size: The size of that micro-batch.
            microbatches: All micro-batches of the batch.
        """
        examples = microbatches.examples
        self.divided(loss, len(microbatches))
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

    def watching(self, microbatches: MicrobatchList, step: int) -> AbstractContextManager[None]:
        """Inside the block, in the first step, detect sequences that were cut along time."""
        if step or len(microbatches) < 2:
            return nullcontext()
        counts = {*microbatches.sizes, microbatches.examples}
        return watch_for_time_first(self._model, counts, partial(self._tell, "time first"))


@contextmanager
def watch_for_time_first(
    model: nn.Module, counts: set[int], warn: Callable[[str], None]
) -> Iterator[None]:
    """Warn if a recurrent or attention layer that takes time first is given examples first.

    Args:
        model: The model that runs inside the block.
        counts: The numbers of examples that it may be given at once.
        warn: Called with the message at the end of the block.
    """
    found: list[tuple[str, tuple[int, ...]]] = []

    def look(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        given = args[0] if args else kwargs.get("input", kwargs.get("query"))
        if isinstance(given, Tensor) and given.dim() == 3:
            time, examples = given.shape[:2]
            if time in counts and examples not in counts:
                found.append((name, tuple(given.shape)))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first:
                label = f"{type(module).__name__} {name!r}"
                hook = module.register_forward_pre_hook(partial(look, label), with_kwargs=True)
                hooks.enter_context(hook)
        yield
    if found:
        name, shape = found[0]
        warn(
            f"{name} has batch_first=False and got a tensor of shape {shape}, so what was counted "
            f"as {shape[0]} examples seems to be time. If your batches have time first, pass "
            "batch_dim=1; if examples do come first, build the layer with batch_first=True."
        )


def _division(loss: Tensor) -> tuple[Any, float | None]:
    """Return the graph node that was divided, and the divisor; None if there is no division."""
    node: Any = loss.grad_fn
    if node is None or node.name() != "DivBackward0":
        return None, None
    try:
        divisor = getattr(node, "_saved_other", None)
    except RuntimeError:  # saved tensors are freed after a backward pass
        divisor = None
    number = divisor.item() if isinstance(divisor, Tensor) and divisor.numel() == 1 else None
    return node.next_functions[0][0], number


def _is_sum(node: Any, size: int | None = None) -> bool:
    """Whether a graph node is a sum; if `size` is given, also a sum over that many examples."""
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
